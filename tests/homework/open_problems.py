"""Open problems, graded in virtual time by the reference: the best that is known is a mark to beat, not the
limit. An answer is a line of options in open-NN.txt; in stage 05 it is the text of a schedule (--pp-schedule
FILE)."""

import shlex
import tempfile
from dataclasses import dataclass

from observe import Machine, build, observe
from sources import ROOT, Run, UsageError, put

POINTS = 10


@dataclass
class Problem:
    ranks: int
    options: str  # given
    free: list  # the options of an answer; none: the answer is a schedule
    value: str  # of the second step: its seconds, "step", or the share that is "hidden"
    simple: float  # what the defaults reach: no points
    best: float  # known: all points
    most_memory: int = 0  # bytes of a rank

    def score(self, value):
        share = (value - self.simple) / (self.best - self.simple)
        return max(0, min(POINTS, int(POINTS * share + 1e-9)))


PROBLEMS = {
    "02": Problem(
        8,
        "--model smollm-1.7b --layers 20 --vocab-size 4096 --seq-len 256 --global-batch-size 128 --link 50us,120GB/s",
        ["--dp-sync", "--bucket-mb", "--micro-batch-size"],
        "hidden",
        0.26,
        0.941,
    ),
    "05": Problem(
        4,
        "--model smollm-135m --layers 10 --seq-len 512 --global-batch-size 16 --micro-batch-size 2",
        [],
        "step",
        0.06565,
        0.05872,
        3_340_000_000,
    ),
    "07": Problem(
        16,
        "--model llama-3.1-8b --seq-len 4096 --global-batch-size 8 --ranks-per-node 8",
        """--tp --cp --dp --pp --vpp --pp-schedule --zero-stage --sequence-parallel --micro-batch-size
        --recompute --attention --dp-sync --bucket-mb --tp-overlap --cp-layout --cp-exchange""".split(),
        "step",
        3.573,
        2.278,
    ),
}


def options_of(problem, text):
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if len(lines) != 1:
        raise UsageError(f"expected one line of options, not {len(lines)}")
    try:
        words = shlex.split(lines[0])
    except ValueError as error:
        raise UsageError(f"expected options: {error}") from None
    for word in words:
        if word.startswith("-") and word.split("=")[0] not in problem.free:
            raise UsageError(f"{word[:40]} is given; free are {', '.join(problem.free)}")
    return words


def run_of(stage, options):
    problem = PROBLEMS[stage.number]
    return Run(
        "",
        problem.ranks,
        [*problem.options.split(), *options, "--steps", "2", "--dry-run", "--gpu", "h100"],
        stage.program,
        [],
    )


def judge(stage, text):
    """(points, words). Raises UsageError if the answer is none."""
    problem = PROBLEMS[stage.number]
    build(Machine(ROOT), {stage.program})
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as folder:
        if problem.free:
            options = options_of(problem, text)
        else:
            put(ROOT / folder / "schedule.txt", text)
            options = ["--pp-schedule", f"{folder}/schedule.txt"]
        seen = observe(Machine(ROOT), run_of(stage, options))
        if seen.end != "ok":
            raise UsageError(seen.end.replace(folder + "/", ""))
    memory = max(
        sum(v[rank % len(v)] for name, v in seen.facts.items() if name.startswith("memory"))
        for rank in range(problem.ranks)
    )
    if problem.most_memory and memory > problem.most_memory:
        return 0, f" (a rank has {memory:,} bytes; at most {problem.most_memory:,} are allowed)"
    value = seen.facts[problem.value][0]
    words = f"{100 * value:.1f} % hidden" if problem.value == "hidden" else f"{1000 * value:.2f} ms a step"
    best = f"{100 * problem.best:.1f} %" if problem.value == "hidden" else f"{1000 * problem.best:.2f} ms"
    beaten = (value - problem.best) / (problem.best - problem.simple) > 0.01
    return problem.score(value), f" ({words}; best known {best}{', which this beats' * beaten})"
