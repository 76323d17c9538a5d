"""The figures of the book, drawn from what programs print or write, or from the block of the note that they
replace. A comment before the block says how:

    <!-- figure KIND NAME [OPTION=VALUE...]
    [LABEL] $ COMMAND
    A sentence, which a screen reader says. -->

A command is run as it is, at the top of the project; where a kind needs a file, its option is added. A kind
is a function of the comment, below; it returns HTML."""

import concurrent.futures
import html
import itertools
import json
import math
import pathlib
import re
import shlex
import tempfile
import types

import figures
import planner
import runs
import traces
from runs import Refused

FIGURE = re.compile(
    r"^<!-- figure (\w+) ([\w-]+)(.*)\n((?:.|\n)*?)-->\n(?:\n?```\n((?:.|\n)*?)```\n)?", re.MULTILINE
)
WORKS = {"f": "forward", "b": "backward", "w": "weight gradients", "o": "the rest", "c": "communication"}
NAMES = {"gemm_forward": "product", "gemm_dgrad": "dgrad", "gemm_wgrad": "wgrad", "group": "hop"}
PURPOSES = dict(zip("fbwoc", runs.PURPOSES))
PASS = re.compile(r"([FBW])(\d+)-*", re.IGNORECASE)  # of --show-schedule: it takes as long as it is wide
PIECE = re.compile(
    r"\[.*?\]|\|[^|[]*[^|[ -][^|[]*(?=\|)|<?-{3,}>?|\.{3,}|[|^]|[^ ](?: ?(?!---|[|[])[^ ])*"
)  # of lanes


class Svg:
    def __init__(self, size=13):
        self.parts, self.width, self.height, self.size, self.letter = [], 0, 0, size, 7 * size / 13

    def add(self, right, bottom, name, style, attributes, inner=""):
        self.width, self.height = max(self.width, right), max(self.height, bottom)
        self.parts.append(f'<{name} {attributes} class="{style}">{inner}</{name}>')

    def rect(self, x, y, width, height, style, title=""):
        inner = f"<title>{html.escape(title)}</title>" if title else ""
        place = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.2):.1f}" height="{height:.1f}"'
        self.add(x + width, y + height, "rect", style, place, inner)

    def text(self, x, y, words, style=""):
        wide = 0 if "mid" in style else 7.9 if "mono" in style else self.letter
        self.add(x + wide * len(words), y + 5, "text", style, f'x="{x:.1f}" y="{y:.1f}"', html.escape(words))

    def line(self, x1, y1, x2, y2, style, arrow=False):
        self.add(
            max(x1, x2),
            max(y1, y2),
            "line",
            style,
            f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"',
        )
        if arrow:
            turn = math.degrees(math.atan2(y2 - y1, x2 - x1))
            place = f'points="0,0 -6.3,-3 -6.3,3" transform="translate({x2:.1f} {y2:.1f}) rotate({turn:.0f})"'
            self.add(x2, y2, "polygon", style, place)

    def legend(self, x, y, names, wide=900):
        """names: {class: words}. What is wider has several rows; returns the last one's y."""
        left = x
        for style, words in names.items():
            if x > left and x + 20 + self.letter * len(words) > wide:
                x, y = left, y + 22
            self.rect(x, y - 11, 14, 14, style)
            self.text(x + 20, y, words)
            x += 34 + self.letter * len(words)
        return y

    def of(self, comment):
        """What would be too small to read scrolls."""
        width, height = self.width + 2, self.height + 4
        return (
            f'<svg role="img" aria-label="{html.escape(comment.sentence)}" viewBox="0 0 {width:.0f} {height:.0f}"'
            f' width="{width:.0f}" font-size="13" style="min-width: {min(width, max(720, 0.55 * width)):.0f}px">'
            + "".join(self.parts)
            + "</svg>"
        )


def alive(comment, name, data):
    """What the script of the book fills with this data."""
    data = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    label = f'role="group" aria-label="{html.escape(comment.sentence)}"'
    return f'<div class="alive" data-alive="{name}" {label}></div><script type="application/json">{data}</script>'


def run(command, option):
    """What the command writes to the file of this option."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "file")
        runs.output_of(*shlex.split(command), option, path)
        return {"--trace": traces.intervals, "--log-json": runs.Run}[option](path)


def schedule_of(command):
    """The title that --show-schedule prints, and of each rank its row and what is in flight. Long rows come
    in parts."""
    printed, ranks = runs.output_of(*shlex.split(command)), {}
    for rank, part, in_flight in re.findall(r"^rank (\d+) +(\S+)(?:  (.+))?$", printed, re.MULTILINE):
        row, before = ranks.get(rank, ("", ""))
        ranks[rank] = row + part, before or in_flight
    return printed.split("\n", 1)[0], list(ranks.values())


# ---- Of programs ------------------------------------------------------------------------------------------------------


def timeline(comment, size=13, left=110, wide=790):
    """Streams of a rank (rank=R, or all), one picture below the other. pass=b layer=1 shows these operations
    and what runs meanwhile, by name; else a bar is a pass. Names of the streams stand in the `left` pixels
    beside bars of `wide`."""
    rank, by_name = comment.options.get("rank", "0"), "pass" in comment.options
    wanted = [(key, comment.options[key]) for key in ("pass", "layer") if key in comment.options]
    style = lambda o: o["pass"] if o["stream"] == "compute" else "c"
    row = lambda o: (o["rank"], o["stream"] != "compute", o["stream"])
    shown = []
    for label, command in comment.commands:
        operations = [
            o for o in run(command, "--trace") if rank in ("all", str(o["rank"])) and o["stream"] != "all"
        ]
        if "backward" in comment.options:  # whole: with the weight gradients
            operations = [{**o, "pass": o["pass"].replace("w", "b")} if o["pass"] else o for o in operations]
        inner = [o for o in operations if all(str(o[key]) in values for key, values in wanted)]
        begin, end = min(o["begin"] for o in inner), max(o["end"] for o in inner)
        shown.append((label, begin, end, [o for o in operations if o["end"] > begin and o["begin"] < end]))
    longest = max(end - begin for _, begin, end, _ in shown)
    scale, unit = (1e-3, "ms") if longest > 2000 else (1, "µs")
    svg, y = Svg(size), 14
    used = {style(o) for *_, operations in shown for o in operations}
    y = svg.legend(left, y, {letter: words for letter, words in WORKS.items() if letter in used}, left + wide)
    for label, begin, end, operations in shown:
        y += 22
        if label:
            svg.text(0, y + 10, f"{label}: {scale * (end - begin):.1f} {unit}", "strong")
            y += 18
        if not by_name:
            operations = traces.bars(
                operations, lambda o: o["name"] if style(o) == "c" else o["pass"], 2e-3 * longest
            )
        x = lambda time: left + wide * (min(max(time, begin), end) - begin) / longest
        for (number, _, stream), of_row in itertools.groupby(sorted(operations, key=row), row):
            if left:
                svg.text(0, y + 16, f"rank {number} {stream}" if rank == "all" else stream)
            svg.rect(left, y, x(end) - left, 22, "idle")
            for o in of_row:
                words = (
                    re.sub("tensor_core.*", "attention", o["name"]).removesuffix("_kernel").replace("_", " ")
                )
                words = WORKS[o["pass"]] if not by_name and style(o) != "c" else NAMES.get(o["name"], words)
                at, width = x(o["begin"]), x(o["end"]) - x(o["begin"])
                svg.rect(at, y, width, 22, style(o), f"{words}: {o['begin']:.1f} to {o['end']:.1f} µs")
                if by_name and width > 7 * len(words) + 4:
                    svg.text(at + width / 2, y + 16, words, "mid on")
            y += 26
    return svg.of(comment) if left else svg


def memory(comment):
    """Bytes of each rank by purpose, as the log of each command predicts them."""
    svg, y = Svg(), 14
    logs = [
        (label, [rank["predicted"] for rank in run(command, "--log-json").summary["memory"]])
        for label, command in comment.commands
    ]
    total = lambda rank: sum(rank[purpose] for purpose in PURPOSES.values())
    ranks = [rank for _, log in logs for rank in log]
    most = max(map(total, ranks))
    svg.legend(
        90, y, {style: purpose for style, purpose in PURPOSES.items() if any(rank[purpose] for rank in ranks)}
    )
    for label, log in logs:
        svg.text(0, y + 28, label, "strong")
        y += 34
        for number, rank in enumerate(log):
            x = 90
            svg.text(0, y + 13, f"rank {number}")
            for style, purpose in PURPOSES.items():
                width = 640 * rank[purpose] / most
                svg.rect(x, y, width, 16, style, f"{purpose}: {rank[purpose]:,} bytes")
                x += width
            svg.text(
                x + 8,
                y + 13,
                f"{total(rank) / 2**30:.1f} GiB" if most > 2**30 else f"{total(rank) / 2**20:.2f} MiB",
            )
            y += 20
    return svg.of(comment)


# ---- Of the block itself ------------------------------------------------------------------------------------------------


def ring(comment):
    """A table of ranks (columns) by steps: what is new on a rank came from the one before, by an arrow. A row
    is a group, which the page shows step by step."""
    head, *lines = filter(str.strip, comment.block.split("\n"))
    ranks, before, label, svg = re.findall(r"rank \d", head), [], "", Svg()
    for r, name in enumerate(ranks):
        svg.text(210 + 170 * r, 14, name, "mid strong")
    for step, line in enumerate(lines):
        cells, y = re.split("  +", line.strip()), 28 + 74 * step
        svg.parts.append(f'<g data-step="{step}">')
        if line[:8].strip():
            label = cells.pop(0)
            svg.text(0, y + 22, label)
        cells = [cell.replace("·", " · ").split("|") for cell in cells[: len(ranks)]]
        for r, cell in enumerate(cells):
            width = 120 / len(cell)
            for part, words in enumerate(cell):
                left = 150 + 170 * r + part * width
                middle = left + width / 2
                style = "fbwoc"[int(words[-1])] if "kv" in words else f"sum{sum(map(str.isdigit, words))}"
                svg.rect(left, y, width, 34, style, f"rank {r}, {label}: {words}")
                svg.text(middle, y + 22, words, "mid on")
                if before and words != before[r][part]:
                    if r == 0:  # round the ring
                        end = 170 * len(ranks) - 170
                        svg.line(middle + end, y - 38, 290 + end, y - 18, "hop")
                    svg.line(
                        *((middle - 170, y - 38) if r else (132, y - 22)), middle - 4, y - 3, "hop", True
                    )
        svg.parts.append("</g>")
        before = cells
    return svg.of(comment)


def text(comment):
    """The block as it is."""
    svg = Svg()
    for row, line in enumerate(comment.block.rstrip().split("\n")):
        svg.text(0, 14 + 16 * row, line, "mono")
    return svg.of(comment)


def lanes(comment):
    """The block as it is, with boxes for what stands in brackets or between bars, and lines for dashes."""
    svg, wide, high = Svg(), 8.2, 24
    for row, line in enumerate(comment.block.rstrip().split("\n")):
        y, colors, closed = row * high, itertools.cycle("fbwo"), 0
        svg.height = y + high
        for found in PIECE.finditer(line):
            piece, a, b = found[0], found.start() * wide, found.end() * wide
            if piece == "|" and found.start() == closed:  # of the box before
                continue
            if piece[0] == "[" or piece[0] == "|" != piece:
                closed = found.end()
                words, style = piece.strip("[]| ."), next(colors)
                style = "idle" if not words or re.search(r"\.\.\.|wait|held|nobody|stay", piece) else style
                svg.rect(a + 2, y + 3, b - a - 4, high - 5, style)
                svg.text((a + b) / 2, y + 17, words, "mid" if style == "idle" else "mid on")
            elif "---" in piece:
                a, b = (b, a) if piece[0] == "<" else (a, b)
                svg.line(a, y + 13, b, y + 13, "hop", piece.strip("-") != "")
            elif piece[:3] == "...":
                svg.line(a, y + 13, b, y + 13, "wait")
            elif piece in "|^":
                svg.line(
                    (a + b) / 2, y + high, (a + b) / 2, y + (4 if piece == "^" else 0), "hop", piece == "^"
                )
            else:
                svg.text(a, y + 17, piece, "mono" if row and found.start() > 9 else "")
    return svg.of(comment)


# ---- Alive: the script of the book fills them ---------------------------------------------------------------------------


def orders(comment):
    """The orders of all schedules, for each number of ranks and micro-batches, as 05 draws them."""
    names = ["afab", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe", "dualpipe-v"]
    cases = [
        (name, p, m)
        for name, p, m in itertools.product(names, (2, 4, 8), (4, 8, 16, 24))
        if m >= p * (2 if name in names[4:] else 1) and not (name == "interleaved" and m % p)
    ]

    def order(case):
        options = "--pp-schedule {} --pp {} --global-batch-size {}".format(*case)
        ranks = schedule_of(f"{comment.commands[0][1]} {options}")[1]
        return "/".join(" ".join(letter + number for letter, number in PASS.findall(row)) for row, _ in ranks)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        found = zip(cases, pool.map(order, cases))
        return alive(comment, "schedule", {" ".join(map(str, case)): text for case, text in found})


def zero(comment):
    """ZeRO's memory, from planner.calculator."""
    chart = figures.zero_memory(planner.calculator(comment.commands[0][1]))
    return '<script src="%%vega%%"></script>' + alive(
        comment, "chart", {**chart, "description": comment.sentence}
    )


KINDS = {kind.__name__: kind for kind in (timeline, memory, ring, text, lanes, orders, zero)}


def draw(note, found):
    """The figure of a comment (a match of FIGURE): its kind, HTML and sentence. Throws Refused."""
    kind, name, options, body, block = found.groups()
    lines = re.sub(r"\\\n\s*", " ", body).split("\n")
    comment = types.SimpleNamespace(
        commands=[[part.strip() for part in line.split("$", 1)] for line in lines if "$" in line],
        sentence=" ".join(" ".join(line for line in lines if "$" not in line).split()),
        options=dict(word.split("=") for word in options.split()),
        block=block or "",
    )
    if kind not in KINDS:
        raise Refused(f"{note}: figure {kind} is not valid; expected {', '.join(KINDS)}")
    if not comment.sentence:
        raise Refused(f"{note}: figure {name}: expected a sentence")
    try:
        return kind, KINDS[kind](comment), comment.sentence
    except (Refused, LookupError, ValueError, AttributeError, TypeError, OSError, StopIteration) as error:
        what = error if isinstance(error, Refused) else f"{type(error).__name__} {error}"
        raise Refused(f"{note}: figure {name}: {what}") from error
