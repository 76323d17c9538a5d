"""The exam (exam.txt), with numbers drawn from the course, and its answers for whoever marks it."""

import random
import re
import textwrap

from sources import entries


def drawn_from(course):
    """What draws a number: the same one each time for a course."""
    return lambda stage, name, values: random.Random(f"exam {course} {stage} {name}").choice(values)


def text(draw, answers=False):
    """The exam as text; `draw(stage, name, values)` chooses a value."""
    lines, numbers, stage = [], {}, ""
    for word, rest in entries("exam.txt"):
        if word == "stage":
            stage, numbers = rest, {}
            lines += [f"# Stage {stage}", ""]
        elif word == "draw":
            name, *values = rest.split()
            numbers[name] = draw(stage, name, [int(value) for value in values])
        elif word == "ask" or (word == "answer" and answers):
            words = eval(f'f"""{rest}"""', {}, numbers)  # a file of ours, whose braces are Python's
            words = re.sub(r"^\d+", r"(\g<0>)", words) if word == "ask" else words
            lines += [textwrap.indent(textwrap.fill(words, 96), "    " * (word == "answer")), ""]
    return "\n".join(lines)
