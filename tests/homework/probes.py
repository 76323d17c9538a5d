"""Hints by construction: calls a body with inputs that make its answer readable (probes/NN.cu), and passes on the one line
that says what is wrong."""

import re
import tempfile

from observe import BuildError, build, folder_of
from sources import HERE

SECONDS = 60  # for the probes of an exercise; one hangs after 20 (probe.h)


def has(exercise):
    file = HERE / f"probes/{exercise.number[:2]}.cu"
    return file.exists() and f"[{exercise.number}]" in file.read_text()


def hint_of(machine, stage, exercise):
    """What the probes of an exercise say of the tree of a machine: a sentence, or None if they find nothing."""
    if not has(exercise):
        return None
    program = f"homework_tests-{stage.number}"
    try:
        build(machine, {program})
    except BuildError as error:
        return f"does not compile: {error}"
    ranks = re.search(r"^// ranks: (\d+)$", (HERE / f"probes/{stage.number}.cu").read_text(), re.M)[1]
    command = ["mpirun", "-n", ranks, str(machine.tree / folder_of(False) / program), f"[{exercise.number}]"]
    with tempfile.TemporaryDirectory(dir=machine.tree / "build") as folder:
        machine.own(folder)
        status, output = machine.call(command, folder, SECONDS)
    if status == 0:
        return None
    if found := re.search(r"^hint: (.*)$", output, re.M):
        return found[1]
    doing = re.findall(r"^doing: (.*)$", output, re.M)
    error = re.search(r"^rank \d+: (.* failed: .*?)(?: \(\S*:\d+\))?$|(\d\d\.\d is not written yet)", output, re.M)
    hangs = status == 124 or "time limit exceeded" in output
    end = "it hangs" if hangs else error[1] or error[2] if error else "it crashes"
    return f"{doing[-1] if doing else 'at its start'}: {end}"
