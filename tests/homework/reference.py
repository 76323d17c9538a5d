"""What the reference shows in the runs of exercises.txt: reference.json, a line for each run. And copies of
this tree, in which bodies are tried side by side."""

import concurrent.futures
import json
import queue
import shutil
import time

from observe import Machine, build, differences, folder_of, observe
from sources import HERE, ROOT, copy_tree, put

PATH = HERE / "reference.json"


def load():
    """{stage: {run: facts}}"""
    return json.loads(PATH.read_text())


def text_of(numbers):
    stages = []
    for number, runs in numbers.items():
        lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(facts)}" for name, facts in runs.items())
        stages.append(f'"{number}": {{\n{lines}}}')
    return "{" + ",\n".join(stages) + "}\n"


def numbers_of(machine, stage, seed=None, known={}):
    """{run: facts}. Where a run is as `known`, its digits: the last ones may be another machine's."""
    result = {}
    for name, run in stage.runs.items():
        seen = observe(machine, run, seed)
        result[name] = known[name] if name in known and not differences(seen, known[name]) else seen.facts
    return result


def make(stages):
    """Writes reference.json."""
    known = load()
    build(Machine(ROOT), {run.program for stage in stages.values() for run in stage.runs.values()})
    put(
        PATH,
        text_of({n: numbers_of(Machine(ROOT), stage, known=known.get(n, {})) for n, stage in stages.items()}),
    )


def workplace(number, sandboxed=False):
    """A copy of this tree in which sources may be broken, with this tree's object files. `sandboxed`: what
    runs in it is kept from it (sandbox.py)."""
    tree = ROOT / f"build/homework/{'sandbox' if sandboxed else 'tree'}-{number}"
    copy_tree(tree)
    for folder in ("build/batches", "build/cpu", "build/cpu-thread", folder_of(False), folder_of(True)):
        if not (tree / folder).exists() and (ROOT / folder).exists():
            shutil.copytree(
                ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("tests*", "mpi_tests*", "runs")
            )
    return Machine(tree)


def in_workplaces(tasks, stages, work, workers=2, sandboxed=False, races=True):
    """Calls work(machine, task) for each task, in `workers` copies of the tree side by side, and shows
    progress. `races`: the work builds for ThreadSanitizer, too."""
    programs = {run.program for stage in stages for run in stage.runs.values()}
    for thread in (False, True)[: 1 + races]:  # once; the copies begin with its object files
        build(Machine(ROOT), programs, thread)
    machines, begin = queue.Queue(), time.time()
    for number in range(workers):
        machines.put(workplace(number, sandboxed))

    def one(task):
        machine = machines.get()
        try:
            return work(machine, task)
        finally:
            machines.put(machine)

    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        try:
            for done, words in enumerate(
                concurrent.futures.as_completed([pool.submit(one, task) for task in tasks]), 1
            ):
                left = (time.time() - begin) / done * (len(tasks) - done) / 60
                print(f"{done:3} of {len(tasks)}, {left:3.0f} min to go: {words.result()}", flush=True)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
