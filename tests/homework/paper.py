"""Questions on paper, with numbers drawn from an ID. They are answered in answers-NN.txt before the program
is run; then its number stands beside the learner's."""

import random
import re

from observe import Machine, build, observe
from sources import ROOT, Run, UsageError, check_id, entries

POINTS = 3  # a question; there are five


def text_of(stage, identity):
    lines = [
        f"# Stage {stage.number}, ID {identity}. Write each number behind its =. The build is fp64: weights,",
        "# activations and gradients have 8 bytes each. Then: make paper-" + f"{stage.number} ID={identity}",
        "",
    ]
    for number, (text, _, _) in enumerate(questions(stage, identity), 1):
        lines += [f"{number}. {text}", f"{number} = ", ""]
    return "\n".join(lines)


def read_answers(text):
    """(ID, {number: answer}); a text that is no such file raises UsageError."""
    found = re.search(r"^# Stage \d\d, ID (.*?)\. Write", text, re.M)
    if not found:
        raise UsageError("answers: the first line, with stage and ID, is missing")
    answers = {}
    for number, value in re.findall(r"^(\d) =[ \t]*(.*)$", text, re.M):
        value = value.strip().replace(",", "").replace("_", "").rstrip("%")
        try:
            answers[int(number)] = float(value)
        except ValueError:
            if value:
                raise UsageError(f"answers: {number} = {value[:40]!r} is not a number") from None
    return found.group(1), answers


def answer(machine, stage, question):
    """The program's number: a dry run's, so it takes no time and no data."""
    _, runs, value = question
    facts = []
    for ranks, options in runs:
        show = "--show-" in options
        run = Run(
            "",
            ranks,
            (options + " --steps 1" * (not show) + " --dry-run" * (not show)).split(),
            stage.program,
            [],
        )
        seen = observe(machine, run)
        if seen.end != "ok":
            return None
        facts.append(seen.facts)
    return value(*facts)


def is_right(given, expected):
    return (
        given is not None
        and expected is not None
        and abs(given - expected) <= (0.5 if isinstance(expected, int) else 0.005 * abs(expected))
    )


def judge(machine, stage, identity, answers, say):
    """Points; says each question's two numbers."""
    build(machine, {stage.program})
    right = 0
    for number, question in enumerate(questions(stage, identity), 1):
        expected, given = answer(machine, stage, question), answers.get(number)
        good = is_right(given, expected)
        right += good
        say(f"  {number}. {question[0]}")
        say(
            f"     you {'-' if given is None else f'{given:,.10g}'}, the program "
            f"{'does not run' if expected is None else f'{expected:,.10g}'}: {POINTS if good else 0}/{POINTS}"
        )
    return right * POINTS


def paper(stage, identity, say=print):
    path = ROOT / f"answers-{stage.number}.txt"
    if not path.exists():
        path.write_text(text_of(stage, check_id(identity)))
        say(f"answers-{stage.number}.txt has five questions. Answer them, then call this again.")
        return None
    of, answers = read_answers(path.read_text())
    if identity and of != identity:
        raise UsageError(f"ID: {identity!r} is not valid; expected {of!r}, as in answers-{stage.number}.txt")
    missing = [str(n) for n in range(1, 6) if n not in answers]
    if missing:
        raise UsageError(f"answers-{stage.number}.txt: no answer yet to {', '.join(missing)}")
    points = judge(Machine(ROOT), stage, of, answers, say)
    say(f"paper {points}/{5 * POINTS}")
    return points


# ---- The questions


def fact(name, rank=0):
    """A fact of one rank. A list of one holds for all ranks."""
    return lambda *facts: int((facts[0].get(name) or [0])[rank if len(facts[0].get(name, [])) > 1 else 0])


def time_of(schedule):
    """How long a step takes in a picture of schedules."""
    return lambda x: float(next(row.split()[1] for row in x["picture"] if row.startswith(schedule + " ")))


def questions(stage, identity):
    """[(text, [(ranks, options)], what makes a number of their facts)], those of paper.txt; five at most."""
    r = random.Random(f"paper {stage.number} {identity}")
    layers, heads, vocab, s = r.choice([2, 4, 6]), 4, r.choice([320, 480, 512]), r.choice([32, 48, 64])
    d, f = 16 * r.randint(2, 6), 24 * r.randint(2, 8)
    b = r.choice([1, 2, 3])
    n, m, other = r.choice([2, 4]), r.randint(2, 4), r.choice([3, 5, 6])
    of_layers = (
        f"--d-model {d} --heads {heads} --kv-heads {heads} --d-ff {f} --vocab-size {vocab} "
        f"--seq-len {s} --micro-batch-size {b}"
    )
    sizes, eight_layers = f"--layers {layers} {of_layers}", f"--layers 8 {of_layers}"
    model = f"{layers} layers of width {d}, {heads} heads, an MLP of {f}, {vocab} tokens in the vocabulary"
    batch = f"sequences of {s} tokens, {b} a micro-batch"

    def of(ranks, micro_batches, options="", size=sizes, data_ranks=1):
        return ranks, f"{size} --global-batch-size {b * micro_batches * data_ranks} {options}"

    p, many = 2, 2 * m  # 05
    experts, rank = 4 * r.choice([1, 2]), r.randint(0, 15)  # 07, and what follows
    tp, cp, pp = 2, r.choice([1, 2]), r.choice([1, 2, 4])
    dp = 16 // (tp * cp * pp)
    even, mesh = f"--experts {experts} --ep 2", (1, f"--tp {tp} --cp {cp} --dp {dp} --pp {pp} --show-mesh")
    stages, stage_of_zero = r.choice([2, 4]), r.choice([1, 2])
    pipeline = f"{eight_layers} --global-batch-size {b * stages * m} --pp {stages}"

    found, names, here = [], {**globals(), **locals()}, ""
    for word, rest in entries("paper.txt"):
        if word == "stage":
            here = rest
        elif here == stage.number and word == "ask":
            found.append((eval(f'f"""{rest}"""', names), [], []))
        elif here == stage.number:
            found[-1][1 if word == "run" else 2].append(eval(rest, names))
    found = [(text, runs, value) for text, runs, [value] in found]
    return r.sample(found, 5) if len(found) > 5 else found
