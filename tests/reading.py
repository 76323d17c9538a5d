"""What a note asks of its reader:  reading.py NOTE...  Prints each violation.

"N minutes to read" are computed, not guessed: 150 words of the note a minute, and 12 lines a minute of the
files that it lists under *Where it is*; rounded up to 5. A file counts in the first note that lists it; one
behind "Skip" does not. A note with such a list says its minutes, and the plan of a course says them again.

An answer's command needs a program that make run or make test builds, or the answer says what makes it. What
an exercise bids to read first, in italics, is a heading of its note."""

import pathlib
import re
import sys

from questions import QUESTION, SESSION

WORDS, LINES = 150, 12  # a minute
STATED = re.compile(r"(\d+)\s+minutes\s+to\s+read")


def notes_of(folder):
    """In the order in which they are read."""
    return sorted(
        pathlib.Path().glob(f"{folder}/**/*.md"),
        key=lambda note: (note.parts[0], note.name != "README.md", note),
    )


def listed(note):
    found = re.search(r"^## Where it is\n((?:(?!## |Skip ).*\n)*)", note.read_text(), re.M)
    return {
        (note.parent / link).resolve() for link in re.findall(r"\]\(([^)#]+)\)", found[1] if found else "")
    }


def minutes(note):
    before = (
        set().union(*(listed(other) for other in notes_of("0*")[: notes_of("0*").index(note)]))
        if note in notes_of("0*")
        else set()
    )
    lines = sum(len(file.read_text().splitlines()) for file in listed(note) - before if file.suffix != ".md")
    return -int(-(len(note.read_text().split()) / WORDS + lines / LINES) // 5) * 5


def violations(note):
    text = note.read_text()
    stated = STATED.search(text)
    if pathlib.Path("tests/homework/not_run.txt").exists():  # a learner's tree, whose files lack bodies
        return
    if stated and int(stated[1]) != minutes(note) or listed(note) and not stated:
        yield f"{stated[0] if stated else 'no minutes to read'}; expected {minutes(note)} minutes to read"
    for stage, others, said in re.findall(r"^\| (0[1-7])((?:, `\S*`)*) \| (\d+) min \|", text, re.M):
        [first, *rest] = notes_of(f"{stage}_*")
        expected = minutes(first) + sum(
            minutes(other) for other in rest if f"`{other.relative_to(first.parent)}`" in others
        )
        if int(said) != expected:
            yield f"{said} min to read {stage}{others}; expected {expected}"
    for question, answer in QUESTION.findall(text):
        for command, _ in SESSION.findall(answer):
            for build, program in re.findall(r"build/cpu-(bf16|\$p)/(\w+)", command):
                if program != "07_combined_5d" and not re.search(r"`make (PRECISION=bf16|plan)`", answer):
                    yield f"{question!r} does not say what makes {program} of bf16"
    for read_first in re.findall(r"^\| 0[1-7]\.\d .* \| (.*) \|$", text, re.M):
        for heading in re.findall(r"\*(.+?)\*", read_first):
            if not re.search(rf"^#+ {re.escape(heading)}", text, re.M):
                yield f"no heading {heading!r}, which an exercise bids to read"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        for violation in violations(pathlib.Path(name)):
            print(f"{name}: {' '.join(violation.split())}")
