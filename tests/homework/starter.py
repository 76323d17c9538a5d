"""Trees for learners: a starter tree, in which the bodies of one stage are to be written, and a hunt, in
which three mistakes are planted in a finished stage."""

import json
import pathlib
import random
import re
import shutil
import subprocess

import reference
import sources
from sources import HERE, ROOT, UsageError, files_of, put, read_mutants, seen_in_the_wild

# What gives the solution away, or is for teachers.
LEFT_OUT = ["tests/mutants.txt", "tests/mutants.sh", "tests/book.py", ".ci/run"]
LEFT_OUT += [
    f"tests/homework/{name}"
    for name in """HOMEWORK.md HOMEWORK-AGENTS.md check.py course.md exam.py exam.txt hostile.txt hours.py not_written.h
    starter.py teacher.md""".split()
]


def solution_lines(stages):
    """Lines of the bodies that say something."""
    return {
        line.strip()
        for stage in stages
        for e in stage.to_write().values()
        for body in sources.bodies_of(ROOT, e)
        for line in body.splitlines()
        if len(line.strip()) >= 20 and not line.strip().startswith("//")
    }


def corpus_without(stages):
    """The text that the programs learn from, without old forms of the files that are to be written."""
    names = {e.file.rsplit("/", 1)[-1] for stage in stages for e in stage.to_write().values()}
    lines, kept, inside = solution_lines(stages), [], False
    for line in (ROOT / "common/corpus.txt").read_text().splitlines():
        if line.startswith("==== "):
            inside = line.strip("= ").rsplit("/", 1)[-1] in names
        if not inside and line.strip() not in lines:
            kept.append(line)
    return "\n".join(kept) + "\n"


def manifest_of(stages):
    """The part of exercises.txt that is about these stages."""
    text, kept, inside = (HERE / "exercises.txt").read_text(), [], True
    for line in text.splitlines():
        if line.startswith("stage "):
            inside = line.split()[1] in {stage.number for stage in stages}
        if inside and not line.startswith("unseen "):
            kept.append(line)
    return "\n".join(kept) + "\n"


def commands_of(file):
    """A makefile without what works in the reference alone: a section of tests.mk; the book, which is drawn from
    what programs print."""
    text = (ROOT / file).read_text().partition("\n# ---- In the reference alone")[0].rstrip() + "\n"
    return re.sub(r"^book[ :].*\n(\t.*\n)*", "", text, flags=re.M)


def write_tree(stages, to, note, change):
    """Writes a tree into a new folder `to`, with a history of one commit. `change`: {file: text} that
    differs."""
    if to.exists():
        raise UsageError(f"TO: {to} exists; expected a new folder")
    if sources.read_note():
        raise UsageError("this is a learner's tree; starter trees and hunts are made from the reference")
    to.parent.mkdir(parents=True, exist_ok=True)
    change = {
        **change,
        ".homework": json.dumps(note) + "\n",
        "AGENTS.md": (HERE / "HOMEWORK-AGENTS.md").read_text(),
        "common/corpus.txt": corpus_without(stages),
        "Makefile": commands_of("Makefile"),
        "tests/tests.mk": commands_of("tests/tests.mk"),
        "tests/tour.txt": (ROOT / "tests/tour.txt").read_text().partition("\nstep Break it")[0] + "\n",
        "tests/homework/exercises.txt": manifest_of(stages),
        "tests/homework/reference.json": reference.text_of(
            {number: numbers for number, numbers in reference.load().items() if number in note["stages"]}
        ),
    }
    for stage in stages:  # what to try afterwards names what to write
        for path in ROOT.glob(f"{stage.number}_*/*.md"):
            change[str(path.relative_to(ROOT))] = re.sub(
                r"\n## Variations\n.*?(?=\n## |\Z)", "", path.read_text(), flags=re.S
            )
    for note_of_all in ("README.md", "tests/homework/README.md"):  # no links to what is left out
        change[note_of_all] = re.sub(
            r"\[([^]]*)\]\([^)]*(teacher|course)\.md\)", r"\1", (ROOT / note_of_all).read_text()
        )
    part = to.with_name(to.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    for name in files_of():
        if name not in LEFT_OUT and name not in change:
            put(part / name, (ROOT / name).read_bytes(), (ROOT / name).stat())
    for name, text in change.items():
        put(part / name, text)
    git = "git -c user.name=homework -c user.email=homework@localhost -c commit.gpgsign=false".split()
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", f"Homework {' '.join(note['stages'])}"]):
        subprocess.run([*git, *command], cwd=part, check=True)
    part.rename(to)


def starter(stages, course, to):
    """make homework: the bodies of these stages that are asked are to be written."""
    change, asked = {}, [e for stage in stages for e in stage.to_write().values()]
    for file in sorted({e.file for e in asked}):
        here = [e for e in asked if e.file == file]
        change[file] = sources.stubbed((ROOT / file).read_text(), here)
    change["tests/homework/not_run.txt"] = (
        "~[.]"
        + "".join(dict.fromkeys(re.findall(r"~\[\w+\]", "".join(stage.tests for stage in stages))))
        + "\n"
    )
    change["common/device/not_written.h"] = (HERE / "not_written.h").read_text()
    change["HOMEWORK.md"] = homework_note(stages, course)
    note = {
        "kind": "write",
        "stages": [s.number for s in stages],
        "asked": list(dict.fromkeys(a for s in stages for a in s.asked)),
        "course": course,
    }
    write_tree(stages, to, note, change)
    print(f"{to} is written; go there and read HOMEWORK.md")


PART_NOTES = {"hunt": "three mistakes to find", "paper": "five questions on paper"}


def core_note(exercise):
    """What HOMEWORK.md says of a core exercise."""
    ranks = ", ".join(map(str, sizes_of(exercise)))
    return f"""
## {exercise.number} {exercise.title}

{exercise.core["contract"]}

*Picture:* {exercise.core["picture"]}

*Sizes:* {ranks} ranks, each with two models: one that you see, and one of your teacher's.
"""


def sizes_of(exercise):
    """The numbers of ranks on which its runs are; each with the visible and with the hidden sizes of the model."""
    runs = sources.read_stages()[exercise.number[:2]].runs
    return sorted({runs[name].ranks for name in exercise.runs})


def homework_note(stages, course):
    rows = [
        f"| {e.number} | {e.title} | {'★' * e.stars} | {e.points} | `{e.file}` | {e.read} |"
        for stage in stages
        for e in stage.to_write().values()
    ]
    rows += [
        f"| {part} | {PART_NOTES[part]} | | {sources.PARTS[part] * len(stages)} | | |"
        for part in sources.PARTS
        if all(part in stage.asked for stage in stages)
    ]
    words = {
        "course": course,
        "stage": stages[0].number,
        "first": next(iter(stages[0].to_write())),
        "rows": "\n".join(rows),
        "core": "".join(map(core_note, [e for s in stages for e in s.to_write().values() if e.core])),
    }
    return re.sub(r"\{(\w+)\}", lambda found: words[found[1]], (HERE / "HOMEWORK.md").read_text())


# ---- The hunt


def planted(stage, identity):
    """The three mutants of a hunt, in three exercises; a run shows each. Every second hunt is sure to have
    one of tests/wild.md; not every one, as there are few of them."""
    choice = random.Random(f"hunt {stage.number} {identity}")
    by_exercise, unseen = {}, sources.unseen()
    for mutant in read_mutants():
        exercise = sources.exercise_of(stage, mutant)
        if exercise and mutant.name not in unseen and not mutant.is_race():
            by_exercise.setdefault(exercise.number, []).append(mutant)
    wild = [
        (exercise, m)
        for exercise in sorted(by_exercise)
        for m in by_exercise[exercise]
        if m.name in seen_in_the_wild()
    ]
    chosen = dict([choice.choice(wild)] if wild and choice.random() < 0.5 else [])
    for exercise in choice.sample(sorted(set(by_exercise) - set(chosen)), 3 - len(chosen)):
        chosen[exercise] = choice.choice(by_exercise[exercise])
    return dict(sorted(chosen.items()))


def hunt(stage, identity, to=None, say=print):
    """make hunt-03: a finished stage with three mistakes."""
    to, change = pathlib.Path(to or ROOT / f"build/hunt-{stage.number}-{identity}"), {}
    for mutant in planted(stage, identity).values():
        change[mutant.file] = mutant.applied(change.get(mutant.file) or (ROOT / mutant.file).read_text())
    change["tests/homework/not_run.txt"] = "~[.]" + stage.tests + "\n"
    change[f"found-{stage.number}.txt"] = (
        f"# Three mistakes are in the bodies of stage {stage.number}'s exercises (tests/homework/exercises.txt).\n"
        "# Mend each. Then explain it here: where it was, what it did to which run, and why.\n\n1.\n\n2.\n\n3.\n"
    )
    write_tree([stage], to, {"kind": "hunt", "stages": [stage.number], "id": identity}, change)
    say(
        f"{to}: stage {stage.number} with three mistakes; mend them, and explain them in found-{stage.number}.txt"
    )
