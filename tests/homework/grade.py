"""Points for the exercises of a stage, as a tree has them: half for the numbers of one rank, 30 % for exact
traffic, memory and time, 20 % for no race and no deadlock."""

import hashlib
import json
import re
from dataclasses import dataclass

import reference
import sources
from observe import BuildError, Machine, build, observe
from observe import costs_right, differences, hints_of, in_words, is_right
from sources import ROOT, UsageError

PARITY_SHARE, COST_SHARE, RACE_SHARE = 0.5, 0.3, 0.2
STATE = ROOT / "build/homework"


@dataclass
class Verdict:
    exercise: str
    title: str
    of: int
    points: int = 0
    words: str = ""  # a line, empty for all points
    hint: str = ""  # what a probe says
    wrong: float = 0  # the share of its runs that differ
    because: str = ""  # of this exercise they do; then this one is not judged

    def line(self, hints={}):
        """hints: {exercise: the highest level that was taken}"""
        taken = f"hint {hints[self.exercise]} taken" if self.exercise in hints else ""
        words = "; ".join(filter(None, (taken, self.words)))
        return f"{self.exercise + ' ' + self.title:33} {self.points:2}/{self.of:<2}  {words}".rstrip()


def judge(stage, exercise, place, seen, numbers, races):
    """The verdict of an exercise. `place`: file:line of its body. seen: {run: Observation} of its runs at
    least; numbers: {run: facts} of the reference; races: of the exercise's runs, or None."""
    verdict = Verdict(exercise.number, exercise.title, exercise.points)
    differs = {name: differences(seen[name], numbers[name]) for name in exercise.runs}
    right = [name for name in exercise.runs if is_right(differs[name])]
    cheap = [name for name in right if costs_right(differs[name], seen[name], numbers[name])]
    share = (PARITY_SHARE * len(right) + COST_SHARE * len(cheap)) / len(exercise.runs)
    if races == [] and right and all(seen[name].end == "ok" for name in exercise.runs):
        share += RACE_SHARE
    verdict.points = int(exercise.points * share + 1e-9)
    broken = [name for name in exercise.runs if name not in right] or [
        name for name in right if name not in cheap
    ]
    verdict.wrong = len(broken) / len(exercise.runs)
    stubs = sorted(
        seen[name].end[:4] for name in broken if re.match(r"\d\d\.\d is not written", seen[name].end)
    )
    if stubs:
        verdict.because, verdict.words = (
            stubs[0],
            f"not judged because of {stubs[0]}, which is not written yet",
        )
    elif broken:
        words = in_words(differs[broken[0]], seen[broken[0]], numbers[broken[0]])
        verdict.words = f"{broken[0]}: {words}"
        if right and len(right) < len(exercise.runs):
            verdict.words += f"; right: {right[0]}"
    elif races:
        verdict.words = f"RACE: {races[0]} ({place})"
    elif races is None:
        verdict.words = f"right; no race? make races-{stage.number}"
    return verdict


def lose(verdict, words):
    """Half of the points, whatever the exercise's own runs show."""
    verdict.points = min(verdict.points, verdict.of - int(verdict.of * PARITY_SHARE))
    if not verdict.words or verdict.words.startswith("right"):
        verdict.words = words


def told(verdict, hint):
    """The verdict with what a probe says of the body, if it does. That takes half of the points, whatever the
    runs show: who knows how to make a run look right does not know what a probe asks."""
    if hint:
        lose(verdict, "its runs look right, but its probe finds a mistake")
        verdict.hint, verdict.words = hint, f"{verdict.words}. A hint: make hint-{verdict.exercise}"
    return verdict


def names_another(stage, number, hint):
    """Whether a sentence names functions of other exercises, and none of this one, which then is not guilty."""
    named = set(re.findall(r"(\w+)\(", hint))
    of = {
        n: {re.findall(r"(\w+)\($", b)[0] for b in e.bodies if b.endswith("(")}
        for n, e in stage.exercises.items()
    }
    return not named & of[number] and any(named & functions for functions in of.values())


def believe_probe(verdict, other):
    """In a learner's tree the runs of a right body may be wrong because of another one. Then its probe alone
    judges it. make grade has the reference's bodies in place of the others."""
    verdict.because, verdict.points = other, verdict.of
    verdict.words = f"right, says its probe; its runs need {other}"


def blame(stage, verdicts):
    """In a learner's tree a wrong body makes runs and probes of other exercises wrong, too. Guilty is the first
    of whom a probe tells, with those of whom it tells the same, as they share it; of others a probe may have
    said that they are right. Where no probe tells anything, one of those whose runs are wrong is guilty, and
    all are named, with most wrong runs first. Each program has its own."""
    for program in {run.program for run in stage.runs.values()}:
        runs = {v.exercise: stage.runs[stage.exercises[v.exercise].runs[0]] for v in verdicts}
        mine = [v for v in verdicts if runs[v.exercise].program == program and not v.because]
        wrong = sorted((v for v in mine if v.wrong), key=lambda v: -v.wrong)
        first = next((v for v in mine if v.hint), None)
        if not first and len(wrong) > 1:
            names = " or ".join(v.exercise for v in wrong)
            for verdict in wrong:
                verdict.because, verdict.words = names, f"{names}: {verdict.words}"
        for verdict in mine if first else ():
            if verdict.wrong and not verdict.hint:
                believe_probe(verdict, first.exercise)
            elif verdict.hint not in ("", first.hint):
                verdict.because = first.exercise
                verdict.words = f"not judged because of {first.exercise}"


def place_of(tree, exercise):
    text = (tree / exercise.file).read_text()
    return f"{exercise.file}:{text.count(chr(10), 0, sources.find_body(text, exercise.bodies[0], exercise.file)[0]) + 1}"


# ---- A learner's own tree


def state_of(stage):
    """Changes when a body of the stage, or anything beside it, does."""
    files = sorted({e.file for e in stage.exercises.values()})
    return hashlib.sha256("".join((ROOT / name).read_text() for name in files).encode()).hexdigest()


def noted_races(stage):
    """What make races-NN found in these very sources, or None."""
    path = STATE / f"races-{stage.number}.json"
    if path.exists():
        note = json.loads(path.read_text())
        return note["content"] if note["state"] == state_of(stage) else None


def note_races(stage, content):
    sources.put(
        STATE / f"races-{stage.number}.json", json.dumps({"state": state_of(stage), "content": content})
    )


def grade(stage, say=print, seen=()):
    """Grades this tree, a line an exercise. Returns the points of the exercises. seen: {run:
    Observation}, of runs that need not be made again."""
    numbers, asked = reference.load()[stage.number], stage.to_write()
    bodies = {e.number: sources.bodies_of(ROOT, e) for e in asked.values()}
    written = {n: e for n, e in asked.items() if not sources.is_stub(bodies[n])}
    seen, verdicts, machine, races = dict(seen), [], Machine(ROOT), noted_races(stage)
    runs = dict.fromkeys(name for exercise in written.values() for name in exercise.runs)
    if written:
        try:
            build(machine, {stage.runs[name].program for name in runs})
        except BuildError as error:
            say(f"{stage.number} does not compile: {error}")
            written, runs = {}, ()
    for name in runs:
        seen[name] = seen.get(name) or observe(machine, stage.runs[name])
    hints = hints_of(machine, stage, written) if written else {}
    for number, hint in hints.items():
        if names_another(stage, number, hint) and hint in [h for n, h in hints.items() if n != number]:
            hints[number] = ""
    for number, exercise in asked.items():
        place = place_of(ROOT, exercise)
        if number not in written:
            words = f"not written yet ({place})" if sources.is_stub(bodies[number]) else ""
            verdict = Verdict(number, exercise.title, exercise.points, 0, words)
        else:
            verdict = judge(stage, exercise, place, seen, numbers, races and races.get(number))
            if not re.search(r"\d\d\.\d is not written yet", hints[number]):
                verdict = told(verdict, hints[number])
                if verdict.because and not verdict.hint:
                    believe_probe(verdict, verdict.because)
        verdicts.append(verdict)
    blame(stage, verdicts)
    for verdict in verdicts:
        say(verdict.line(taken_hints()))
    if later := sum(v.of - v.points for v in verdicts if v.because):
        say(f"{later} of these points are not lost: they can't be judged yet")
    return sum(v.points for v in verdicts)


def grade_hunt(stage, tree):
    """(points, words) of a hunt's tree. Which body has a mistake is not known there: as many points as thirds
    of the runs are right; make grade looks at each mistake alone."""
    if sources.read_note(tree).get("kind") != "hunt":
        raise UsageError(
            f"HUNT: {tree} is no hunt; make hunt-{stage.number} ID=you writes one, from the reference"
        )
    machine, numbers = Machine(tree), reference.load()[stage.number]
    try:
        build(machine, {run.program for run in stage.runs.values()})
    except BuildError as error:
        return 0, f" (does not compile: {error})"
    wrong = [
        (name, d, seen)
        for name, run in stage.runs.items()
        if (d := differences(seen := observe(machine, run), numbers[name]))
    ]
    if not wrong:
        return 15, ""
    name, differs, seen = wrong[0]
    return 3 * (len(stage.runs) - len(wrong)) // len(
        stage.runs
    ) * 5, f" ({name}: {in_words(differs, seen, numbers[name])})"


def look_for_races(stage, say=print):
    """Runs what is written for ThreadSanitizer, and notes what it finds, for grade()."""
    machine, found, result = Machine(ROOT), {}, {}
    try:
        build(machine, {run.program for run in stage.runs.values()}, races=True)
    except BuildError as error:
        raise UsageError(f"{stage.number} does not compile: {error}") from None
    for number, exercise in stage.to_write().items():
        for name in exercise.runs:
            found[name] = found.get(name) or observe(machine, stage.runs[name], races=True)
        races = sorted({race for name in exercise.runs for race in found[name].races})
        ends = [found[name].end for name in exercise.runs if found[name].end not in ("ok", "a data race")]
        words = "; ".join(races) or (f"not looked at: {ends[0]}" if ends else "no race")
        say(f"{number} {exercise.title:28} {words}")
        result[number] = races or (None if ends else [])
    note_races(stage, result)


# ---- Hints: a core exercise has three levels, each other one has the third alone

HINTS = "hints-taken.txt"  # in a learner's tree, who may delete it; a line is an exercise and a level


def taken_hints():
    """{exercise: the highest level of a hint that was taken in this tree}"""
    text = (ROOT / HINTS).read_text() if (ROOT / HINTS).is_file() else ""
    return dict(sorted(re.findall(r"^(\d\d\.\d) ([123])$", text, re.M)))


def hint(stages, number, level=None, say=print):
    """make hint-03.3 LEVEL=1"""
    stage = sources.stage_of(stages, number[:2])
    if number not in stage.exercises:
        raise UsageError(f"hint: {number!r} is not valid; expected {', '.join(stage.exercises)}")
    core = stage.exercises[number].core
    taken = taken_hints()
    level = level or str(min(3, int(taken.get(number, 0)) + 1) if core else 3)  # the next one
    levels = "1, 2, 3" if core else "3"
    if level not in levels.split(", "):
        raise UsageError(f"LEVEL: {level!r} is not valid; expected {levels} for {number}")
    if level == "3":
        cause = hints_of(Machine(ROOT), stage, [number])[number]
        say(cause or "the probe finds no mistake here; what else is wrong stands in the grade")
    else:
        cause = core["look" if level == "1" else "ask"]
        say(f"{cause}\n\nhint {level} of 3; the next one: make hint-{number} LEVEL={int(level) + 1}")
    if cause and not cause.endswith("is not written yet") and sources.read_note().get("kind") == "write":
        taken[number] = max(level, taken.get(number, level))
        sources.put(ROOT / HINTS, "".join(f"{n} {taken[n]}\n" for n in sorted(taken)))
