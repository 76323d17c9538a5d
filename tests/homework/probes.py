"""Hints by construction: calls a body with inputs that make its answer readable (probes/NN.cu), and passes on the one line
that says what is wrong."""

import re

from observe import BuildError, build, folder_of
from sources import HERE

SECONDS = 30  # for the probes of an exercise; one hangs after 10 (probe.h)


def hint_of(machine, stage, exercise):
    """What the probes of an exercise say of the tree of a machine: a sentence, or None if they find nothing."""
    file = HERE / f"probes/{stage.number}.cu"
    if not file.exists() or f"[{exercise.number}]" not in (text := file.read_text()):
        return None
    program = f"homework_tests-{stage.number}"
    try:
        build(machine, {program})
    except BuildError as error:
        return f"does not compile: {error}"
    ranks = re.search(r"^// ranks: (\d+)$", text, re.M)[1]
    status, output = machine.call(["mpirun", "-n", ranks, str(machine.tree / folder_of(False) / program), f"[{exercise.number}]"],
                                  str(machine.tree / "build"), SECONDS)
    if status == 0:
        return None
    if found := re.search(r"^hint: (.*)$", output, re.M):
        return found[1]
    doing = re.findall(r"^doing: (.*)$", output, re.M)
    error = re.search(r"^rank \d+: (.* failed: .*?)(?: \(\S*:\d+\))?$|(\d\d\.\d is not written yet)", output, re.M)
    hangs = status == 124 or "time limit exceeded" in output
    end = "it hangs" if hangs else error[1] or error[2] if error else "it crashes"
    return f"{doing[-1] if doing else 'at its start'}: {end}"
