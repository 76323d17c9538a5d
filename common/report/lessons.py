"""What each technique buys and costs at a real size, counted in dry runs.

    lessons.py LESSONS PROGRAMS LOGS [--gpu NAME] [--table] [WORDS]

LESSONS (tests/lessons.txt) has the runs, a table of some of them, and the lessons: each a sentence and an
inequality between numbers of the runs. PROGRAMS is the folder of a bf16 build; a log of each run goes to the
folder LOGS. --table prints the table; otherwise each lesson is printed with its numbers (WORDS: those whose
sentence has them), and the status is 1 if one does not hold with the default GPU."""

import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import subprocess
import sys

import runs as logs

ROOT = pathlib.Path(__file__).parents[2]
PROFILES = ROOT / "common" / "clock" / "profiles"
COMMON = ["--attention", "tensor-core", "--steps", "2", "--dry-run"]
TERM = re.compile(r"(\w+)\(([\w-]+)\)")


def fields_of(gpu):
    """The fields of a shipped profile, those that it takes from another one included."""
    own = json.loads((PROFILES / f"{gpu}.json").read_text())
    return (fields_of(own["as"]) if "as" in own else {}) | own


def percent(value):
    return f"{100 * value:.0f} %"


# What a lesson can ask of a run, and how it is printed: of a step from the second on, and of the fullest
# rank. A share is between 0 and 1; waits: seconds in which nothing is computed, for whatever stream; idle:
# their share.
VALUES = {
    "step": (lambda run: run.step_seconds, logs.human_seconds),
    "memory": (lambda run: sum(run.memory("measured").values()), logs.human_bytes),
    "activations": (lambda run: run.memory("measured")["activations"], logs.human_bytes),
    "sent": (lambda run: run.sent_bytes, logs.human_bytes),
    "waits": (lambda run: run.modelled["seconds"] - run.modelled["compute_seconds"], logs.human_seconds),
    "hidden": (lambda run: run.modelled["hidden"], percent),
    "idle": (lambda run: value("waits", run) / run.modelled["seconds"], percent),
    "mfu": (lambda run: run.modelled["mfu"], lambda value: f"{100 * value:.1f} %"),
}


def value(what, run):
    return VALUES[what][0](run)


def printed(what, run):
    return VALUES[what][1](value(what, run))


class Lessons:
    """The file: a word and its text in each line; what follows a run or a lesson belongs to it."""

    def __init__(self, path):
        self.commands, self.rows, self.lessons = (
            {},
            [],
            [],
        )  # by name; headings, and (run, sentence); (sentence, inequality)
        bases = {}
        for number, line in enumerate(pathlib.Path(path).read_text().splitlines(), 1):
            word, _, text = line.partition(" ")
            text = text.strip()
            if word == "base":
                name, _, bases["@" + name] = text.partition(" ")
            elif word == "run":
                name, ranks, program, *options = text.split()
                options = " ".join(bases.get(option, option) for option in options).split()
                self.commands[name] = [ranks, program, *options]
            elif word == "table":
                self.rows.append(text)
            elif word == "row":
                self.rows.append((name, text))
            elif word == "lesson":
                sentence = text
            elif word == "holds":
                self.lessons.append((sentence, text))
            elif line and word != "#":
                raise logs.Refused(
                    f"{path}:{number}: {word}; expected base, run, table, row, lesson or holds"
                )
        for what, name in TERM.findall(str(self.lessons)):
            try:
                VALUES[what], self.commands[name]
            except KeyError:
                raise logs.Refused(
                    f"{path}: {what}({name}); expected one of {', '.join(VALUES)} of a run above"
                ) from None

    def texts_of_rows(self):
        return [f"row({row[0]}) {row[1]}" for row in self.rows if not isinstance(row, str)]

    def names(self, texts):
        """The runs that these texts name."""
        return {name for text in texts for _, name in TERM.findall(text)}


def dry_run(name, command, programs, folder, profile):
    """The run. Throws Refused, as its program refuses it."""
    ranks, program, *options = command
    log = folder / f"{name}.jsonl"
    words = [
        "mpirun",
        "-n",
        ranks,
        programs / program,
        *COMMON,
        *options,
        "--gpu",
        profile,
        "--log-json",
        log,
    ]
    logs.output_of(*words)
    return logs.Run(log)


def roomy(gpu, folder, factors=(), flash=False):
    """A profile of this GPU with more memory than any run needs, so that what does not fit has numbers, too.
    (name, factor): what other numbers of it are multiplied by. flash: with FlashAttention-2 in place of our
    attention, and in fp8 with a scale for a tensor, where ours and DeepSeek's (h800) have one for a block."""
    numbers = fields_of(gpu)
    numbers["memory_bytes"]["value"] = 1e15
    numbers["flash_attention"] = {"value": int(flash)}
    if flash and gpu != "h800":
        numbers["product_achievable_fp8"] = {"value": 0}  # as the others
    for name, factor in factors:
        if name in numbers:
            numbers[name]["value"] *= factor
    profile = folder / f"{gpu}.profile"
    profile.write_text(json.dumps(numbers))
    return profile


def fits(run, gpu):
    """Whether each rank of the run needs no more than this GPU's memory."""
    memory = fields_of(gpu)["memory_bytes"]["value"]
    return all(
        sum(r["measured"].values()) + r["libraries"]["estimated"] <= memory for r in run.summary["memory"]
    )


def all_runs(lessons, names, programs, folder, gpu):
    """By name."""
    folder.mkdir(parents=True, exist_ok=True)
    profile = roomy(gpu, folder)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        started = {
            n: pool.submit(dry_run, n, lessons.commands[n], programs, folder, profile) for n in sorted(names)
        }
        return {name: run.result() for name, run in started.items()}


def filled(text, runs, name=""):
    """{step} is that of the row's run, {step(other)} that of another."""

    def number(match):
        what, _, other = match[1].partition("(")
        return printed(what, runs[other.rstrip(")") or name])

    return re.sub(r"{([\w()-]+)}", number, text)


COLUMNS = ["memory", "step", "mfu", "sent", "hidden", "idle"]


def table(lessons, runs):
    """Rows of words: a heading alone, or name, ranks, (!) where it does not fit, the numbers, the
    sentence."""
    gpu = pathlib.Path(next(iter(runs.values())).options["gpu"]).stem
    rows = [["", "ranks", "", *COLUMNS, f"counted for {gpu} GPUs: nothing is computed"]]
    for row in lessons.rows:
        if isinstance(row, str):
            rows.append([row])
            continue
        run = runs[row[0]]
        cells = [printed(column, run) for column in COLUMNS]
        rows.append(
            [row[0], str(run.ranks), "" if fits(run, gpu) else "(!)", *cells, filled(row[1], runs, row[0])]
        )
    return rows


HOW_TO_READ = """memory: of the fullest rank at the peak; (!) does not fit, and the rest is what it would be. sent: by a rank in a step.
hidden: share of the communication during which a GPU computes. idle: share of the step in which it does not."""


def print_table(rows):
    print("\nThe same layouts at a real size")
    logs.print_wrapped(HOW_TO_READ + "\n")
    width = logs.width_of_output()
    for name, *words in rows:
        if not words:
            print(f"-- {name}")
            continue
        ranks, fits, *cells, sentence = words
        shown = cells[: (width - 26) // 10]  # the last columns are left out where the terminal is narrow
        numbers = f"{name:17}{ranks:>5}{fits:>4}" + "".join(f"{cell:>10}" for cell in shown) + "  "
        if len(numbers + sentence) <= width:
            print(numbers + sentence)
        else:
            print(numbers)
            logs.print_wrapped("  " + sentence, "  ")


def print_lessons(lessons, runs, other_gpu):
    """Whether what holds with the default GPU does not. With another one it need not."""
    fault = f"NOT WITH {other_gpu}: " if other_gpu else "FAILED: "
    failed = 0
    for sentence, inequality in lessons:
        terms = dict.fromkeys(TERM.findall(inequality))  # in order, each once
        holds = eval(TERM.sub(lambda m: repr(value(m[1], runs[m[2]])), inequality), {})
        numbers = ", ".join(f"{what}({name}) {printed(what, runs[name])}" for what, name in terms)
        logs.print_wrapped(f"{'' if holds else fault}{filled(sentence, runs)}")
        logs.print_wrapped(f"    {inequality}: {numbers}", "    ")
        failed += not holds
    good = len(lessons) - failed
    print(
        f"{good} hold with {other_gpu}, {failed} do not" if other_gpu else f"{good} passed, {failed} failed"
    )
    return failed > 0 and not other_gpu


def main():
    parse = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parse.add_argument("lessons")
    parse.add_argument("programs", type=pathlib.Path)
    parse.add_argument("logs", type=pathlib.Path)
    parse.add_argument("--gpu", default="h100")
    parse.add_argument("--table", action="store_true")
    parse.add_argument("words", nargs="?", default="")
    given = parse.parse_intermixed_args()
    if not (PROFILES / f"{given.gpu}.json").exists():
        raise logs.Refused(f"GPU: {given.gpu} is not valid; expected a name from {PROFILES}")
    lessons = Lessons(given.lessons)
    wanted = [pair for pair in lessons.lessons if given.words in pair[0]]
    if not wanted:
        raise logs.Refused(f"no lesson says {given.words}; make lessons prints them all")
    texts = [] if given.words else lessons.texts_of_rows()
    other_gpu = given.gpu if given.gpu != parse.get_default("gpu") else ""
    if not given.table:
        texts += [text for pair in wanted for text in pair]
    runs = all_runs(lessons, lessons.names(texts), given.programs, given.logs, given.gpu)
    if given.table:
        return print_table(table(lessons, runs))
    return print_lessons(wanted, runs, other_gpu)


if __name__ == "__main__":
    logs.end_in_one_line(lambda: sys.exit(main()))
