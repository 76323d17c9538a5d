"""The questions of the notes:  questions.py [--fill] NOTE...

They end a section, below a line **Ask yourself** (notes.sh looks at that). A question is a <details> whose answer folds out. A
number in bold is the answer. Below it stands the command that prints it, as in a terminal: a line "    $ COMMAND", which goes
on after a backslash or a pipe, and what it prints; blanks count as one. Each command is run, and must print these very lines;
each number in bold must be among them. --fill writes what the commands print into the notes. The last line is
"N passed, N failed", of questions."""

import os
import pathlib
import re
import subprocess
import sys

QUESTION = re.compile(r"<details>\n<summary>(.*?)</summary>\n\n(.*?)\n\n</details>\n", re.S)
SESSION = re.compile(r"^    \$ ((?:.*[\\|]\n)*.*)\n?((?:    (?!\$ ).*\n?)*)", re.M)


def lines(text):
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


def printed(command):
    environment = {**os.environ, "UCX_LOG_LEVEL": "error", "OMP_NUM_THREADS": "1", "LC_ALL": "C"}
    done = subprocess.run(["bash", "-c", command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, env=environment, timeout=600)
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


def fill(answer):
    return SESSION.sub(lambda m: f"    $ {m[1]}\n" + "".join(f"    {line.rstrip()}\n" for line in printed(m[1]).splitlines()
                                                          if line.strip()), answer + "\n").rstrip("\n")


def main(*notes):
    passed = failed = 0
    for note in map(pathlib.Path, [n for n in notes if n != "--fill"]):
        text = note.read_text()
        if "--fill" in notes:
            note.write_text(QUESTION.sub(lambda m: f"<details>\n<summary>{m[1]}</summary>\n\n{fill(m[2])}\n\n</details>\n", text))
            continue
        questions = QUESTION.findall(text)
        wrong = [(q, w) for q, answer in questions if (w := judge(answer))]
        if len(questions) != text.count("<details>"):
            wrong.append((note, f"{len(questions)} questions of {text.count('<details>')} are well-formed"))
        for question, what in wrong:
            print(f"FAILED: {note}: {question}\n  {what}", flush=True)
        passed, failed = passed + len(questions) - len(wrong), failed + len(wrong)
    print(f"{passed} passed, {failed} failed")
    return failed > 0 or passed == 0 and "--fill" not in notes


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
