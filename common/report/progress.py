"""Runs one program of make run and shows how far it is:  progress.py NAME OUTPUT COMMAND...

What it prints goes to the file OUTPUT. On a terminal one line says the step, the loss, and a bar; it ends as the line
that is printed anyway. A run that fails shows the end of its output. With V=1 everything is shown, too."""

import os
import re
import subprocess
import sys

STEP = re.compile(r"^ +(\d+) +(\d+\.\d+) ")


def main(name, output, *command):
    verbose = os.environ.get("V") == "1"
    steps = int(command[command.index("--steps") + 1])
    shown = last = ""
    with open(output, "w") as file:
        run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        for line in run.stdout:
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
    if status := run.wait():
        with open(output) as file:
            print(*file.readlines()[-20:], sep="", end="", file=sys.stderr)
        print(f"{name}: ended with status {status}; all of its output is in {output}", file=sys.stderr)
        return 1
    print(f"{name:16} {last}", flush=True)
    return 0


sys.exit(main(*sys.argv[1:]))
