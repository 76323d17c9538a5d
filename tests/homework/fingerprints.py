"""What is known of each mistake: fingerprints.json. A probe (probes.py) explains most of them: then it is the sentence.
Of the others it is what they do to the runs of their stage, by which they are recognised, and the sentence that teaches."""

import fnmatch
import hashlib
import json
import queue
import shutil
import sys
import threading
import time

import probes
import sources
from observe import PARITY, BuildError, Machine, build, differences, folder_of, observe, same
from sources import HERE, ROOT, changed, copy_tree, exercise_of, put

PATH = HERE / "fingerprints.json"
RECOGNISED = 1e-5  # relative; the file has six digits


def load():
    return json.loads(PATH.read_text()) if PATH.exists() else {}


def text_of(known):
    """The file: a line for each run of the reference, then one for each mistake."""
    stages = []
    for number, stage in known.items():
        runs = ",\n".join(f"{json.dumps(name)}: {json.dumps(facts)}" for name, facts in stage["reference"].items())
        mistakes = ",\n".join(map(json.dumps, stage["mistakes"]))
        stages.append(f'"{number}": {{"reference": {{\n{runs}}},\n"mistakes": [\n{mistakes}]}}')
    return "{" + ",\n".join(stages) + "}\n"


def workplace(number, sandboxed=False):
    """A copy of this tree in which sources may be broken, with this tree's object files. `sandboxed`: what runs in it is
    kept from it (sandbox.py)."""
    tree = ROOT / f"build/homework/{'sandbox' if sandboxed else 'tree'}-{number}"
    copy_tree(tree)
    for folder in ("build/batches", "build/cpu", "build/cpu-thread", folder_of(False), folder_of(True)):
        if not (tree / folder).exists() and (ROOT / folder).exists():
            shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("tests*", "mpi_tests*", "runs"))
    return Machine(tree)


def in_workplaces(tasks, stages, work, workers=2, sandboxed=False, races=True):
    """Calls work(machine, task) for each task, in `workers` copies of the tree side by side, and shows progress. `races`:
    the work builds for ThreadSanitizer, too."""
    waiting, begin, done, failed = queue.Queue(), time.time(), [0], []
    for task in tasks:
        waiting.put(task)
    programs = {run.program for stage in stages for run in stage.runs.values()}
    for thread in (False, True)[:1 + races]:  # once; the copies begin with its object files
        build(Machine(ROOT), programs, thread)

    def worker(number):
        try:
            machine = workplace(number, sandboxed)
            while not failed:
                task = waiting.get_nowait()
                words = work(machine, task)
                done[0] += 1
                left = (time.time() - begin) / done[0] * (len(tasks) - done[0]) / 60
                print(f"{done[0]:3} of {len(tasks)}, {left:3.0f} min to go: {words}", flush=True)
        except queue.Empty:
            pass
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=worker, args=(number,)) for number in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def identity(mutant, exercise):
    """Changes when the mutant does, or the bodies that it breaks."""
    text = json.dumps([mutant.why, mutant.find, mutant.replace, sources.bodies_of(ROOT, exercise)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def short(values):
    return [float(f"{v:.6g}") if isinstance(v, float) else v for v in values]


def reference_of(machine, stage, seed=None, known={}):
    """Where a run is as `known`, its digits: the last ones may be another machine's."""
    result = {}
    for name, run in stage.runs.items():
        seen = observe(machine, run, seed)
        result[name] = known[name] if name in known and not differences(seen, known[name]) else seen.facts
    return result


def differences_of(machine, stage, reference):
    result = {}
    for name, run in stage.runs.items():
        differs = differences(observe(machine, run), reference[name])
        if differs:
            result[name] = {fact: short(values) for fact, values in differs.items()}
    return result


def fingerprint(machine, stage, exercise, mutant, reference, old=None):
    """The entry of one mistake; `old`: what it was, of the same text. What changes from one time to the next is left out: it
    is a race."""
    text = mutant.applied((machine.tree / mutant.file).read_text())
    entry = {"name": mutant.name, "exercise": exercise.number, "identity": identity(mutant, exercise)}
    programs, threads = {run.program for run in stage.runs.values()}, any(kind.startswith("threads") for kind in mutant.kinds)
    with changed(machine.tree, {mutant.file: text}):
        told = probes.hint_of(machine, stage, exercise) or ""
        if old and not told:
            return old | {"told": ""}
        if old:
            return entry | {"told": told, "shows": shows(old)}
        try:
            build(machine, programs)
            first, second = (differences_of(machine, stage, reference) for _ in range(2))
            if told:
                return entry | {"told": told, "shows": bool(first) and first == second and not threads}
            entry |= {"why": mutant.why, "told": "", "differs": {}, "races": []}
            if first != second:
                entry["unsteady"] = True
            for name in first:
                stable = {fact: values for fact, values in first[name].items() if values == second.get(name, {}).get(fact)}
                if stable:
                    entry["differs"][name] = stable
            if threads:
                entry["differs"] = costs(entry["differs"])  # its numbers are a matter of luck
                build(machine, programs, races=True)
                entry["races"] = sorted({race for name in exercise.runs
                                         for race in observe(machine, stage.runs[name], races=True).races})
        except BuildError as error:
            entry |= {"why": mutant.why, "told": "", "races": [], "differs": {"": {"end": [f"does not compile: {error}"]}}}
    return entry


def shows(mistake):
    """Whether one run shows a mistake, in the same numbers each time: one for a hunt."""
    return mistake["shows"] if mistake.get("told") else bool(
        mistake["differs"] and not mistake["races"] and not mistake.get("unsteady"))


def make(stages, patterns):
    """Writes fingerprints.json. Looks at mutants that are new, or have changed; with patterns, only at those. What a probe
    says of the others is asked once. What is no mutant of an exercise any more is left out."""
    known = load()
    mutants = {number: [(m, e) for m in sources.read_mutants() if (e := exercise_of(stage, m))]
               for number, stage in stages.items()}
    build(Machine(ROOT), {run.program for stage in stages.values() for run in stage.runs.values()})
    references = {number: reference_of(Machine(ROOT), stage, known=known.get(number, {}).get("reference", {}))
                  for number, stage in stages.items()}
    old = {e["name"]: e for stage in known.values() for e in stage["mistakes"]}
    new, tasks = {}, []
    for number in stages:
        for mutant, exercise in mutants[number]:
            entry = old.get(mutant.name)
            same_text = entry and entry["identity"] == identity(mutant, exercise)
            if any(fnmatch.fnmatch(mutant.name, p) for p in patterns) if patterns else not same_text:
                tasks.append((number, mutant, exercise, None))
            elif entry:
                new[mutant.name] = entry
                if not patterns and "told" not in entry and probes.has(exercise):
                    tasks.append((number, mutant, exercise, entry))

    def write():
        put(PATH, text_of({number: {"reference": references[number],
                                    "mistakes": [new[m.name] for m, _ in mutants[number] if m.name in new]} for number in stages}))

    def work(machine, task):
        number, mutant, exercise, known_entry = task
        new[mutant.name] = entry = fingerprint(machine, stages[number], exercise, mutant, references[number], known_entry)
        write()
        facts = sorted({fact for differs in entry.get("differs", {}).values() for fact in differs})
        return f"{mutant.name} ({exercise.number}): {entry['told'] or ', '.join(facts + entry['races']) or 'NO DIFFERENCE'}"

    write()
    if tasks:
        in_workplaces(tasks, [stages[number] for number in sorted({task[0] for task in tasks})], work,
                      races=any(kind.startswith("threads") for _, mutant, _, _ in tasks for kind in mutant.kinds))


# ---- Recognition

def alike(here, there, reference):
    """Whether two lists of differences of one run, {fact: values}, are those of the same mistake."""
    if set(here) != set(there):
        return False
    for fact, values in here.items():
        others = there[fact]
        if fact == "seconds":  # kernels' costs change; a mistake stays slower, or faster
            if (values[0] < reference[fact][0]) != (others[0] < reference[fact][0]):
                return False
        elif len(values) != len(others) or not all(same(a, b, RECOGNISED) for a, b in zip(values, others)):
            return False
    return True


def costs(differs):
    """Only what no race changes."""
    kept = {n: {fact: v for fact, v in d.items() if fact not in PARITY and fact != "end"} for n, d in differs.items()}
    return {n: d for n, d in kept.items() if d}


def recognised(fingerprints, differs, races=()):
    """The known mistakes that do to these runs what was seen. differs: {run: {fact: values}}, of all runs that reached no
    stub; {} where nothing differs."""
    found = []
    for mistake in fingerprints["mistakes"]:
        if mistake.get("told"):
            continue  # its probe explains it
        luck = mistake["races"] or mistake.get("unsteady")  # what the numbers become
        if set(races) & set(mistake["races"]):
            found.append(mistake)
            continue
        here = costs(differs) if luck else {n: d for n, d in differs.items() if d}
        there = costs(mistake["differs"]) if luck else mistake["differs"]
        there = {n: d for n, d in there.items() if n in differs}
        if here and set(here) == set(there) and \
                all(alike(here[n], there[n], fingerprints["reference"][n]) for n in here):
            found.append(mistake)
    certain = [m for m in found if not m["races"] and '"nan"' not in json.dumps(m["differs"])]
    return certain or found


if __name__ == "__main__":
    try:
        make(sources.read_stages(), sys.argv[1:])
    except (sources.UsageError, BuildError) as error:
        sys.exit(f"{error}")
