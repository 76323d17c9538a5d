"""How long exercises take, in hours: computed from words and lines, and beside it what classes said
(make course-hours IN=FOLDER).

Computed: the sections to read first and the file without the bodies, as fast as tests/reading.py reads them,
and ten lines of the solution an hour, with all that goes wrong. Rounded up to half hours. That is no
measurement: each class fills in a table. A line is a student and an exercise; course.md has the form."""

import csv
import pathlib
import re
import statistics
import sys

import sources
from sources import ROOT, UsageError

sys.path.insert(0, str(sources.HERE.parent))
from reading import LINES, WORDS

WRITTEN = 10  # lines of the solution an hour
COLUMNS = "exercise read write hint stuck".split()  # minutes, minutes, the highest level taken, words


def lines_of(body):
    """Lines that say something."""
    return sum(len(line.strip()) > 2 and line.strip()[:2] != "//" for line in body.splitlines())


def computed(exercise):
    bodies = sources.bodies_of(ROOT, exercise)
    words = len(exercise.core.get("contract", "").split())
    for note, names in re.findall(r'(\S+\.md)((?:, |"[^"]*"| and )*)', exercise.read):
        text = (ROOT / note).read_text()
        for name in re.findall(r'"([^"]*)"', names):
            words += len(re.search(rf"^## {re.escape(name)}\n(.*?)(?=^## |\Z)", text, re.M | re.S)[1].split())
    file = (ROOT / exercise.file).read_text().count("\n") - sum(body.count("\n") for body in bodies)
    hours = (words / WORDS + file / LINES) / 60 + sum(map(lines_of, bodies)) / WRITTEN
    return -int(-hours * 2 // 1) / 2


def wrong_with(row, known):
    """What is not valid in a row, in words, or None."""
    if len(row) != len(COLUMNS):
        return f"{len(row)} columns; expected {len(COLUMNS)}: {', '.join(COLUMNS)}"
    if row[0] not in known:
        return f"exercise: {row[0][:20]!r} is not valid; expected 01.1 to 07.5"
    for name, text in (("read", row[1]), ("write", row[2])):
        if not re.fullmatch(r"[0-9]{1,4}", text):
            return f"{name}: {text[:20]!r} is not valid; expected minutes"
    return None if row[3] in ("0", "1", "2", "3") else f"hint: {row[3][:20]!r} is not valid; expected 0 to 3"


def course_hours(stages, source=None, say=print):
    """make course-hours: a line for each exercise. Returns 2 if a row is not valid, otherwise 0."""
    known = {n: e for stage in stages.values() for n, e in stage.exercises.items()}
    took, bad = {}, 0
    source = pathlib.Path(source) if source else None
    files = []
    if source is not None:
        files = [source] if source.is_file() else sorted(f for f in source.glob("*.csv") if f.is_file())
    if source is not None and not files:
        raise UsageError(f"IN: {source} has no *.csv; expected a table of hours, or a folder of them")
    for path in files:
        text = path.read_bytes().decode("utf-8-sig", errors="replace").replace("\0", "")
        delimiter = max(",;\t", key=text.partition("\n")[0].count)
        for number, line in enumerate(text.splitlines(), 1):
            row = [cell.strip() for cell in next(csv.reader([line[:1000]], delimiter=delimiter), [])]
            if not any(row) or number == 1 and row == COLUMNS:
                continue
            if why := wrong_with(row, known):
                say(f"{path.name}:{number}: {why}")
                bad += 1
            else:
                took.setdefault(row[0], []).append(((int(row[1]) + int(row[2])) / 60, row[3]))
    say(f"{'':33} computed  median  range         students, with hint 1, 2, 3")
    for number, exercise in known.items():
        line = f"{number + ' ' + exercise.title:33} {computed(exercise):6.1f} h"
        if number in took:
            hours, hints = zip(*took[number])
            between = f"{min(hours):.1f} to {max(hours):.1f} h"
            line += f"  {statistics.median(hours):4.1f} h  {between:13} {len(hours):8}"
            line += f"       {', '.join(str(hints.count(level)) for level in '123')}"
        say(line)
    return 2 if bad else 0
