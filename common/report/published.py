"""The runs that others published, beside folded dry runs of them:  published.py RUNS BUILD [WORDS]

RUNS (published.txt beside this file) has a run in each line that begins with run, and what belongs to it
below. BUILD has cpu-bf16 and cpu-fp8, each with 07_combined_5d. Prints a table, the reasons of large errors,
and the mean; WORDS: only runs whose name has them, and their memory. (!): ours needs more memory than the GPU
has. To look for a reason, --scale NAME=X multiplies a number of the GPUs' profiles, and --add OPTIONS adds to
the commands. --check NOTE instead holds the rows of NOTE's table against RUNS: each command must be accepted,
those of bf16 that one process can run must give the row, and a large error has a reason."""

import argparse
import concurrent.futures
import json
import pathlib
import re
import sys
import tempfile
import textwrap

import lessons
import runs as logs

# What was published, of the second step: how we get it of ours, whether more is faster, how it is printed,
# and its unit.
UNITS = {
    "s": (lambda run: run.step_seconds, False, "{:.2f}", "s"),
    "tokens/s": (
        lambda run: run.steps[-1]["tokens"] / UNITS["s"][0](run) / run.ranks,
        True,
        "{:,.0f}",
        "tokens/s",
    ),
    "MFU": (lambda run: 100 * run.modelled["mfu"], True, "{:.1f}", "% MFU"),
    "TFLOP/s": (lambda run: UNITS["MFU"][0](run) * run.peak / 1e14, True, "{:.0f}", "TFLOP/s"),
    # With full recomputation counted as work: four passes in place of three.
    "HFU": (lambda run: 4 / 3 * UNITS["MFU"][0](run), True, "{:.1f}", "% HFU"),
}
HEAD = ["run", "GPUs", "layout", "published", "ours", "error"]


class Published:
    """A run: its name, how many GPUs, the precision, the GPU, number and unit, options; and words about
    it."""

    def __init__(self, words):
        self.name, gpus, self.precision, self.gpu, number, self.unit, *self.options = words
        self.gpus, self.number, self.source, self.differs, self.reason = int(gpus), float(number), "", "", ""

    def option(self, name, default):
        """The last one holds."""
        words = self.options[::-1]
        return words[words.index("--" + name) - 1] if "--" + name in words else default

    @property
    def layout(self):
        """In the planner's words. ZeRO-1 and micro-batches of one sequence are not named."""
        degrees = {axis: int(self.option(axis, 1)) for axis in ("tp", "cp", "pp", "ep")}
        data = self.gpus // (degrees["tp"] * degrees["cp"] * degrees["pp"])
        words = [f"{axis}{n}" for axis, n in {**degrees, "dp": data}.items() if n > 1]
        stage, rows = self.option("zero-stage", "1"), self.option("micro-batch-size", "1")
        words += ["zero" + stage] * (stage != "1") + ["mbs" + rows] * (rows != "1")
        schedule = self.option("pp-schedule", "")
        words += [schedule + self.option("vpp", "") * (schedule == "interleaved")]
        words += ["sp"] * ("--sequence-parallel" in self.options) + [self.option("recompute", "")]
        return " ".join(filter(None, words + ["fp8"] * (self.precision == "fp8")))

    def command(self, build, profile):
        program = build / f"cpu-{self.precision}" / "07_combined_5d"
        data = profile.parent / f"{self.name}.txt"  # the corpus, as often as a sequence needs it
        corpus = (lessons.ROOT / "common/corpus.txt").read_text()
        data.write_text(corpus * (1 + int(self.option("seq-len", 0)) // len(corpus)))
        try:
            return logs.folded(program, *self.options, "--steps", "2", "--ranks", self.gpus, "--dry-run", "--gpu", profile,
                               "--data", data)  # fmt: skip
        except logs.Refused as refused:
            raise logs.Refused(f"{self.name}: {refused}") from None

    def row(self, build, folder, profile):
        """Runs it. Words of the table, the error (our time / the published one - 1), and the memory in
        words."""
        log = folder / f"{self.name}.jsonl"
        logs.output_of(*self.command(build, profile), "--log-json", log)
        run = logs.Run(log)
        run.peak = json.loads(profile.read_text())["flops_bf16"]["value"]
        value, more_is_faster, printed, unit = UNITS[self.unit]
        ours = value(run)
        error = self.number / ours - 1 if more_is_faster else ours / self.number - 1
        numbers = [
            f"{printed.format(self.number)} {unit}",
            printed.format(ours) + " (!)" * (not lessons.fits(run, self.gpu)),
        ]
        words = [self.name, f"{self.gpus:,} {self.gpu}", self.layout, *numbers, f"{100 * error:+.0f} %"]
        return words, error, lessons.filled("{memory}", {"": run})


def read(path):
    """The runs of the file."""
    found, bases = [], {}
    for number, line in enumerate(pathlib.Path(path).read_text().splitlines(), 1):
        word, _, text = line.partition(" ")
        words = [option for name in text.split() for option in bases.get(name, [name])]
        if word == "base":
            bases["@" + words[0]] = words[1:]
        elif word == "run" and re.match(r"\S+ \d+ \S+ \S+ [\d.]+ (%s) " % "|".join(UNITS), " ".join(words)):
            found.append(Published(words))
        elif word in ("source", "differs", "reason") and found:
            setattr(found[-1], word, text.strip())
        elif line and word != "#":
            raise logs.Refused(
                f"{path}:{number}: {line[:40]}; expected base, run NAME GPUS PRECISION GPU NUMBER UNIT ..., "
                f"source, differs or reason; a unit is one of {', '.join(UNITS)}"
            )
    return found


def line_of(row):
    return "| " + " | ".join(row) + " |"


def check(published, build, folder, note):
    """Says what is wrong; whether something is."""
    lines, failed = pathlib.Path(note).read_text().splitlines(), 0
    for run in published:
        try:
            is_bf16, run.precision = (
                run.precision == "bf16",
                "bf16",
            )  # the build that is there; it takes all commands
            row = [line for line in lines if line.startswith(f"| {run.name} |")]
            wrong = "" if len(row) == 1 else f"{len(row)} rows in {note}, expected one"
            profile = lessons.roomy(run.gpu, folder, flash=True)
            if not wrong and run.command(build, profile)[2] == "1" and is_bf16:
                ours = line_of(run.row(build, folder, profile)[0])
                wrong = "" if ours in row else f"{row[0]} in {note}, and now\n    {ours}"
            if not wrong and abs(int(row[0].split()[-3])) > 15 and not run.reason:
                wrong = "expected a reason of so large an error"
            if not wrong and "https://" not in run.source:
                wrong = "expected a source with a link"
        except logs.Refused as refused:
            wrong = str(refused)
        failed += wrong != ""
        print(f"FAILED: {run.name}: {wrong}" if wrong else run.name)
    print(f"{len(published) - failed} passed, {failed} failed")
    return failed > 0


def factor(text):
    name, _, value = text.partition("=")
    if not isinstance(json.loads((lessons.PROFILES / "h100.json").read_text()).get(name), dict):
        raise logs.Refused(
            f"--scale: {text} is not valid; expected NAME=X, a number of common/clock/profiles/h100.json"
        )
    try:
        return name, float(value)
    except ValueError:
        raise logs.Refused(f"--scale: {text} is not valid; expected NAME=X with a number X") from None


def main():
    parse = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parse.add_argument("runs")
    parse.add_argument("build", type=pathlib.Path)
    parse.add_argument("--check", metavar="NOTE")
    parse.add_argument("--scale", metavar="NAME=X", action="append", default=[])
    parse.add_argument("--add", metavar="OPTIONS", default="")
    parse.add_argument("words", nargs="?", default="")
    given = parse.parse_intermixed_args()
    published = [run for run in read(given.runs) if given.words in run.name]
    if not published:
        raise logs.Refused(f"no run's name has {given.words}; make published prints them all")
    with tempfile.TemporaryDirectory() as folder:  # two such commands at once write files of the same names
        return report(published, given, pathlib.Path(folder))


def report(published, given, folder):
    """The exit status. Profiles and logs go to `folder`."""
    if given.check:
        return check(published, given.build, folder, given.check)
    factors = [factor(text) for text in given.scale]
    profiles = {
        gpu: lessons.roomy(gpu, folder, factors, flash=True) for gpu in {run.gpu for run in published}
    }
    print(line_of(HEAD), "|---" * len(HEAD) + "|", sep="\n", flush=True)
    errors, reasons = [], []
    with concurrent.futures.ThreadPoolExecutor(2) as pool:  # runs of one process beside those of many
        for run in published:
            run.options += given.add.split()
        rows = pool.map(lambda run: run.row(given.build, folder, profiles[run.gpu]), published)
        for run, (row, error, memory) in zip(published, rows):
            print(line_of(row), flush=True)
            errors.append(error)
            if given.words:
                reasons.append(f"{run.name}: a rank needs {memory}")
            if abs(error) > 0.15 and not (factors or given.add):
                reasons.append(f"{run.name}: {run.reason or 'not found'}")
    print("", *map(textwrap.fill, reasons), sep="\n")
    sizes = [abs(error) for error in errors]
    print(
        f"\n{len(errors)} runs; error on the mean {100 * sum(errors) / len(errors):+.0f} %, its size "
        f"{100 * sum(sizes) / len(sizes):.0f} %, the largest {100 * max(sizes):.0f} %; negative: ours takes less time"
    )
    return 0


if __name__ == "__main__":
    logs.end_in_one_line(lambda: sys.exit(main()))
