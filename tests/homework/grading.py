"""From the table of make grade to what Canvas and Moodle import: of each stage a file for the one and for the
other. They have late days, weights and dropped stages themselves, and make the sum of a course."""

import csv
import io
import pathlib

from sources import UsageError


def read_roster(path):
    """The logins of a file, one a line; None without a file."""
    if path is None:
        return None
    if not pathlib.Path(path).is_file():
        raise UsageError(f"ROSTER: there is no file {path}; expected one with a login on each line")
    return {
        line.strip() for line in pathlib.Path(path).read_text(errors="replace").splitlines() if line.strip()
    }


def tables(rows, roster=None):
    """{name: CSV}. The IDs are logins there. Who has handed in nothing, could not be judged, or is not in the
    roster has no row: Canvas takes an empty cell for a change, and Moodle's import stops at a login that it
    does not know. Points of an open problem count, up to all that is asked; of several submissions
    the best one.

    Canvas (lib/gradebook_importer.rb): Student, ID, SIS Login ID, Section, then assignments; new ones are
    made. The row "Points Possible" says of how many. ID may stay empty, as the login finds the student.
    Moodle (grade/import/csv): any columns, the login as username; each other one is mapped to a grade item,
    or to a new one, which is of 100: so it gets percent. It refuses a whole file for one grade above that."""
    result, points, possible = {}, {}, {}
    for row in rows:
        if row["total"] != "" and row["id"] and (roster is None or row["id"] in roster):
            of = points.setdefault(row["stage"], {})
            possible[row["stage"]] = most = int(row["of"])
            of[row["id"]] = max(of.get(row["id"], 0), min(most, int(row["total"]) + int(row["open"] or 0)))
    for stage, of in sorted(points.items()):
        title = f"Pentatron {stage}"
        canvas = [
            ["Student", "ID", "SIS Login ID", "Section", title],
            ["    Points Possible", "", "", "", possible[stage]],
        ]
        canvas += [[identity, "", identity, "", number] for identity, number in sorted(of.items())]
        moodle = [["username", f"{title} (%)"]]
        moodle += [[who, f"{100 * number / possible[stage]:.4g}"] for who, number in sorted(of.items())]
        for name, table in (("canvas", canvas), ("moodle", moodle)):
            out = io.StringIO()
            csv.writer(out, lineterminator="\n").writerows(table)
            result[f"{name}-{stage}"] = out.getvalue()
    return result
