"""The figures of the book, drawn from what programs print or write, or from the block of the note that they replace. A
comment before the block says how:

    <!-- figure KIND [OPTION=VALUE...]
    [NAME] $ COMMAND
    A sentence, which a screen reader says. -->

A command is run as it is, at the top of the project; where a kind needs a file, its option is added. Each function returns SVG.
"""

import concurrent.futures
import html
import itertools
import json
import math
import pathlib
import re
import shlex
import tempfile

import figures
import runs
import traces
from runs import Refused

FIGURE = re.compile(r"^<!-- figure (\w+)(.*)\n((?:.|\n)*?)-->\n(?:\n?```\n((?:.|\n)*?)```\n)?", re.MULTILINE)
WORKS = {"f": "forward", "b": "backward", "w": "weight gradients", "o": "the rest", "c": "communication"}
NAMES = {"gemm_forward": "product", "gemm_dgrad": "dgrad", "gemm_wgrad": "wgrad", "group": "hop"}
PURPOSES = dict(zip("fbwoc", runs.PURPOSES))


class Svg:
    def __init__(self):
        self.parts, self.width, self.height = [], 0, 0

    def rect(self, x, y, width, height, style="", title=""):
        self.width, self.height = max(self.width, x + width), max(self.height, y + height)
        inner = f"<title>{html.escape(title)}</title>" if title else ""
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.2):.1f}" height="{height:.1f}" class="{style}">{inner}</rect>'
        )

    def text(self, x, y, words, style=""):
        wide = 7.9 if "mono" in style else 7
        self.width, self.height = max(self.width, x + (wide * len(words) if "mid" not in style else 0)), max(
            self.height, y + 5
        )
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" class="{style}">{html.escape(words)}</text>')

    def line(self, x1, y1, x2, y2, style="", arrow=False):
        self.width, self.height = max(self.width, x1, x2), max(self.height, y1, y2)
        self.parts.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{style}"/>')
        if arrow:
            angle = math.atan2(y2 - y1, x2 - x1)
            points = " ".join(
                f"{x2 - 7 * math.cos(angle + turn):.1f},{y2 - 7 * math.sin(angle + turn):.1f}"
                for turn in (-0.45, 0, 0.45)
                if turn
            )
            self.parts.append(f'<polygon points="{x2:.1f},{y2:.1f} {points}" class="{style}"/>')

    def legend(self, x, y, names):
        """names: {class: words}."""
        for style, words in names.items():
            self.rect(x, y - 11, 14, 14, style)
            self.text(x + 20, y, words)
            x += 34 + 7 * len(words)

    def __str__(self):
        return f'<svg viewBox="0 0 {self.width + 2:.0f} {self.height + 4:.0f}" width="{self.width + 2:.0f}" font-size="13">{"".join(self.parts)}</svg>'


def run(command, option=None):
    """What the command prints, or writes to the file of this option."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "file")
        text = runs.output_of(*shlex.split(command), *([option, path] if option else []))
        if option == "--trace":
            return traces.intervals(path)
        return runs.Run(path) if option == "--log-json" else path.read_text() if option else text


# ---- Of programs ------------------------------------------------------------------------------------------------------


def schedule(commands, block, options):
    """05 draws its schedules itself. The white page is left out."""
    text = run(commands[0][1], "--show-schedule-svg")
    width, height = re.search(r"width='([\d.]+)' height='([\d.]+)'", text).groups()
    text = re.sub(r"<title>[^<]*</title>\n<rect width='100%'[^>]*/>\n<text[^>]*>[^<]*</text>\n", "", text, count=1)
    size = 13 if float(width) < 1200 else 16  # a wide one is shown smaller
    return re.sub(
        r"<svg[^>]*>", f'<svg viewBox="0 30 {width} {float(height) - 30}" width="{width}" font-size="{size}">', text
    )


def timeline(commands, block, options):
    """Streams of a rank (rank=R, or all), one picture below the other. pass=b layer=1 shows these operations and what runs
    meanwhile, by name; else a bar is a pass."""
    svg, y, shown = Svg(), 14, []
    for name, command in commands:
        operations = [o for o in run(command, "--trace") if options.get("rank", "0") in ("all", str(o["rank"]))]
        inner = [o for o in operations if all(str(o[key]) in options[key] for key in ("pass", "layer") if key in options)]
        begin, end = min(o["begin"] for o in inner), max(o["end"] for o in inner)
        shown.append((name, begin, end, [o for o in operations if o["end"] > begin and o["begin"] < end]))
    used = {o["pass"] if o["stream"] == "compute" else "c" for _, _, _, operations in shown for o in operations}
    svg.legend(110, y, {style: words for style, words in WORKS.items() if style in used})
    longest = max(end - begin for _, begin, end, _ in shown)
    scale, unit = (1e-3, "ms") if longest > 2000 else (1, "µs")
    for name, begin, end, operations in shown:
        y += 22
        if name:
            svg.text(0, y + 10, f"{name}: {scale * (end - begin):.1f} {unit}", "strong")
            y += 18
        if "pass" not in options:
            operations = traces.bars(
                operations, lambda o: o["pass"] if o["stream"] == "compute" else o["name"], 2e-3 * longest
            )
        x = lambda time: 110 + 790 * (min(max(time, begin), end) - begin) / longest
        for row in sorted({(o["rank"], o["stream"] != "compute", o["stream"]) for o in operations if o["stream"] != "all"}):
            of_row = [o for o in operations if (o["rank"], o["stream"]) == (row[0], row[2])]
            svg.text(0, y + 16, f"rank {row[0]} {row[2]}" if options.get("rank") == "all" else row[2])
            svg.rect(110, y, 790 * (end - begin) / longest, 22, "idle")
            for o in of_row:
                words = NAMES.get(
                    o["name"], re.sub("tensor_core.*", "attention", o["name"]).removesuffix("_kernel").replace("_", " ")
                )
                style = o["pass"] if o["stream"] == "compute" else "c"
                what = WORKS[style] if "pass" not in options and style != "c" else words
                svg.rect(
                    x(o["begin"]),
                    y,
                    x(o["end"]) - x(o["begin"]),
                    22,
                    style,
                    f"{what}: {o['begin']:.1f} to {o['end']:.1f} µs",
                )
                if "pass" in options and x(o["end"]) - x(o["begin"]) > 7 * len(words) + 4:
                    svg.text((x(o["begin"]) + x(o["end"])) / 2, y + 16, words, "mid on")
            y += 26
    return str(svg)


def memory(commands, block, options):
    """Bytes of each rank by purpose, as the log of each command predicts them."""
    svg, y = Svg(), 14
    logs = [(name, run(command, "--log-json")) for name, command in commands]
    most = max(sum(rank["predicted"][p] for p in PURPOSES.values()) for _, log in logs for rank in log.summary["memory"])
    used = {purpose for _, log in logs for rank in log.summary["memory"] for purpose, n in rank["predicted"].items() if n}
    svg.legend(90, y, {style: purpose for style, purpose in PURPOSES.items() if purpose in used})
    for name, log in logs:
        y += 16
        svg.text(0, y + 12, name, "strong")
        y += 18
        for number, rank in enumerate(log.summary["memory"]):
            x = 90
            svg.text(0, y + 13, f"rank {number}")
            for style, purpose in PURPOSES.items():
                width = 640 * rank["predicted"][purpose] / most
                svg.rect(x, y, width, 16, style, f"{purpose}: {rank['predicted'][purpose]:,} bytes")
                x += width
            total = sum(rank["predicted"][p] for p in PURPOSES.values())
            svg.text(x + 8, y + 13, f"{total / 2**30:.1f} GiB" if most > 2**30 else f"{total / 2**20:.2f} MiB")
            y += 20
    return str(svg)


def mesh(commands, block, options):
    """Each kind of group in a picture of its own: its ranks have one colour."""
    lines = run(commands[0][1]).split("\n")
    head = next(i for i, line in enumerate(lines) if line.startswith("rank "))
    kinds = [(found[0], found.start()) for found in re.finditer(r"(tensor|context|pipeline|gradients)(?= )", lines[head])]
    ranks = [line for line in lines[head + 1 :] if line.strip()]
    tp, cp = map(int, re.match(r"tp (\d+) x cp (\d+)", lines[0]).groups())
    across = tp * cp
    svg = Svg()
    for at, (kind, column) in enumerate(kinds):
        left = at % 2 * 260
        top = at // 2 * 130
        svg.text(left, top + 14, kind, "strong")
        groups = {}
        for number, line in enumerate(ranks):
            members = line[column : column + 18].strip()
            place = ", ".join(map(" ".join, zip(("tp", "cp", "dp", "pp"), line.split()[1:5])))
            style = "fbwoc"[groups.setdefault(members, len(groups)) % 5]
            x, y = left + number % across * 56, top + 26 + number // across * 40
            svg.rect(x, y, 48, 32, style, f"rank {number}: {place}; its {kind} group: {members}")
            svg.text(x + 24, y + 21, str(number), "mid on")
    return str(svg)


# ---- Of the block itself ------------------------------------------------------------------------------------------------


def ring(commands, block, options):
    """A table of ranks (columns) by steps: what a rank has that another one had before came from there, by an arrow. A row
    is a group, which the page shows step by step."""
    head, *rows = [line for line in block.split("\n") if line.strip()]
    columns = [found.start() for found in re.finditer(r"rank \d+", head)]
    ends = columns[1:] + [head.find("meanwhile") if "meanwhile" in head else None]
    table = [[line[a:b].strip().replace("·", " · ").split("|") for a, b in zip(columns, ends)] for line in rows]
    labels = []
    for line in rows:
        labels.append(line[: columns[0]].strip() or (labels[-1] if labels else ""))
    svg, before = Svg(), None
    for i, found in enumerate(re.finditer(r"rank \d+", head)):
        svg.text(150 + 170 * i + 60, 14, found[0], "mid strong")
    for step, cells in enumerate(table):
        y = 28 + 74 * step
        svg.parts.append(f'<g data-step="{step}">')
        svg.text(0, y + 22, labels[step] if step == 0 or labels[step] != labels[step - 1] else "")
        for r, cell in enumerate(cells):
            width = 120 / len(cell)
            for part, words in enumerate(cell):
                kv = re.search(r"kv(\d)", words)
                terms = len(re.sub(r"\D", "", words))
                style = "fbwoc"[int(kv[1]) % 5] if kv else f"sum{terms}"
                came = before and (came_from(before, cells, r, part) if kv or words != before[r][part] else None)
                svg.rect(150 + 170 * r + part * width, y, width, 34, style, f"rank {r}, {labels[step]}: {words}")
                svg.text(150 + 170 * r + (part + 0.5) * width, y + 22, words, "mid on")
                if came is not None and came != r:
                    x = 150 + 170 * r + (part + 0.5) * width
                    if came < r:
                        svg.line(x - 170, y - 38, x - 4, y - 3, "hop", True)
                    else:  # round the ring
                        svg.line(150 + 170 * came + (part + 0.5) * width, y - 38, 150 + 170 * came + 140, y - 18, "hop")
                        svg.line(132, y - 22, x - 4, y - 3, "hop", True)
        svg.parts.append("</g>")
        before = cells
    return str(svg)


def came_from(before, cells, r, part):
    """The rank that sent what this part has now: the previous one."""
    return (r - 1) % len(before)


def causal(commands, block, options):
    """Which keys (columns) the queries of which rank see: a full square, or the triangle of a diagonal."""
    svg = Svg()
    lines = block.split("\n")
    starts = [found.start() for found in re.finditer("keys", next(line for line in lines if "keys" in line))]
    cut = starts[1] - 12
    for left, (a, b), title in zip((0, 330), ((0, cut), (cut, None)), ("contiguous", "zigzag")):
        of_panel = [line[a:b] for line in lines]
        found = [re.search(r"rank (\d) +((?:[■◣] *)+)(\d+)?", line) for line in of_panel]
        found = [row for row in found if row]
        size = 240 / len(found)
        svg.text(left, 14, title, "strong")
        pairs = {}
        for q, row in enumerate(found):
            rank, cells = int(row[1]), row[2].split()
            for k, cell in enumerate(cells):
                x, y, style = left + 56 + k * size, 24 + q * size, "fbwo"[rank]
                title = f"queries of chunk {q}, on rank {rank}, keys of chunk {k}"
                if cell == "■":
                    svg.rect(x, y, size - 1, size - 1, style, title)
                else:
                    svg.parts.append(
                        f'<polygon points="{x},{y} {x},{y + size - 1} {x + size - 1},{y + size - 1}" class="{style}"><title>{title}</title></polygon>'
                    )
                tokens = 16 // len(found)
                pairs[rank] = pairs.get(rank, 0) + (tokens * tokens if cell == "■" else tokens * (tokens + 1) // 2)
            svg.text(left, 24 + (q + 0.5) * size + 5, f"rank {rank}")
        for at, (rank, count) in enumerate(sorted(pairs.items())):
            svg.rect(left + 56, 276 + 20 * at, 3 * count, 16, "fbwo"[rank])
            svg.text(left, 289 + 20 * at, f"rank {rank}")
            svg.text(left + 62 + 3 * count, 289 + 20 * at, f"{count} pairs")
    return str(svg)


def documents(commands, block, options):
    """The mask of a packed sequence: each query sees the keys from its document's first token to its own."""
    rows = {line.split()[0]: line.split() for line in block.split("\n") if line.strip()}
    starts = [int(word) for word in rows["start"][1:] if word.isdigit()]
    tokens = re.findall(r"\S", re.split(r" {8,}", block.split("\n")[0].replace("token", "     ").strip())[0])[: len(starts)]
    svg = Svg()
    colors = {start: "fbwoc"[i] for i, start in enumerate(sorted(set(starts)))}
    for i, (start, token) in enumerate(zip(starts, tokens)):
        svg.text(66 + 34 * i, 14, token, "mid mono")
        svg.text(30, 46 + 34 * i, token, "mid mono")
        for k in range(len(starts)):
            seen = start <= k <= i
            svg.rect(
                50 + 34 * k,
                24 + 34 * i,
                32,
                32,
                colors[start] if seen else "idle",
                f"query {i} {'sees' if seen else 'does not see'} key {k}",
            )
    svg.text(50, 40 + 34 * len(starts), "keys to the right, queries downwards")
    return str(svg)


def lanes(commands, block, options):
    """The block as it is, with boxes for what stands in brackets or between bars, and lines for dashes."""
    svg, wide, high = Svg(), 8.2, 24
    lines = [line for line in block.rstrip("\n").split("\n")]
    for row, line in enumerate(lines):
        y = row * high
        line = line.replace("│", "|").replace("…", " … ")
        taken = list(line)
        bars = [at for at, letter in enumerate(line) if letter in "|"]
        boxes = [(found.start(), found.end()) for found in re.finditer(r"\[[^\]]*\]", line)]
        if len(bars) > 1:
            boxes += [
                (a, b + 1)
                for a, b in zip(bars, bars[1:])
                if line[a + 1 : b].strip(" |") and not re.search(r"\[|--->", line[a:b])
            ]
        for number, (a, b) in enumerate(sorted(boxes)):
            words = line[a:b].strip("[]| .")
            style = (
                "idle" if re.search(r"\.\.\.|wait|held|nobody|stay", line[a:b]) else "fbwoc"[number % 4] if words else "idle"
            )
            svg.rect(a * wide + 2, y + 3, (b - a) * wide - 4, high - 5, style)
            svg.text((a + b) / 2 * wide, y + 17, words, "mid" + ("" if style == "idle" else " on"))
            taken[a:b] = " " * (b - a)
        rest = "".join(taken)
        for found in re.finditer(r"<?-{3,}>?|[─]{3,}|\.{3,}|\||\^|\S+(?: \S+)*", rest):
            a, b = found.start() * wide, found.end() * wide
            if found[0].startswith(("-", "<-")):
                x1, x2 = (b, a) if found[0].startswith("<") else (a, b)
                svg.line(x1, y + 13, x2, y + 13, "hop", "<" in found[0] or ">" in found[0])
            elif found[0].startswith("..."):
                svg.line(a, y + 13, b, y + 13, "wait")
            elif found[0] in "|^":
                svg.line(
                    a + wide / 2,
                    y + (high if found[0] == "^" else 0),
                    a + wide / 2,
                    y + (4 if found[0] == "^" else high),
                    "hop",
                    found[0] == "^",
                )
            else:
                for part in re.finditer(r"-{3,}>?|.+?(?= *-{3,}|$)", found[0]):
                    if part[0].startswith("---"):
                        svg.line(
                            a + part.start() * wide, y + 13, a + part.end() * wide, y + 13, "hop", part[0].endswith(">")
                        )
                    elif part[0].strip():
                        svg.text(
                            a + (part.start() + len(part[0]) - len(part[0].lstrip())) * wide,
                            y + 17,
                            part[0].strip(),
                            "mono" if row and found.start() > 9 else "",
                        )
    svg.height = max(svg.height, len(lines) * high)
    return str(svg)


# ---- Alive: the script of the book fills them ---------------------------------------------------------------------------


def orders(commands, block, options):
    """The orders of all schedules, for each number of ranks and micro-batches, as 05 draws them."""
    command = commands[0][1]
    names = ["afab", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe", "dualpipe-v"]

    def order(case):
        name, p, m = case
        text = run(f"{command} --pp {p} --global-batch-size {m} --pp-schedule {name}", "--show-schedule-svg")
        rows = {}
        for y, action, micro_batch, chunk in re.findall(
            r"y='(\d+)'[^>]*><title>(\w+) of micro-batch (\d+)(?:, chunk (\d+))?", text
        ):
            letter = {"forward": "F", "backward": "B", "input_gradient": "B", "weight_gradient": "W"}[action]
            rows.setdefault(int(y), []).append((letter.lower() if chunk == "1" else letter) + micro_batch)
        return "/".join(" ".join(row) for _, row in sorted(rows.items()))

    cases = [
        (name, p, m)
        for name, p, m in itertools.product(names, (2, 4, 8), (4, 8, 16, 24))
        if m >= p * (2 if name in ("zb-v", "dualpipe", "dualpipe-v") else 1) and not (name == "interleaved" and m % p)
    ]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        found = dict(zip(cases, pool.map(order, cases)))
    data = {f"{name} {p} {m}": text for (name, p, m), text in found.items()}
    return f'<div class="alive" data-alive="schedule"></div><script type="application/json">{json.dumps(data)}</script>'


def zero(commands, block, options):
    """ZeRO's memory, from the tables of plan --calculator."""
    tables = runs.planned(commands[0][1], "--calculator")
    chart = {**figures.zero_memory(tables), "description": "%%sentence%%"}  # which the chart gives to a screen reader
    chart = json.dumps(chart, separators=(",", ":")).replace("</", "<\\/")
    return f'<script src="%%vega%%"></script><div class="alive" data-alive="chart"></div><script type="application/json">{chart}</script>'


KINDS = {kind.__name__: kind for kind in (schedule, timeline, memory, mesh, ring, causal, documents, lanes, orders, zero)}


def draw_all(note, text, first):
    """The text of a note, with %%NAME%% in place of its figures, and the figures: {NAME: HTML}."""
    all_drawn = {}

    def draw(found):
        kind, options, body, block = found.groups()
        name = f"figure{first + len(all_drawn)}"
        options = dict(word.split("=") for word in options.split())
        lines = re.sub(r"\\\n\s*", " ", body).split("\n")
        commands = [tuple(part.strip() for part in line.split("$", 1)) for line in lines if "$" in line]
        sentence = " ".join(" ".join(line for line in lines if "$" not in line).split())
        if kind not in KINDS:
            raise Refused(f"{note}: figure {kind} is not valid; expected {', '.join(KINDS)}")
        if not sentence:
            raise Refused(f"{note}: a figure without a sentence")
        try:
            drawn = KINDS[kind](commands, block or "", options)
        except Refused as error:
            raise Refused(f"{note}: figure {kind}: {error}") from None
        except (KeyError, ValueError, AttributeError, TypeError, IndexError, OSError, StopIteration) as error:
            raise Refused(f"{note}: figure {kind}: {type(error).__name__} {error}") from error
        if found := re.search(r'<svg [^>]*width="([\d.]+)"', drawn):  # what would be too small to read scrolls
            least = min(float(found[1]), max(600, 0.55 * float(found[1])))
            label = f'role="img" aria-label="{html.escape(sentence)}" style="min-width: {least:.0f}px"'
            drawn = re.sub("<svg ", f"<svg {label} ", drawn, count=1)
        drawn = re.sub(r'data-alive="(\w+)"', rf'data-alive="\1" role="group" aria-label="{html.escape(sentence)}"', drawn)
        drawn = drawn.replace("%%sentence%%", json.dumps(sentence)[1:-1])
        stepped = ' data-alive="steps"' if kind == "ring" else ""
        all_drawn[name] = (
            f'<figure class="figure" id="{name}"{stepped}><div class="drawing" tabindex="0">{drawn}</div><figcaption>{html.escape(sentence)}</figcaption></figure>'
        )
        return f"\n%%{name}%%\n\n"

    return FIGURE.sub(draw, text), all_drawn
