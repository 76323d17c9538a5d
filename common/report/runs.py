"""The logs of runs (--log-json), and a table that compares them.  python runs.py FILE...

A run is compared with the first one whose model has as many parameters and that trains it in the same way
(TRAINING): their losses and gradient norms should be the same at every step but for rounding."""

import json
import math
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from statistics import mean

PURPOSES = ["weights", "gradients", "optimizer", "activations", "communication"]
# Options that change what is learned, of one model.
TRAINING = (
    "data seq-len global-batch-size seed optimizer lr warmup-steps beta1 beta2 weight-decay grad-clip heads kv-heads"
).split()


class Refused(Exception):
    """One line that says what is wrong, and what is expected."""


class Run:
    def __init__(self, path):
        self.path = pathlib.Path(path)
        self.label = self.path.stem
        self.options = self.summary = None
        self.steps = []  # one JSON object each
        try:
            for line in self.path.read_text().splitlines():
                entry = json.loads(line)
                self.options = entry.get("options", self.options)
                self.summary = entry.get("summary", self.summary)
                self.precision = entry.get("precision", getattr(self, "precision", ""))
                self.steps += [entry] if "step" in entry else []
        except (OSError, ValueError, AttributeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not a log"
            raise Refused(
                f"{path}: {reason}; expected a file that --log-json wrote, as make run does"
            ) from None
        if not self.options or not self.summary or not self.steps:
            raise Refused(f"{path}: expected a log with options, steps and a summary; did the run end?")

    @property
    def ranks(self):
        return self.summary["ranks"]

    @property
    def there(self):
        """Ranks of a folded world that are there; else all."""
        return len(self.summary["memory"])

    @property
    def modelled(self):
        """Of a step, the mean from the second on: seconds, hidden, mfu. None where time is measured."""
        return self.summary["modelled"]

    @property
    def is_dry(self):
        """Whether it computed nothing: its losses are no numbers."""
        return self.options.get("dry-run", False)

    @property
    def step_seconds(self):
        """The mean of the steps from the second on: the first waits for nothing that an earlier one began."""
        return (
            self.modelled["seconds"]
            if self.modelled
            else mean(step["seconds"] for step in self.steps[1:] or self.steps)
        )

    @property
    def tokens_per_second(self):
        """Of a rank."""
        return self.steps[0]["tokens"] / self.step_seconds / self.ranks

    @property
    def sent_bytes(self):
        """By the rank that sends most, in a step."""
        return sum(step["comm_bytes"] for step in self.steps) / len(self.steps)

    @property
    def calls(self):
        """Collectives and messages that a rank issues in a step, the most of all ranks."""

        def of(counts):
            return sum(count["calls"] for name, count in counts.items() if name not in ("rank", "scalars"))

        return max(of(counts) for counts in self.summary["communication"]) / len(self.steps)

    def memory(self, which):
        """Bytes by purpose: "predicted" or "measured", of the fullest rank."""
        fullest = max(
            (rank[which] for rank in self.summary["memory"]), key=lambda bytes_: sum(bytes_.values())
        )
        return {purpose: fullest[purpose] for purpose in PURPOSES}

    def reference(self, runs):
        """The first run that trains the same model in the same way: as many steps on the same tokens."""

        def training(run):
            return (
                run.summary["parameters"],
                len(run.steps),
                run.is_dry,
                [run.options.get(name) for name in TRAINING],
            )

        return next(run for run in runs if training(run) == training(self))

    def differences(self, value, reference):
        """Of the "loss" or "grad_norm" of each step, relative. A NaN differs by infinity."""

        def difference(mine, other):
            if mine is None or other is None:
                return math.inf
            return abs(mine - other) / abs(other) if other else abs(mine)

        return [difference(mine[value], other[value]) for mine, other in zip(self.steps, reference.steps)]


def width_of_output():
    """Of the terminal, in columns. A pipe has all."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 10**6


def print_wrapped(text, indent=""):
    """Line by line, each in as many rows of the terminal as it takes."""
    for line in text.splitlines() or [""]:
        print(textwrap.fill(line, width_of_output(), subsequent_indent=indent))


def human(value, base, units):
    """value in one of the units, each `base` times the one before."""
    for unit in units[:-1]:
        if value < base:
            break
        value, unit = value / base, units[units.index(unit) + 1]
    return f"{value:.3g} {unit}" if value < 999.5 else f"{value:.0f} {unit}"


def human_bytes(value):
    return human(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB"])


def human_seconds(value):
    return human(value * 1e9, 1000, ["ns", "us", "ms", "s"])


def table(runs):
    """A list of rows of words."""
    head = [
        "",
        "ranks",
        "micro",
        "attention",
        "final loss",
        "loss diff",
        "norm diff",
        *PURPOSES[:-1],
        "buffers",
    ]
    rows = [[*head, "sent", "calls", "step time", "hidden"]]
    for run in runs:
        reference = run.reference(runs)

        def difference(value):
            return "-" if run is reference or run.is_dry else f"{max(run.differences(value, reference)):.1e}"

        rows.append(
            [
                run.label,
                str(run.ranks) + (f", {run.there} there" if run.there < run.ranks else ""),
                str(run.options["micro-batch-size"]),
                run.options["attention"],
                "-" if run.is_dry else f"{run.summary['final_loss']:.4f}",
                difference("loss"),
                difference("grad_norm"),
                *map(human_bytes, run.memory("measured").values()),
                human_bytes(run.sent_bytes),
                f"{run.calls:.0f}",
                human_seconds(run.step_seconds),
                f"{100 * run.modelled['hidden']:.0f} %" if run.modelled else "-",
            ]
        )
    return rows


def runs_of(paths):
    """The runs of these logs; a folder means those in it, by name."""
    files = []
    for path in map(pathlib.Path, paths):
        files += sorted(path.glob("*.jsonl"), key=lambda file: file.stem) if path.is_dir() else [path]
    if not files:
        raise Refused(
            f"{' '.join(map(str, paths))}: no logs there; expected those of make run, or of RUNS='a.jsonl b.jsonl'"
        )
    return [Run(file) for file in files]


def output_of(*command):
    """What it prints. Throws Refused with its own one line."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if line and not line.startswith("Abort(")]  # MPI's
        raise Refused((said or [f"{command[0]} ended with status {done.returncode}"])[-1])
    return done.stdout


def folded(*command):
    """The command of a dry run of 07 with --ranks, with mpirun and as many processes as ranks differ: 07 says
    it where there are too few. Throws Refused as 07 refuses all else."""
    said = subprocess.run(
        ["mpirun", "-n", "1", *map(str, command)], capture_output=True, text=True
    ).stderr.strip()
    wanted = re.search(r"expected (\d+), the ranks that differ", said)
    if said and not wanted:
        raise Refused(said.splitlines()[-1])
    return ["mpirun", "-n", wanted[1] if wanted else "1", *command]


def planned(plan, option, *words):
    """The JSON that plan writes with this option."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "plan.json")
        output_of(plan, *words, option, file)
        return json.loads(file.read_text())


def end_in_one_line(main, *words):
    """Calls main; what it refuses becomes one line, and status 2."""
    try:
        main(*words)
    except Refused as refused:
        print(refused, file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def main(*paths):
    runs = runs_of(paths)
    newest = max(runs, key=lambda run: run.path.stat().st_mtime)
    runs = [run for run in runs if len(run.steps) == len(newest.steps)]  # others are of an earlier call
    print_wrapped(f"""
The same training, computed: every stage learns what 01 learns.
loss diff, norm diff: from the first run that trains alike; relative, the largest of {len(runs[0].steps)} steps. sent, calls: by
a rank in a step. With experts the last bit of a sum may send a token to another one; PRECISION=fp64 shows no difference.
""")
    columns = ["", "ranks", "final loss", "loss diff", "norm diff", "sent", "calls"]
    head, *rows = table(runs)
    rows = [[row[head.index(column)] for column in columns] for row in [head, *rows]]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    while sum(widths) + 2 * len(widths) - 2 > width_of_output() and len(widths) > 3:
        widths.pop()  # the last columns are left out
    for row in rows:
        print("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]))


if __name__ == "__main__":
    end_in_one_line(main, *sys.argv[1:])
