"""The questions and the numbers of the notes:  questions.py [--fill | --lacking | --slow] NOTE...

Questions end a section, below a line **Ask yourself** (notes.sh looks at that). A question is a <details> whose answer folds
out. Below it stands the command that prints it, as in a terminal: a line "    $ COMMAND", which goes on after a backslash or a
pipe, and what it prints; blanks count as one. Each command is run, and must print these very lines; each number in bold must
be among them. --fill writes what the commands print into the notes.

A comment "<!-- run COMMAND -->" above a block of code: its lines are among those that the command prints; … stands for others.

A number of a table, or one with a unit, says where it is from. A comment above its paragraph, list or table has a line for
each origin:

    <!-- numbers
    $ COMMAND             its numbers are printed by it, in any unit, and rounded to any digit
    slow $ COMMAND        likewise, for --slow alone: it takes minutes
    = EXPRESSION          or have this value (Python; a size in bytes, a time in seconds)
    measured: where       or were measured once
    source: where         or are others'
    -->

At the head of a note it is for all of it. `lessons` (make lessons checks it) is such a comment, too. A link to another site is
an origin of its sentence; in an answer, so is what its commands print, or the question says. --lacking lists numbers that have
none. The last line is "N passed, N failed", of questions and comments."""

import concurrent.futures
import functools
import math
import os
import pathlib
import re
import subprocess
import sys

QUESTION = re.compile(r"<details>\n<summary>(.*?)</summary>\n\n(.*?)\n\n</details>\n", re.S)
SESSION = re.compile(r"^    \$ ((?:.*[\\|]\n)*.*)\n?((?:    (?!\$ ).*\n?)*)", re.M)
RUN = re.compile(r"^<!-- run (.*) -->\n```.*\n((?:.*\n)*?)```", re.M)
BLOCK = re.compile(r"((?:^<!-- (?:numbers|lessons)\b(?:.|\n)*?-->\n)*)((?:^(?!<!--).*\S.*\n)+)", re.M)
COMMAND = re.compile(r"^(slow )?\$ ((?:.*\\\n)*.*)$", re.M)
NUMBER = re.compile(r"(?<![\w.,^-])(\d{1,3}(?:,\d{3})+|\d+)(\.\d+)?(?:\s(us|ms|s|bytes|[KMGT]i?B|%|TFLOP/s|[GT]B/s|tokens/s)(?![\w/]))?"
                    r"(?![\w^]|[.,]\d)")
UNITS = {"us": (1e-6, "s"), "ms": (1e-3, "s"), "s": (1, "s"), "%": (0.01, "share"), "TFLOP/s": (1e12, "FLOP/s"), "bytes": (1, "bytes"),
         "tokens/s": (1, "tokens/s"),
         "GB/s": (1e9, "bytes/s"), "TB/s": (1e12, "bytes/s")}
UNITS |= {f"{letter}{i}B": ((1024 if i else 1000) ** n, "bytes") for n, letter in enumerate("KMGT", 1) for i in ("i", "")}


def lines(text):
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


@functools.cache
def printed(command):
    environment = {**os.environ, "UCX_LOG_LEVEL": "error", "OMP_NUM_THREADS": "1", "LC_ALL": "C"}
    done = subprocess.run(["bash", "-c", command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, env=environment)
    return done.stdout


def judge(answer):
    """What is wrong, in words, or None."""
    shown = []
    for command, expected in SESSION.findall(answer):
        seen = lines(printed(command))
        if seen != lines(expected):
            return f"{command}\n  prints\n    " + "\n    ".join(seen)
        shown += seen
    for number in re.findall(r"\*\*(.+?)\*\*", answer):
        if not re.search(rf"(?<![\d.,]){re.escape(number)}(?![.,]?\d)", " ".join(shown)):
            return f"{number} is not printed by its command"
    return None


def not_printed(command, block):
    """The lines of a block that its command does not print, in words, or None."""
    missing = [line for line in lines(block) if line != "…" and line not in lines(printed(command))]
    return f"{command}\n  does not print\n    " + "\n    ".join(missing) if missing else None


def fill(answer):
    return SESSION.sub(lambda m: f"    $ {m[1]}\n" + "".join(f"    {line.rstrip()}\n" for line in printed(m[1]).splitlines()
                                                          if line.strip()), answer + "\n").rstrip("\n")


# ---- Numbers ----------------------------------------------------------------------------------------------------------


class Number:
    """As it is printed, with its unit or None."""

    def __init__(self, match):
        whole, fraction, self.unit = match.groups()
        self.text = whole.replace(",", "") + (fraction or "")
        self.digits = len(fraction or ".") - 1

    def __str__(self):
        return self.text + (f" {self.unit}" if self.unit else "")

    def is_one(self, value, kind=None):
        """Whether it is this value, rounded. `kind`: of the value's unit, as "bytes"; None: a value of a formula."""
        scale, own = UNITS.get(self.unit, (None, None))
        if own is None:
            scales = [1, *(s for s, k in UNITS.values() if kind in (None, k))]
        else:
            scales = [scale, 1] if kind is None else [scale] * (kind == own)
        return any(f"{value / scale:.{self.digits}f}" == self.text for scale in scales)

    def is_in(self, numbers):
        return any(self.is_one(float(n.text) * UNITS.get(n.unit, (1,))[0], UNITS.get(n.unit, (1, ""))[1]) for n in numbers)


def numbers_in(text):
    return [Number(match) for match in NUMBER.finditer(text)]


def to_prove(block):
    """The numbers of a paragraph, a list or a table that need an origin: those with a unit, and in a table all with a fraction or
    three digits; not those of code, of formulas, of a few bytes, or of a sentence or row with a link to another site, nor names
    of exercises."""
    sentences = re.split(r"(?<=[.:])\s+|\n(?=[|-])", block)
    text = re.sub(r"`[^`]*`|\]\([^)]*\)|<img [^>]*>|\b0[1-7]\.\d", "", " ".join(words for words in sentences if "](http" not in words))
    table = block.startswith("|")
    return [n for n in numbers_in(text) if n.unit and (n.unit != "bytes" or len(n.text) > 3) or table and len(n.text) > 2]


def blocks(text):
    """(line, comment, text) of each paragraph, list or table that has numbers to prove."""
    skipped = re.compile(r"^ *```(?:.|\n)*?^ *```$|^<!-- (?:figure|run) (?:.|\n)*?-->$", re.M)
    text = skipped.sub(lambda match: "\n" * match[0].count("\n"), text)
    for match in BLOCK.finditer(text):
        if not match[2].startswith(("    ", "#", "<")) and to_prove(match[2]):
            yield text.count("\n", 0, match.start(2)) + 1, match[1], match[2]


def answer_around(text, line):
    """Of the question in whose answer this line is: its words, and what the answer's commands print; or ""."""
    at = sum(len(row) + 1 for row in text.split("\n")[:line - 1])
    for match in QUESTION.finditer(text):
        if match.start() <= at < match.end():
            return " ".join([match[1], *(output for _, output in SESSION.findall(match[2]))])
    return ""


def lacking(note, text):
    """Numbers without an origin, each as a line of words."""
    for line, comment, block in blocks(text):
        if comment or text.startswith("<!-- numbers"):
            continue
        shown = numbers_in(answer_around(text, line))
        for number in to_prove(block):
            if not number.is_in(shown):
                yield f"{note}:{line}: {number}: no origin (tests/questions.py)"


def unproven(comment, block, slow, answer):
    """Numbers that are not what the comment's commands or the `answer` around it print, or its formulas give, in words; or None."""
    if "<!-- lessons" in comment or re.search(r"^(measured|source): ", comment, re.M):
        return None
    commands = COMMAND.findall(comment)
    if not slow and any(is_slow for is_slow, _ in commands):
        return None
    shown = answer + "".join(printed(command) for _, command in commands)
    values = eval("[" + ", ".join(re.findall(r"^= (.*)$", comment, re.M)) + "]", vars(math) | {unit: UNITS[unit][0] for unit in ("KiB", "MiB", "GiB")})
    wrong = [number for number in to_prove(block) if not number.is_in(numbers_in(shown)) and not any(map(number.is_one, values))]
    if not wrong:
        return None
    return f"{', '.join(map(str, wrong))} is in no output of its commands:\n" + "\n".join("    " + line for line in lines(shown)[-40:])


def main(*given):
    notes = [pathlib.Path(word) for word in given if not word.startswith("--")]
    texts = {note: note.read_text() for note in notes}
    if "--fill" in given:
        for note, text in texts.items():
            note.write_text(QUESTION.sub(lambda m: f"<details>\n<summary>{m[1]}</summary>\n\n{fill(m[2])}\n\n</details>\n", text))
        return 0
    if "--lacking" in given:
        print(*(words for note, text in texts.items() for words in lacking(note, text)), sep="\n")
        return 0
    slow = "--slow" in given
    checks = []  # (where, what finds the fault)
    for note, text in texts.items():
        if not slow:
            checks += [(f"{note}: {question}", functools.partial(judge, answer)) for question, answer in QUESTION.findall(text)]
            checks += [(f"{note}: {command}", functools.partial(not_printed, command, block)) for command, block in RUN.findall(text)]
            if len(QUESTION.findall(text)) != text.count("<details>"):
                checks.append((note, lambda: "not all questions are well-formed"))
        for line, comment, block in blocks(text):
            if "<!-- numbers" in comment and (not slow or re.search("^slow ", comment, re.M)):
                checks.append((f"{note}:{line}", functools.partial(unproven, comment, block, slow, answer_around(text, line))))
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
