"""From the table of make grade to what Canvas and Moodle import: of each stage a file for the one and for the
other. They have late days, weights and dropped stages themselves, and make the sum of a course."""

import csv
import io
import pathlib
import re

from sources import UsageError


# What the head of a table calls the login, the best one first, and the name: one column, or two.
LOGINS = ("login", "username", "sis login id", "user", "id", "email address")
NAMES = ({"name"}, {"full name"}, {"student"}, {"first name", "last name"}, {"first name", "surname"})


def read_roster(path):
    """{login: full name, or ""} of a file; None without one. A line has a login, and perhaps a name behind it.
    Or its first line says what the columns are, as in a table that Moodle or Canvas has exported."""
    if path is None:
        return None
    if not pathlib.Path(path).is_file():
        raise UsageError(f"ROSTER: there is no file {path}; expected one with a login on each line")
    data = pathlib.Path(path).read_bytes()
    text = data.decode("utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig", errors="replace")
    delimiter = max(",;\t", key=text.partition("\n")[0].count)
    rows = [[cell.strip() for cell in row] for row in csv.reader(text.splitlines(), delimiter=delimiter)]
    rows = [row for row in rows if any(row)]
    head = [cell.lower() for cell in rows[0]] if rows else []
    login, names = 0, [1]
    if known := [name for name in LOGINS if name in head]:
        login = head.index(known[0])
        names = next(([head.index(n) for n in sorted(both)] for both in NAMES if both <= set(head)), [])
        rows = rows[1:]
    return {
        row[login]: " ".join(row[n] for n in names if n < len(row)).strip()
        for row in rows
        if login < len(row) and row[login]
    }


def words_of(name):
    return set(re.findall(r"\w+", name.casefold()))


def uploaders(folder, roster):
    """Those of the roster whom the name of a folder tells: Moodle puts what a student hands in into "Ada
    Lovelace_123_assignsubmission_file", perhaps with a group before it; another folder may be a login."""
    found = re.fullmatch(r"(.+)_\d+_assignsubmission_\w+", folder)
    words = words_of(found[1] if found else folder)
    names = {login: words_of(name) for login, name in (roster or {}).items()}
    return [login for login, of in names.items() if login == folder or (of and of <= words)]


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
