"""The autograder of a stage, as Gradescope wants it: a zip with setup.sh, run_autograder and the project."""

import zipfile

from observe import folder_of
from sources import ROOT, UsageError, files_of

SETUP = """#!/usr/bin/env bash
# Runs once, when the image is made: packages, and everything that can be built before somebody hands in.
set -e
cd /autograder/source/pentatron
common/build/setup.sh
apt-get install -y --no-install-recommends make python3 git
make BACKEND=cpu PRECISION=fp64 {programs}
make BACKEND=cpu PRECISION=fp64 SANITIZE=thread {races}
"""
RUN = """#!/usr/bin/env bash
# The container is made for one submission and thrown away, so it is the sandbox.
cd /autograder/source/pentatron
SANDBOX=container python3 tests/homework/homework.py gradescope-run IN=/autograder/submission \\
  OUT=/autograder/results/results.json TERM='{term}'
"""


def built(programs, races):
    return " ".join(f"{folder_of(races)}/{program}" for program in programs)


def write_zip(stage, term, to, say=print):
    if to.exists():
        raise UsageError(f"TO: {to} exists; expected a new file")
    to.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(to, "w", zipfile.ZIP_DEFLATED) as archive:
        def add(name, text, mode):
            entry = zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0))
            entry.external_attr, entry.compress_type = (0o100000 | mode) << 16, zipfile.ZIP_DEFLATED
            archive.writestr(entry, text)
        programs = sorted({run.program for run in stage.runs.values()})
        add("setup.sh", SETUP.replace("{programs}", built(programs, False)).replace("{races}", built(programs, True)), 0o755)
        add("run_autograder", RUN.replace("{term}", term), 0o755)
        for name in files_of():
            add(f"pentatron/{name}", (ROOT / name).read_bytes(), (ROOT / name).stat().st_mode & 0o777)
    say(f"{to}: setup.sh, run_autograder and the project, for stage {stage.number}")
