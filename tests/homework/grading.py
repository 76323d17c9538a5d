"""From the table of make grade to what Canvas and Moodle import: late days, dropped stages and weights (grading.txt)."""

import csv
import io
import pathlib
import re
from dataclasses import dataclass, field

from sources import UsageError

MOST = 100  # points of a stage; Moodle refuses a whole file for one grade above it


@dataclass
class Rules:
    weights: dict = field(default_factory=dict)  # by stage
    late: dict = field(default_factory=dict)  # days, by (stage, ID)
    drop: int = 0
    late_days: int = 0
    late_percent: float = 0


FORMS = {"weight": r"(\d\d) +(\d+(?:\.\d+)?)", "late": r"(\d\d) +(\S+) +(\d{1,3})", "drop": r"(\d{1,2})", "late_days": r"(\d{1,3})",
         "late_percent": r"(\d+(?:\.\d+)?)"}


def read_rules(path):
    path, rules = pathlib.Path(path), Rules()
    if not path.is_file():
        raise UsageError(f"GRADING: there is no file {path}")
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
        word, _, rest = line.partition("#")[0].strip().partition(" ")
        if not word:
            continue
        found = re.fullmatch(FORMS.get(word, "(?!)"), rest.strip())
        if not found:
            raise UsageError(f"GRADING: {path}:{number}: {line.strip()[:60]!r} is not valid; expected a line as grading.txt has "
                             f"them: {', '.join(FORMS)}")
        if word == "weight":
            rules.weights[found[1]] = float(found[2])
        elif word == "late":
            rules.late[found[1], found[2]] = int(found[3])
        else:
            setattr(rules, word, type(getattr(rules, word))(float(found[1])))
    return rules


def points_of(rows, rules):
    """{ID: {stage: points, None if nothing was handed in}} of the stages in the table. Points of an open problem count, up to
    MOST in all; of several submissions the best one."""
    stages = sorted({row["stage"] for row in rows if row["id"]})
    raw = {}
    for row in rows:
        if row["id"]:
            points = min(MOST, int(row["total"] or 0) + int(row["open"] or 0))
            of = raw.setdefault(row["id"], dict.fromkeys(stages))
            of[row["stage"]] = max(points, of[row["stage"]] or 0)
    for identity, of in raw.items():
        free = rules.late_days
        for stage in stages:
            days = rules.late.get((stage, identity), 0)
            paid, free = max(0, days - free), max(0, free - days)
            if of[stage] is not None:
                of[stage] = round(of[stage] * max(0, 1 - paid * rules.late_percent / 100), 2)
    return dict(sorted(raw.items()))


def course_points(of, rules):
    """The mean of a student's stages by weight, without those that are dropped: those in which most is lost. Of MOST."""
    counted = sorted((s for s in of if rules.weights.get(s, 0) > 0), key=lambda s: rules.weights[s] * (MOST - (of[s] or 0)))
    counted = counted[:max(1, len(counted) - rules.drop)]
    weight = sum(rules.weights[s] for s in counted)
    return round(sum(rules.weights[s] * (of[s] or 0) for s in counted) / weight, 2) if counted else 0


def tables(rows, rules):
    """{name: CSV} for Canvas and Moodle. The IDs are logins there. A cell that is empty (Canvas) or - (Moodle) changes nothing.

    Canvas (lib/gradebook_importer.rb): Student, ID, SIS Login ID, Section, then assignments; new ones are made. The row
    "Points Possible" says of how many. ID may stay empty, as the login finds the student.
    Moodle (grade/import/csv): any columns, the login as username; each other one is mapped to a grade item, or to a new one."""
    points = points_of(rows, rules)
    stages = sorted({stage for of in points.values() for stage in of})
    names = [f"Pentatron {stage}" for stage in stages] + ["Pentatron course"]

    def text(table):
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows(table)
        return out.getvalue()

    def cells(of, empty):
        return [empty if of[s] is None else f"{of[s]:g}" for s in stages] + [f"{course_points(of, rules):g}"]

    canvas = [["Student", "ID", "SIS Login ID", "Section", *names], ["    Points Possible", "", "", "", *[MOST] * len(names)]]
    canvas += [[identity, "", identity, "", *cells(of, "")] for identity, of in points.items()]
    moodle = [["username", *names]] + [[identity, *cells(of, "-")] for identity, of in points.items()]
    return {"canvas": text(canvas), "moodle": text(moodle)}
