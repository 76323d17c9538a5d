"""The questions and the numbers of the notes:  questions.py [--fill | --lacking | --slow] NOTE...

Questions end a section, below a line **Ask yourself** (notes.sh looks at that). A question is a <details>
whose answer folds out. Below it stands the command that prints it, as in a terminal: a line "    $ COMMAND",
which goes on after a backslash or a pipe, and the very lines that it prints, but for blanks; among them is
each number in bold. --fill writes these lines.

A comment "<!-- run COMMAND -->" above a block of code: its lines are among those that the command prints; …
is for others.

A number of a table, or one with a unit, has an origin. A comment above its paragraph, list or table, or for
all at the head of a note, has a line for each:

    <!-- numbers
    $ COMMAND             it prints the number, in any unit, and rounded to any digit
    slow $ COMMAND        likewise, for --slow alone: it takes minutes
    = EXPRESSION, ...     or the number has this value (+ - * / **, KiB, GiB; in bytes, or in seconds)
    measured: where       or it was measured once
    source: where         or it is others'
    -->

A number belongs to its command: numbers stand in the order in which commands print them, row by row. Each
turn of a loop is a command. In a section that shows a command with …, the comment's commands have all its
other words.

A link to another site is an origin of its sentence; in an answer, so is what the next command prints, or the
question says. --lacking lists numbers that have none. The last line is "N passed, N failed", of questions and
comments."""

import ast
import concurrent.futures
import functools
import operator
import os
import pathlib
import re
import subprocess
import sys
import threading

QUESTION = re.compile(r"<details>\n<summary>(.*?)</summary>\n\n(.*?)\n\n</details>\n", re.S)
SESSION = re.compile(r"^    \$ ((?:.*[\\|]\n)*.*)\n?((?:    (?!\$ ).*\n?)*)", re.M)
RUN = re.compile(r"^<!-- run (.*) -->\n```.*\n((?:.*\n)*?)```", re.M)
BLOCK = re.compile(r"((?:^<!-- numbers\b(?:.|\n)*?-->\n)?)((?:^(?!<!--).*\S.*\n)+)", re.M)
COMMAND = re.compile(r"^(slow )?\$ ((?:.*\\\n)*.*)$", re.M)
TEMPLATE = re.compile(r"(?<=\n\n)(?:    .*\n)*    .*….*\n(?:    .*\n)*(?=\n)")
NUMBER = re.compile(
    r"(?<![\w.,^-])(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:\s(us|ms|s|bytes|[KMGT]i?B|%|TFLOP/s|[GT]B/s|tokens/s)(?![\w/]))?"
    r"(?![\w^]|[.,]\d)"
)
UNITS = {
    None: (1, ""),
    "us": (1e-6, "s"),
    "ms": (1e-3, "s"),
    "s": (1, "s"),
    "bytes": (1, "bytes"),
    "%": (0.01, "share"),
    "TFLOP/s": (1e12, "FLOP/s"),
    "GB/s": (1e9, "bytes/s"),
    "TB/s": (1e12, "bytes/s"),
    "tokens/s": (1, "tokens/s"),
}
UNITS |= {
    f"{letter}{i}B": ((1024 if i else 1000) ** n, "bytes")
    for n, letter in enumerate("KMGT", 1)
    for i in ("i", "")
}


def lines(text):
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


LOCKS = {}  # of commands


def printed(command):
    """What a command prints. Who needs the same command waits for it, and does not run it again."""
    with LOCKS.setdefault(command, threading.Lock()):
        return run(command)


@functools.cache
def run(command):
    environment = {**os.environ, "UCX_LOG_LEVEL": "error", "OMP_NUM_THREADS": "1", "LC_ALL": "C"}
    return subprocess.run(
        ["bash", "-c", command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    ).stdout


def judge(answer):
    """What is wrong, in words, or None."""
    for command, expected in SESSION.findall(answer):
        if lines(printed(command)) != lines(expected):
            return f"{command}\n  prints\n    " + "\n    ".join(lines(printed(command)))
    for bold in re.finditer(r"\*\*(.+?)\*\*", answer):
        if not re.search(rf"(?<![\d.,]){re.escape(bold[1])}(?![.,]?\d)", shown_below(answer, bold.start())):
            return f"{bold[1]} is not printed by the next command"
    return None


def shown_below(answer, at):
    """What an answer's next command prints, or its last: a closing sentence is about that."""
    sessions = [(0, "")] + [(session.start(), session[2]) for session in SESSION.finditer(answer)]
    return next((output for start, output in sessions if start > at), sessions[-1][1])


def not_printed(command, block):
    """The lines of a block that its command does not print, in words, or None."""
    missing = [line for line in lines(block) if line != "…" and line not in lines(printed(command))]
    return f"{command}\n  does not print\n    " + "\n    ".join(missing) if missing else None


def fill(answer):
    return SESSION.sub(
        lambda m: (
            f"    $ {m[1]}\n"
            + "".join(f"    {line.rstrip()}\n" for line in printed(m[1]).splitlines() if line.strip())
        ),
        answer + "\n",
    ).rstrip("\n")


class Number:
    """As it is printed, with its unit or None."""

    def __init__(self, match):
        self.words, self.unit = match[0], match[1]
        self.text = self.words.split()[0].replace(",", "")
        self.digits = len(self.text.partition(".")[2])

    def is_one(self, value, kind=None):
        """Whether it is this value, rounded. `kind`: of the value's unit, as "bytes"; None: a formula's
        value."""
        units = [UNITS[self.unit]] if self.unit else [(1, kind), *UNITS.values()]
        return any(
            f"{value / scale:.{self.digits}f}" == self.text for scale, own in units if kind in (None, own)
        )

    def is_in(self, numbers):
        return any(self.is_one(float(n.text) * UNITS[n.unit][0], UNITS[n.unit][1]) for n in numbers)


def numbers_in(text):
    return [Number(match) for match in NUMBER.finditer(text)]


def to_prove(block):
    """The numbers of a paragraph, a list or a table that need an origin: those with a unit, and in a table
    all with a fraction or three digits; not those of code, of formulas, of a few bytes, or of a sentence or
    row with a link to another site, nor names of exercises."""
    sentences = re.split(r"(?<=[.:])\s+|\n(?=[|-])", block)
    text = re.sub(
        r"`[^`]*`|\]\([^)]*\)|<img [^>]*>|\b0[1-7]\.\d",
        "",
        " ".join(words for words in sentences if "](http" not in words),
    )
    table = block.startswith("|")
    return [
        n
        for n in numbers_in(text)
        if n.unit and (n.unit != "bytes" or len(n.text) > 3) or table and len(n.text) > 2
    ]


def blocks(text):
    """(line, comment, text, section before it, numbers around it) of each paragraph, list or table with
    numbers to prove. Around one in an answer: those of the question, and those that the next command
    prints."""
    skipped = re.compile(r"^ *```(?:.|\n)*?^ *```$|^<!-- (?:figure|run) (?:.|\n)*?-->$", re.M)
    text = skipped.sub(lambda match: "\n" * match[0].count("\n"), text)
    questions = list(QUESTION.finditer(text))
    for match in BLOCK.finditer(text):
        at = match.start()
        if not match[2].startswith(("    ", "#", "<")) and to_prove(match[2]):
            around = [
                f"{q[1]} {shown_below(q[2], at - q.start(2))}" for q in questions if q.start() < at < q.end()
            ]
            yield (
                text.count("\n", 0, match.start(2)) + 1,
                *match.groups(),
                text[text.rfind("\n## ", 0, at) : at],
                numbers_in("".join(around)),
            )


def lacking(note, text):
    """Numbers without an origin, each as a line of words."""
    for line, comment, block, _, around in blocks(text):
        for number in [] if comment or text.startswith("<!-- numbers") else to_prove(block):
            if not number.is_in(around):
                yield f"{note}:{line}: {number.words}: no origin (tests/questions.py)"


OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}


def values_of(formulas):
    """Of formulas with commas between."""

    def value(node):
        if isinstance(node, ast.BinOp):
            return OPERATIONS[type(node.op)](value(node.left), value(node.right))
        return {"KiB": 2**10, "GiB": 2**30}[node.id] if isinstance(node, ast.Name) else node.value

    return [value(node) for node in ast.parse(f"[{formulas}]", mode="eval").body.elts]


def unproven(comment, block, section, around, slow):
    """Numbers that neither stand `around` it, nor a formula gives, nor the comment's commands print, in
    words; or None."""
    if re.search(r"^(measured|source): ", comment, re.M) or not slow and re.search("^slow ", comment, re.M):
        return None
    values = [value for formulas in re.findall(r"^= (.*)$", comment, re.M) for value in values_of(formulas)]
    numbers = [
        number
        for number in to_prove(block)
        if not number.is_in(around) and not any(map(number.is_one, values))
    ]
    commands = [command for _, command in COMMAND.findall(comment)]
    shown = [set(code.split()) - {"…", "\\"} for code in TEMPLATE.findall(section)]
    for command in [command for command in commands if shown and "build/" in command]:
        if not any(words <= set(command.split()) for words in shown):
            return f"{command}\n  lacks what the section's command has: {', '.join(shown[-1] - set(command.split()))}"
    # A form feed ends what a command prints, and each turn of its innermost loop. This machine's own time
    # proves nothing.
    output = "\f".join(
        printed(re.sub(r";[\s\\]*done", r"; printf '\\f'; done", command, count=1)) for command in commands
    )
    return misplaced(
        numbers, [part for part in re.sub("On this machine.*", "", output).split("\f") if part.strip()]
    )


def misplaced(numbers, outputs):
    """The first number that its output lacks, in words, or None. An output has the next numbers; a number may
    be in several."""
    printers = {0}  # of the next number
    for number in numbers:
        found = set()
        for i in printers:
            while i < len(outputs) and number.is_in(numbers_in(outputs[i])):
                found.add(i)
                i += 1
        if not found:
            seen = [line for output in outputs[min(printers) :][:2] for line in lines(output)[-20:]]
            return f"{number.words} is not what its command prints:\n    " + "\n    ".join(seen)
        printers = found | {i + 1 for i in found}
    return (
        None
        if len(outputs) in printers
        else f"command {max(printers) + 1} of {len(outputs)} prints none of the numbers"
    )


def main(*given):
    texts = {
        pathlib.Path(word): pathlib.Path(word).read_text() for word in given if not word.startswith("--")
    }
    if "--fill" in given:
        for note, text in texts.items():
            note.write_text(
                QUESTION.sub(
                    lambda m: f"<details>\n<summary>{m[1]}</summary>\n\n{fill(m[2])}\n\n</details>\n", text
                )
            )
        return 0
    if "--lacking" in given:
        print(*(words for note, text in texts.items() for words in lacking(note, text)), sep="\n")
        return 0
    slow, checks = "--slow" in given, []  # (where, what finds the fault)
    for note, text in texts.items():
        if not slow:
            checks += [
                (f"{note}: {question}", functools.partial(judge, answer))
                for question, answer in QUESTION.findall(text)
            ]
            checks += [
                (f"{note}: {command}", functools.partial(not_printed, command, block))
                for command, block in RUN.findall(text)
            ]
            if len(QUESTION.findall(text)) != text.count("<details>"):
                checks.append((note, lambda: "not all questions are well-formed"))
        for line, comment, *rest in blocks(text):
            if comment and (not slow or re.search("^slow ", comment, re.M)):
                checks.append((f"{note}:{line}", functools.partial(unproven, comment, *rest, slow)))
    failed = 0
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for (where, _), fault in zip(checks, pool.map(lambda check: check[1](), checks)):
            if fault:
                print(f"FAILED: {where}\n  {fault}", flush=True)
                failed += 1
    print(f"{len(checks) - failed} passed, {failed} failed")
    return failed > 0 or not checks


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
