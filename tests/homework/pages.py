"""A learner's page (make grade PAGES=FOLDER): what they were told, and a run with all that they wrote beside
the reference's: losses, memory, messages, and the timeline of a step. It is drawn by the report
(common/report)."""

import pathlib
import subprocess
import tempfile

import sources
from observe import BuildError, Machine, build, observe
from sources import ROOT, UsageError, put

PYTHON = ROOT / "build/python-report/bin/python"


def folder_of_pages(name):
    folder = pathlib.Path(name)
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"PAGES: {folder} is a file; expected a folder")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write(machine, stage, identity, bodies, lines, folder):
    """folder/ID-STAGE.html. machine: a workplace, in which these bodies, {number: [text]}, replace the
    reference's. What does not compile or does not end well has no run; `lines` say why. Which run is shown:
    the first one that a line names, else that of most ranks."""
    runs = [r for r in stage.runs.values() if r.program == stage.program]
    run = next(
        (r for r in runs if any(f"{r.name}: " in line for line in lines)), max(runs, key=lambda r: r.ranks)
    )
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as name:
        place = pathlib.Path(name)
        build(Machine(ROOT), {run.program})
        observe(Machine(ROOT), run, keep=place / "the reference")
        try:
            sources.put_bodies(machine, stage, bodies)
            build(machine, {run.program})
            observe(machine, run, keep=place / identity)
        except BuildError:
            pass
        put(place / "told.txt", f"{run.name}: {' '.join(run.options)}\n\n" + "\n".join(lines) + "\n")
        logs = [place / "the reference.json", *[p for p in [place / f"{identity}.json"] if p.exists()]]
        page = folder / f"{identity}-{stage.number}.html"
        subprocess.run(
            [PYTHON, ROOT / "common/report/report.py", page, "--told", place / "told.txt", *logs], check=True
        )
    return page
