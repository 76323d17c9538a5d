"""Points for the exercises of a stage, as a tree has them: half for the numbers of one rank, 30 % for exact traffic,
memory and time, 20 % for no race and no deadlock."""

import hashlib
import json
import re
from dataclasses import dataclass, field

import fingerprints
import probes
import sources
from observe import BuildError, Machine, build, costs_right, differences, in_words, is_right, observe
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
    hints: list = field(default_factory=list)  # what a probe says, or of known mistakes
    wrong: float = 0  # the share of its runs that differ
    because: str = ""  # of this exercise they do; then this one is not judged

    def line(self):
        return f"{self.exercise + ' ' + self.title:28} {self.points:2}/{self.of:<2}  {self.words}".rstrip()


def points_of(of, runs, right, cheap, ended, races):
    """runs, right, cheap: how many there are. races: None where nobody has looked."""
    share = PARITY_SHARE * right / runs + COST_SHARE * cheap / runs
    if ended and right and races is not None and not races:
        share += RACE_SHARE
    return int(of * share + 1e-9)


def hints_of(exercise, mistakes):
    """What is known of a mistake in this exercise, a line each; empty where nothing is. mistakes: what recognised() found."""
    return sorted({m["why"] for m in mistakes if m["exercise"] == exercise.number})


def judge(stage, exercise, place, seen, reference, races, mistakes):
    """The verdict of an exercise. `place`: file:line of its body. seen: {run: Observation} of all runs of the stage so
    far; reference: {run: facts}; races: of the exercise's runs, or None; mistakes: what fingerprints.recognised found."""
    verdict = Verdict(exercise.number, exercise.title, exercise.points)
    differs = {name: differences(seen[name], reference[name]) for name in exercise.runs}
    right = [name for name in exercise.runs if is_right(differs[name])]
    cheap = [name for name in right if costs_right(differs[name], seen[name], reference[name])]
    ended = all(seen[name].end == "ok" for name in exercise.runs)
    verdict.points = points_of(exercise.points, len(exercise.runs), len(right), len(cheap), ended, races)
    verdict.hints = hints_of(exercise, mistakes)
    broken = [name for name in exercise.runs if name not in right] or [name for name in right if name not in cheap]
    verdict.wrong = len(broken) / len(exercise.runs)
    stubs = sorted(seen[name].end[:4] for name in broken if re.match(r"\d\d\.\d is not written", seen[name].end))
    if stubs:
        verdict.because, verdict.words = stubs[0], f"not judged because of {stubs[0]}, which is not written yet"
    elif broken:
        words = in_words(differs[broken[0]], seen[broken[0]], reference[broken[0]])
        verdict.words = f"{broken[0]}: {words}"
        if right and len(right) < len(exercise.runs):
            verdict.words += f"; right: {right[0]}"
    elif races:
        verdict.words = f"RACE: {races[0]} ({place})"
    elif races is None:
        verdict.words = f"right; no race? make races-{stage.number}"
    if verdict.hints:
        verdict.words += f". A hint: make hint-{exercise.number}"
    return verdict


def told(machine, stage, exercise, verdict):
    """The verdict with what the exercise's probes say of the machine's tree, if they do, in place of its hints."""
    said = probes.hint_of(machine, stage, exercise) if verdict.points < exercise.points and verdict.words else None
    if said and not verdict.words.startswith("waits for"):
        verdict.words += f". A hint: make hint-{exercise.number}" * (not verdict.hints)
        verdict.hints = [said]
    return verdict


def blame(stage, verdicts):
    """In a learner's tree a wrong body makes runs of other exercises wrong, too. Guilty are those whose mistake is known; else, of
    each program, the one that has most of its runs wrong, the first of such. The others are not judged."""
    for program in {run.program for run in stage.runs.values()}:
        wrong = [v for v in verdicts if v.wrong and not v.because
                 and stage.runs[stage.exercises[v.exercise].runs[0]].program == program]
        guilty = [v for v in wrong if v.hints] or [max(wrong, key=lambda v: v.wrong, default=None)]
        for verdict in wrong:
            if verdict not in guilty:
                verdict.because, verdict.words = guilty[0].exercise, f"not judged because of {guilty[0].exercise}"


def place_of(tree, exercise):
    text = (tree / exercise.file).read_text()
    return f"{exercise.file}:{text.count(chr(10), 0, sources.find_body(text, exercise.bodies[0], exercise.file)[0]) + 1}"


# ---- A learner's own tree

def state_of(stage):
    """Changes when a body of the stage, or anything beside it, does."""
    files = sorted({e.file for e in stage.exercises.values()})
    return hashlib.sha256("".join((ROOT / name).read_text() for name in files).encode()).hexdigest()


def noted(kind, stage):
    """What an earlier command noted for these very sources, or None."""
    path = STATE / f"{kind}-{stage.number}.json"
    if path.exists():
        note = json.loads(path.read_text())
        if note["state"] == state_of(stage):
            return note["content"]
    return None


def note(kind, stage, content):
    sources.put(STATE / f"{kind}-{stage.number}.json", json.dumps({"state": state_of(stage), "content": content}))


def grade(stage, say=print, seen=()):
    """Grades this tree, a line an exercise. Returns the points of the exercises. seen: {run:
    Observation}, of runs that need not be made again."""
    known = fingerprints.load()[stage.number]
    bodies = {e.number: sources.bodies_of(ROOT, e) for e in stage.exercises.values()}
    written = {n: e for n, e in stage.exercises.items() if not sources.is_stub(bodies[n])}
    seen, verdicts, machine, races = dict(seen), [], Machine(ROOT), noted("races", stage)
    if written:
        try:
            build(machine, {run.program for run in stage.runs.values()})
        except BuildError as error:
            say(f"{stage.number} does not compile: {error}")
            written = {}
    for name in dict.fromkeys(name for exercise in written.values() for name in exercise.runs):
        seen[name] = seen.get(name) or observe(machine, stage.runs[name])
    for number, exercise in stage.exercises.items():
        place = place_of(ROOT, exercise)
        if number not in written:
            missing = sources.is_stub(bodies[number])
            verdict = Verdict(number, exercise.title, exercise.points, 0, f"not written yet ({place})" * missing)
        else:
            differs = {name: differences(o, known["reference"][name]) for name, o in seen.items()
                       if "not written" not in o.end}
            mistakes = fingerprints.recognised(known, differs, (races or {}).get(number, ()))
            verdict = told(machine, stage, exercise, judge(stage, exercise, place, seen, known["reference"],
                                                           races and races.get(number), mistakes))
        verdicts.append(verdict)
    blame(stage, verdicts)
    for verdict in verdicts:
        say(verdict.line())
    if later := sum(v.of - v.points for v in verdicts if v.because):
        say(f"{later} of these points are not lost: they can't be judged yet")
    note("hints", stage, {v.exercise: v.hints for v in verdicts})
    return sum(v.points for v in verdicts)


def grade_hunt(stage, tree):
    """(points, words) of a hunt's tree. Which body has a mistake is not known there: as many points as thirds of the runs
    are right; make grade looks at each mistake alone."""
    if sources.read_note(tree).get("kind") != "hunt":
        raise UsageError(f"HUNT: {tree} is no hunt; make hunt-{stage.number} ID=you writes one, from the reference")
    machine, reference = Machine(tree), fingerprints.load()[stage.number]["reference"]
    try:
        build(machine, {run.program for run in stage.runs.values()})
    except BuildError as error:
        return 0, f" (does not compile: {error})"
    wrong = [(name, d, seen) for name, run in stage.runs.items()
             if (d := differences(seen := observe(machine, run), reference[name]))]
    if not wrong:
        return 15, ""
    name, differs, seen = wrong[0]
    return 3 * (len(stage.runs) - len(wrong)) // len(stage.runs) * 5, f" ({name}: {in_words(differs, seen, reference[name])})"


def look_for_races(stage, say=print):
    """Runs what is written for ThreadSanitizer, and notes what it finds, for grade()."""
    say(f"Building {stage.number} for ThreadSanitizer; the first time takes minutes.")
    machine, found, result = Machine(ROOT), {}, {}
    try:
        build(machine, {run.program for run in stage.runs.values()}, races=True)
    except BuildError as error:
        raise UsageError(f"{stage.number} does not compile: {error}") from None
    for number, exercise in stage.exercises.items():
        for name in exercise.runs:
            found[name] = found.get(name) or observe(machine, stage.runs[name], races=True)
        result[number] = sorted({race for name in exercise.runs for race in found[name].races})
        ends = [found[name].end for name in exercise.runs if found[name].end not in ("ok", "a data race")]
        words = "; ".join(result[number]) or (f"not looked at: {ends[0]}" if ends else "no race")
        say(f"{number} {exercise.title:23} {words}")
        if ends:
            result[number] = result[number] or None
    note("races", stage, result)


def hint(stages, number, say=print):
    stage = sources.stage_of(stages, number[:2])
    if number not in stage.exercises:
        raise UsageError(f"hint: {number!r} is not valid; expected {', '.join(stage.exercises)}")
    hints = noted("hints", stage)
    if hints is None:
        raise UsageError(f"hint: first make grade-{stage.number}, with the sources as they are now")
    for line in hints[number] or ["no probe finds what is wrong here, nor is it a known mistake; what differs stands in the grade"]:
        say(line)
