"""What a note asks of its reader:  reading.py NOTE...  Prints each violation.

"N minutes to read" are computed, not guessed: 150 words of the note a minute, and 12 lines a minute of what
it lists under *Where it is*; rounded up to 5. Of a file that is all lines, or, where the list says "Read `this`
and `that`.", its opening comment and these functions and types, each with the comment above it. A line counts
in the first note that lists it; what is behind "Skip" does not. A note with such a list says its minutes, and
the plan of a course says them again.

An answer's command needs a program that make run or make test builds, or the answer says what makes it. What
an exercise bids to read first, in italics, is a heading of its note.

A note explains a word where it has it in italics. If an earlier note uses it, it is one of the *Words* of
common/README.md. Those have a last column, the notes that explain them: each has the word."""

import itertools
import pathlib
import re
import sys

from questions import QUESTION, SESSION

WORDS, LINES = 150, 12  # a minute
FORMULA = re.compile(r"\$(?! )[^$\n]+(?<! )\$|^```math\n.*?```", re.S | re.M)
# What only a formula has: a letter alone, or with an index; words that an operator joins; a letter that is not ours.
UNMARKED = re.compile(
    r"(?<![\w'’./+-])(?<![\d)] )(?<!\ba )(?!\de-|g\+\+)(?:\d*[b-zGHJ-UW-Z]|d[KQVWxyz]|[A-Za-z]_\w)(?=[ ,;:)=+*/.](?!\w)|-\d|$)"
    r"|[A-Za-z]\)? (?:·|=|<=|>=|/|\+) \(?[A-Za-z]|\^|[Α-Ωα-λν-ωΣ√ᵀᵗᵢⱼ₀₁²³≤≥]",
    re.M,
)
STATED = re.compile(r"(\d+)\s+minutes\s+to\s+read")


def notes_of(folder):
    """In the order in which they are read."""
    return sorted(
        pathlib.Path().glob(f"{folder}/**/*.md"),
        key=lambda note: (note.parts[0], note.name != "README.md", note),
    )


def definition(lines, name):
    """The numbers of the lines that define a function or a type, with the comment above; none if nothing does."""
    begins = re.compile(
        rf"(?=[A-Za-z_]).*\b{re.escape(name)}(\(| \{{| : )|(class|struct|enum class) {re.escape(name)}\b"
    )
    for first, line in enumerate(lines):
        if not begins.match(line):
            continue
        last = next(i for i in range(first, len(lines)) if re.search(r"[{};]$", lines[i]))
        if lines[last].endswith(";") and "{" not in lines[last]:
            continue  # only declared
        if lines[last].endswith("{"):
            last = next(i for i in range(last, len(lines)) if re.match(r"\};?$", lines[i]))
        while re.match(r"//(?! ----)|template|__global__", lines[first - 1]):
            first -= 1
        return range(first, last + 1)
    return range(0)


def listed(note):
    """What it lists under *Where it is*: a file, and the names in it that it bids to read, or none for all."""
    found = re.search(r"^## Where it is\n((?:(?!## |Skip ).*\n)*)", note.read_text(), re.M)
    for item in re.split(r"^- ", found[1], flags=re.M) if found else []:
        read = re.search(r"\bRead\s+(`.*?`)\.\s", item, re.S)
        for link in re.findall(r"\]\(([^)#]+)\)", item):
            yield (note.parent / link).resolve(), re.findall(r"`(.*?)`", read[1]) if read else []


def lines_listed(note):
    """Pairs of file and line."""
    for file, names in listed(note):
        if file.suffix == ".md":
            continue
        lines = file.read_text().splitlines()
        wanted = [definition(lines, name) for name in names] or [range(len(lines))]
        if names:
            wanted.append(itertools.takewhile(lambda i: lines[i].startswith("//"), range(len(lines))))
        yield from ((file, i) for part in wanted for i in part)


def minutes(note):
    stages = notes_of("0*")
    earlier = stages[: stages.index(note)] if note in stages else []
    before = {line for other in earlier for line in lines_listed(other)}
    lines = set(lines_listed(note)) - before
    return -int(-(len(note.read_text().split()) / WORDS + len(lines) / LINES) // 5) * 5


def notes_in_order():
    outer = [pathlib.Path("README.md"), pathlib.Path("common/README.md")]
    return outer + notes_of("0*") + sorted(pathlib.Path().glob("common/*/README.md"))


def prose(note):
    """Its text without code, comments, and what links lead to."""
    return re.sub(r"<!--.*?-->|```.*?```|^    .*?$|`.*?`|\]\(.*?\)", "", note.read_text(), flags=re.S | re.M)


def unmarked(text):
    """Formulas without $ around them, each with its line. A picture's words, headings and summaries, which GitHub does not set,
    may have some."""
    hidden = rf"<!--.*?-->|{FORMULA.pattern}|```.*?```|^    .*?$|^#.*?$|<summary>.*?</summary>|`.*?`|!\[.*?\]|\]\(.*?\)"
    rest = re.sub(hidden, lambda found: re.sub(".", "_", found[0]), text, flags=re.S | re.M)
    for found in UNMARKED.finditer(rest):
        yield text.count("\n", 0, found.start()) + 1, found[0]


EMPHASES = {"all", "every", "gradients", "measured", "other", "same"}  # in italics for another reason


def has(text, word):
    return re.search(rf"\b{re.escape(word)}e?s?\b", text, re.I)


def words_not_explained(glossary):
    rows = re.findall(r"^\| (.*) \| .* \| (.*) \|$", glossary.read_text().partition("## Words\n")[2], re.M)
    known = {word.lower() for words, _ in rows[1:] for word in words.split(", ")}
    notes = notes_in_order()
    texts = [prose(note) for note in notes]
    for i, text in enumerate(texts):
        for word in re.findall(r"(?<![*\w])\*([a-z][\w -]*\w)\*(?!\*)", text):
            singular = word.removesuffix("s")
            if word in EMPHASES or {word, singular} & known:
                continue
            known.add(word)  # from this note on
            if used := [str(notes[k]) for k in range(i) if has(texts[k], singular)]:
                yield f"not among the words: {word}, explained in {notes[i]}, used in {used[0]}"
    for words, places in rows[1:]:
        for place in places.split(", "):
            found = [n for n in notes if n.match(f"{place}_*/README.md") or place in (n.stem, n.parent.name)]
            for word in words.split(", "):
                if place != "this note" and not any(has(prose(n), word) for n in found):
                    yield f"{place} does not have the word {word}"


# How a note of a stage begins, if it says its minutes.
BEGINS = re.compile(
    r"# .*\n\nAfter this (stage|note) you can\n\n(- .*\n|  .*\n)+\nYou need (.*\n?){1,2} Time:\s\d+\sminutes\sto\sread, about\s\d+\sto\srun\.\n\n"
)


def violations(note):
    text = note.read_text()
    stated = STATED.search(text)
    if note.parts[0][0] == "0" and stated and not BEGINS.match(text):
        yield "expected to begin with: what you can do, what you need, how long it takes"
    if pathlib.Path("tests/homework/not_run.txt").exists():  # a learner's tree, whose files lack bodies
        return
    if note.resolve() == pathlib.Path("common/README.md").resolve():
        yield from words_not_explained(note)
    for command in re.findall(r"^(?:    )?((?:make|mpirun|build/) ?[^#|`\n]*\S  +[^\s#\\|-].*)$", text, re.M):
        yield f"{command!r}: a reader copies this line whole; expected # before what it does"
    for line, formula in unmarked(text):
        yield f"line {line}: {formula!r} is a formula; expected $ around it"
    for file, names in listed(note):
        for name in names:
            if not definition(file.read_text().splitlines(), name):
                yield f"{file.name} defines no {name}, which the note bids to read"
    if stated and int(stated[1]) != minutes(note) or list(listed(note)) and not stated:
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
