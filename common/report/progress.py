"""The runs of make run, one after the other:  progress.py PROGRAMS LOGS RANKS STEPS ONLY OPTIONS...

PROGRAMS is a build folder. RANKS: how many ranks share the tiny model. ONLY: names of runs, as "01 05-%", or
all. OPTIONS are for all programs. What a run prints goes to LOGS/NAME.txt, its log and its timeline beside
it. On a terminal one line says the step, the loss, and a bar; it ends as the line that is printed anyway. A
run that fails shows the end of its output, and is the last one. With V=1 everything is shown, too."""

import fnmatch
import os
import pathlib
import re
import subprocess
import sys

from runs import Refused, end_in_one_line

STEP = re.compile(r"^ +(\d+) +(\d+\.\d+) ")


def runs_of(ranks, shares_gpus):
    """(name, program, ranks, options) of each run. `shares_gpus`: there may be more ranks than GPUs."""
    three = "--tp 2 --cp 2 --pp 2" if ranks == 8 else ""
    five = "--tp 2 --dp 2 --pp 2 --ep 2" if ranks == 8 else ""
    return [
        ("01", "01_single_gpu", 1, "--sample 200"),
        ("02-bucket", "02_data_parallel", ranks, ""),
        ("03-zero3", "03_zero", ranks, "--zero-stage 3"),
        # Ranks that share a micro-batch take the whole batch at once; a pipeline needs many.
        ("04-tp-sp", "04_tensor_parallel", ranks, "--micro-batch-size 32 --sequence-parallel"),
        ("05-1f1b", "05_pipeline_parallel", ranks, "--micro-batch-size 4"),
        ("06-zigzag", "06_context_parallel", ranks, "--micro-batch-size 32"),
        ("07-3d", "07_combined_5d", ranks, f"--micro-batch-size 8 {three} --sequence-parallel --zero-stage 3"),
        ("07-experts", "07_combined_5d", 1, "--micro-batch-size 8 --experts 8"),
        ("07-experts-5d", "07_combined_5d", 16 if shares_gpus else ranks,
         f"--micro-batch-size 8 {'--tp 2 --cp 2 --dp 2 --pp 2 --ep 2' if shares_gpus else five} --experts 8"),
    ]  # fmt: skip


def run(name, output, command, steps):
    """Runs one, and returns its status."""
    verbose = os.environ.get("V") == "1"
    shown = last = ""
    with open(output, "w") as file:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        for line in process.stdout:
            file.write(line)
            if verbose:
                print(line, end="", flush=True)
            if match := STEP.match(line):
                step, loss = int(match[1]), match[2]
                last = f"loss {loss} after {step} steps"
                if sys.stderr.isatty() and not verbose:
                    bar = ("#" * (20 * step // steps)).ljust(20, ".")
                    shown = f"{name:16} step {step} of {steps}  loss {loss}  {bar}"
                    print(f"\r{shown}", end="", file=sys.stderr, flush=True)
    if shown:
        print("\r" + " " * len(shown), end="\r", file=sys.stderr, flush=True)
    if status := process.wait():
        with open(output) as file:
            print(*file.readlines()[-20:], sep="", end="", file=sys.stderr)
        print(f"{name}: ended with status {status}; all of its output is in {output}", file=sys.stderr)
    else:
        print(f"{name:16} {last}", flush=True)
    return status


def main(programs, logs, ranks, steps, only, *options):
    programs, logs = pathlib.Path(programs), pathlib.Path(logs)
    all_runs = runs_of(int(ranks), not programs.name.startswith("cuda") or "-mpi" in programs.name)
    patterns = [name.replace("%", "*") for name in only.split() or ["%"]]
    chosen = [each for each in all_runs if any(fnmatch.fnmatchcase(each[0], pattern) for pattern in patterns)]
    if not chosen:
        raise Refused(f"ONLY: {only} is not valid; expected names of runs, as in ONLY='01 05-%'")
    if not steps.isdigit() or int(steps) < 1:
        raise Refused(f"RUN_STEPS: {steps} is not valid; expected a whole number from 1")
    logs.mkdir(parents=True, exist_ok=True)
    for name, program, n, own in chosen:
        launcher = [] if program == "01_single_gpu" else ["mpirun", "-n", str(n)]
        command = [*launcher, str(programs / program), "--steps", steps, "--log-every", "1", *own.split(), *options,
                   "--log-json", f"{logs}/{name}.jsonl", "--trace", f"{logs}/{name}.trace"]  # fmt: skip
        if run(name, f"{logs}/{name}.txt", command, int(steps)):
            sys.exit(1)


end_in_one_line(main, *sys.argv[1:])
