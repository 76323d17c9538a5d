"""The pictures of the notes, which GitHub shows, too:  python pictures.py [FOLDER] writes them (make
pictures). What programs can say they say, in dry runs. A picture is no wider than a phone shows at the size
of text. Its style is that of the book's drawings, and follows the reader's scheme. Each function without
arguments is a picture. The README's table of stages has small ones without words (icons)."""

import pathlib
import re
import shlex
import sys
import types

import drawings
import runs
import traces
from drawings import Svg

sys.path.append("tests/tools")
import makespan

WIDE, SIZE = 440, 15  # pixels
RANKS = "fbwc"  # the colours of ranks
LIGHT, DARK = ("#1f2328", "#fff"), ("#e6edf3", "#0d1117")  # letters and ground, as GitHub's
SPLITS = dict(
    zip(("01", "02", "03", "04", "05", "06"), "nothing batch states matrices layers sequence".split())
)
SMOLLM = (
    "build/cpu-bf16/07_combined_5d --dry-run --model smollm-1.7b --seq-len 2048 --steps 1"  # 07 has each axis
)
OF_FOUR = "--layers 4 --micro-batch-size 2 --global-batch-size 8 --attention tensor-core"


def file_of(svg, wide=WIDE):
    """The drawing as a file of its own, with those rules of the book that it uses."""
    light, dark = (
        f":root {{ --md-default-fg-color: {ink}; --md-default-bg-color: {bg} }}" for ink, bg in (LIGHT, DARK)
    )
    rules = (pathlib.Path(__file__).parent / "book/drawings.css").read_text().replace(".drawing ", "")
    used = set(re.findall(r"\w+", " ".join(re.findall('class="([^"]*)"', "".join(svg.parts)))))
    rules = [
        rule for rule in rules.splitlines() if rule.startswith("svg") or re.match(r"\.(\w+)", rule)[1] in used
    ]
    style = "\n".join([light, f"@media (prefers-color-scheme: dark) {{ {dark} }}", *rules])
    head = f'viewBox="-2 -4 {wide + 4} {svg.height + 10:.0f}" width="{wide + 4}" font-size="{SIZE}"'
    parts = re.sub(r'\.0"', '"', "\n".join([*svg.parts, "</svg>\n"]))
    return f'<svg xmlns="http://www.w3.org/2000/svg" {head}>\n<style>\n{style}\n</style>\n{parts}'


def block(svg, x, y, width, height, style, words=""):
    """A rectangle, with words in its middle."""
    svg.rect(x, y, width, height, style)
    svg.text(x + width / 2, y + height / 2 + 5, words, "mid" if style.startswith("idle") else "mid on")


def beside(svg, x, y, width, height, styles):
    """Equal parts, of these styles."""
    for i, style in enumerate(styles):
        svg.rect(
            x + width * i / len(styles), y, width / len(styles) - (1 if len(styles) > 1 else 0), height, style
        )


def transformer(svg, x, y, k, axis):
    """Two layers, their states beside them, and a batch below: split along this axis over two ranks. k: how
    large."""
    both = ["f" if axis == "nothing" else "idle"]
    for layer in (1, 0):
        layers = {"layers": ["fb"[layer]], "matrices": ["f", "b"]}.get(axis, both)
        mlp, states = (["f", "f", "b", "b"], ["idle", "f", "b"]) if axis == "experts" else (layers, layers)
        top = y + 28 * k * (1 - layer)
        beside(svg, x, top, 52 * k, 22 * k, layers)
        beside(svg, x + 57 * k, top, 69 * k, 22 * k, mlp)
        for row in range(3):
            beside(
                svg, x + 138 * k, top + 8 * k * row, 54 * k, 6 * k, ["f", "b"] if axis == "states" else states
            )
    for sequence in range(4):
        for token in range(8):
            of = {
                "sequence": token // 4,
                "batch": sequence // 2,
                "states": sequence // 2,
                "experts": sequence // 2,
            }.get(axis)
            style = both[0] if of is None else "fb"[of]
            svg.rect(x + 15 * k * token, y + k * (62 + 12 * sequence), 13 * k, 10 * k, style)


def axes():
    svg = Svg(SIZE)
    transformer(svg, 0, 4, 1.45, "")
    for x, words in ((37, "attention"), (132, "MLP")):
        for y in (25, 66):
            svg.text(x, y, words, "mid")
    for row, words in enumerate(
        ("two layers, and of", "each the states:", "weights, gradients,", "Adam's moments")
    ):
        svg.text(290, 20 + 18 * row, words)
    for y, words in ((120, "a batch: four sequences"), (138, "of eight tokens")):
        svg.text(190, y, words)
    svg.legend(0, 194, {"f": "rank 0 has it", "b": "rank 1 has it", "idle": "both have it"})
    splits = (
        "data: batch",
        "ZeRO: states",
        "tensor: matrices",
        "pipeline: layers",
        "context: sequence",
        "experts",
    )
    for at, words in enumerate(splits):
        x, y = at % 2 * 230, 230 + at // 2 * 154
        svg.text(x, y, f"0{at + 2}  {words}", "strong")
        transformer(svg, x, y + 12, 1.05, words.split()[-1])
    return svg


def kept():
    """The formulas are those of 01's note; the program must say the same sums."""
    b, d, heads, f, s = 1, 2048, 32, 8192, 2048
    parts = {  # elements of a row of bf16
        "o": ("the layer's input", d),
        "c": ("normed inputs, the stream between", 3 * d),
        "b": ("q, k, v, attention's output", 4 * d),
        "f": ("the MLP's gate, up, SwiGLU", 3 * f),
        "w": ("attention's scores", heads * s),
    }
    svg, y = Svg(SIZE), 14
    svg.text(0, y, f"A layer of SmolLM-1.7B in bf16, {s:,} tokens", "strong")
    for style, (words, elements) in parts.items():
        y += 22
        svg.legend(0, y, {style: f"{words}: {2 * b * s * elements / 2**20:.0f} MiB"})
    for recompute, again, styles in (
        ("none", "nothing", "ocbfw"),
        ("selective", "the scores", "ocbf"),
        ("full", "the layer", "o"),
    ):
        options = f"--micro-batch-size {b} --global-batch-size {b} --attention naive --recompute {recompute}"
        of = lambda layers: drawings.run(f"{SMOLLM} --layers {layers} {options}", "--log-json").memory(
            "predicted"
        )
        bytes_, x = of(3)["activations"] - of(2)["activations"], 0
        sums = 0 if recompute == "full" else 4 * b * s * (2 + heads)  # 1/rms, log-sum-exp
        expected = sums + sum(2 * b * s * parts[style][1] for style in styles)
        if bytes_ != expected:
            raise runs.Refused(f"kept, {recompute}: a layer keeps {bytes_} bytes; expected {expected}")
        y += 34
        svg.text(0, y, f"{recompute}: {bytes_ / 2**20:.0f} MiB; backward computes {again} again")
        for style in styles:
            width = WIDE * parts[style][1] / sum(elements for _, elements in parts.values())
            svg.rect(x, y + 8, width, 24, style)
            x += width
        y += 24
    return svg


def sync():
    """A step of 02, in each of its three ways."""
    command = f"mpirun -n 4 {SMOLLM} {OF_FOUR} --dp-sync".replace("07_combined_5d", "02_data_parallel")
    commands = [
        (way.split()[0], f"{command} {way}") for way in ("naive", "overlap", "bucket --bucket-mb 100")
    ]
    return drawings.timeline(
        types.SimpleNamespace(options={"backward": "whole"}, commands=commands), SIZE, 0, WIDE
    )


def buffers():
    """Which unit is in which of stage 3's buffers (03_zero/zero.h), when."""
    command = f"mpirun -n 4 {SMOLLM} {OF_FOUR} --dp 4 --zero-stage 3"
    operations = [o for o in drawings.run(command, "--trace") if o["rank"] == 0]
    computed = [o for o in operations if o["stream"] == "compute" and o["pass"] in "fbw"]
    passes = traces.bars(computed, lambda o: (o["pass"] == "f", o["layer"]), float("inf"))
    units = ["E", "0", "1", "2", "3", "H"]
    named = list(zip(units + units[::-1], passes))
    use = {(unit, at < len(units)): bar for at, (unit, bar) in enumerate(named)}
    gathers, scatters = (
        [o for o in operations if o["name"] == name] for name in ("all_gather", "reduce_scatter")
    )
    end = max(o["end"] for o in scatters)
    svg, x = Svg(SIZE), lambda time: WIDE * time / end
    svg.legend(0, 14, {"f": "forward", "b": "backward", "c": "communication"})
    svg.text(0, 38, "E: embedding, 0 to 3: layers, H: head")
    svg.text(0, 60, "paler: weights are there, and wait for their use")

    def row(y, words):
        svg.text(0, y - 6, words)
        svg.rect(0, y, WIDE, 26, "idle")

    def bar(y, begin, until, style, words=""):
        block(
            svg,
            x(begin),
            y,
            x(until) - x(begin),
            26,
            style + " pass",
            words if x(until) - x(begin) > 9 else "",
        )

    row(100, "compute")
    for at, (unit, o) in enumerate(named):
        bar(100, o["begin"], o["end"], "f" if at < len(units) else "b", unit)
    for number in (0, 1):
        row(154 + 50 * number, f"weights, buffer {number}: gathered, then used")
        row(264 + 50 * number, f"gradients, buffer {number}: written, then reduce-scattered")
    holds = {}  # buffer: unit
    order = [(unit, True) for unit in units] + [(unit, False) for unit in units[-3:0:-1]]
    for (unit, forward), gather in zip(order, gathers, strict=True):
        stays = forward and unit in units[-2:]  # until backward has used it, too
        other = units[
            units.index(unit) + (1 if not holds else -1 if forward else 1)
        ]  # which is in use meanwhile
        buffer = 1 if holds.get(0) == other else 0
        holds[buffer] = unit
        y, last = 154 + 50 * buffer, use[unit, forward and not stays]
        bar(y, gather["end"], last["end"], "f pale" if forward else "b pale")
        for key in [(unit, forward), (unit, False)][: 2 if stays else 1]:
            bar(y, use[key]["begin"], use[key]["end"], "f" if key[1] else "b", unit)
        bar(y, gather["begin"], gather["end"], "c", unit if unit == units[0] else "")
    for unit, scatter in zip(reversed(units), scatters, strict=True):
        y = 264 + 50 * (units.index(unit) % 2)
        bar(y, use[unit, False]["begin"], scatter["begin"], "b", unit)
        bar(y, scatter["begin"], scatter["end"], "c")
    svg.text(0, 364, f"four layers of SmolLM-1.7B on four ranks: {end / 1e3:.1f} ms")
    return svg


def hybrid():
    """Two nodes with a copy each in four shards: a ring in each node, and one of equal shards between
    them."""
    svg = Svg(SIZE)
    svg.legend(0, 14, {style: f"shard {shard}" for shard, style in enumerate(RANKS)})
    svg.text(0, 38, "in a node, for each micro-batch: gathers, reduce-scatters")
    svg.text(0, 60, "between nodes, once a step: all-reduces of equal shards")
    for node, (y, back) in enumerate(((120, -20), (250, 54))):
        svg.text(0, y + 17, f"node {node}")
        for shard, style in enumerate(RANKS):
            x = 66 + 104 * shard
            if node == 1:
                svg.line(x + 26, 154, x + 26, y, f"{style} edge")
            if shard < 3:
                svg.line(x + 52, y + 17, x + 104, y + 17, "wait", arrow=True)
            block(svg, x, y, 52, 34, style, str(4 * node + shard))
        edge = y if node == 0 else y + 34
        svg.line(404, edge, 404, y + back, "wait")
        svg.line(404, y + back, 92, y + back, "wait")
        svg.line(92, y + back, 92, edge, "wait", arrow=True)
    return svg


def region():
    """The MLP's region on two ranks: a block is as wide as a rank has columns, and as high as it has
    tokens."""
    svg, d, f = Svg(SIZE), 40, 3 * 40
    svg.legend(0, 14, {"idle": "equal copies", "f": "rank 0's", "b": "rank 1's"})
    svg.legend(0, 38, {"w": "a partial sum: the ranks' sum is the output"})
    rows = (
        ("tensor parallelism", "f", "nothing", "all-reduce", "f̄"),
        ("with sequence parallelism", "g", "all-gather", "reduce-scatter", "ḡ"),
    )
    for is_cut, (title, enter, copies, sums, leave) in enumerate(rows):
        y = 70 + 258 * is_cut
        svg.text(0, y, title, "strong")
        for rank in (0, 1):
            own, top, x = "fb"[rank], y + 36 + 70 * rank, 0
            inner = ((d, "idle", "x"), (f, own, "gate, up"), (f / 2, own, "SwiGLU"), (d, "w", "y"))
            for width, style, words in (
                (d, "", "x"),
                *inner,
                (d, "", "y"),
            ):  # outside of the region copies, or own rows
                low, high = (30 * rank, 30) if is_cut and not style else (0, 60)
                block(svg, x, top + low, width, high, style or (own if is_cut else "idle"), words)
                x += width + 20
                if x < WIDE:
                    svg.line(x - 17, top + 30, x - 3, top + 30, "hop", True)
        for place, letter in ((50, enter), (390, leave)):
            svg.text(place, y + 28, letter, "mid strong")
        svg.text(0, y + 194, f"{enter}: forward: {copies}, backward: {sums}")
        svg.text(0, y + 216, f"{leave}: forward: {sums}, backward: {copies}")
    return svg


def schedules():
    """Four of 05's schedules, with the same work, on one axis."""
    names = ("1f1b", "interleaved --vpp 2", "zb-h1", "dualpipe")
    command = "build/cpu-fp32/05_pipeline_parallel --pp 4 --micro-batch-size 4 --show-schedule --pp-schedule"
    drawn = [drawings.schedule_of(f"{command} {name}") for name in names]
    times = [float(re.search(r"Time ([\d.]+)", title)[1]) for title, _ in drawn]
    svg, y = Svg(SIZE), 14
    svg.legend(0, y, {"f": "forward", "b": "backward", "w": "weight gradient"})
    svg.text(0, y + 24, "paler: the second chunk of a rank, or the second copy")
    y += 60
    for (title, ranks), time in zip(drawn, times):
        name, bubble = title.split(":")[0], re.search(r"bubble ([\d.]+)", title)[1]
        svg.text(0, y, name, "strong")
        svg.text(110, y, f"time {time:g}, of it bubble {bubble}")
        for rank, (row, _) in enumerate(ranks):
            top, column = y + 10 + 25 * rank, (WIDE - 16) * time / max(times) / len(row)
            svg.text(0, top + 17, str(rank))
            svg.rect(16, top, len(row) * column, 23, "idle")
            for found in drawings.PASS.finditer(row):
                letter, number = found.groups()
                x, width = 16 + found.start() * column, len(found[0]) * column
                svg.rect(x, top, width, 23, f"{letter.lower()} pass" + " pale" * letter.islower())
                if width > 9:
                    svg.text(x + width / 2, top + 17, number, "mid on")
        y += 146
    return svg


def causal():
    """Which keys the queries of which rank see, and what each step of the ring has of them."""
    svg, ranks, size, tokens = Svg(SIZE), 4, 200, 16
    layouts = {"contiguous": [0, 1, 2, 3], "zigzag": [0, 1, 2, 3, 3, 2, 1, 0]}  # the rank of each chunk
    svg.legend(0, 14, {style: f"rank {rank}" for rank, style in enumerate(RANKS)})
    for left, (title, chunks) in zip((0, 240), layouts.items()):
        svg.text(left, 48, title, "strong")
        svg.text(left, 70, "queries ↓  keys →")
        side = size / len(chunks)
        pairs = lambda q, k: (q > k) + (q == k) / 2  # of a chunk's square of pairs
        for q, rank in enumerate(chunks):
            for k in range(q + 1):
                x, y, end = left + k * side, 80 + q * side, side - 1
                corners = [(x, y), (x, y + end), (x + end, y + end), (x + end, y)][: 4 if q > k else 3]
                points = " ".join(f"{a:.0f},{b:.0f}" for a, b in corners)
                svg.add(x + end, y + end, "polygon", RANKS[rank], f'points="{points}"')
        of = lambda rank: sum(q * n * n + n * (n + 1) // 2 for q, a in enumerate(chunks) if a == rank)
        n = tokens // len(chunks)
        counts = list(dict.fromkeys(map(of, range(ranks))))
        svg.text(left, 302, f"{tokens} tokens: pairs")
        svg.text(left, 324, ", ".join(map(str, counts)) + " each" * (len(counts) == 1))
        svg.text(left, 358, "the ring: keys of rank …")
        for step in range(ranks):
            for rank in range(ranks):
                other, whole = (rank - step) % ranks, (len(chunks) // ranks) ** 2
                seen = sum(
                    pairs(q, k)
                    for q, a in enumerate(chunks)
                    for k, b in enumerate(chunks)
                    if (a, b) == (rank, other)
                )
                x, y = left + 50 * rank, 368 + 34 * step
                svg.rect(x, y, 46, 28, "idle")
                if seen:
                    svg.rect(x, y, 46 * seen / whole, 28, RANKS[rank])
                svg.text(x + 35, y + 19, str(other), "mid on" if seen == whole else "mid")
    svg.text(0, 526, "A row is a step. A cell is filled as far as its pairs are seen.")
    return svg


def mesh():
    """The ranks as the corners of a cube. In each picture the groups of an axis are its edges."""
    lines = runs.output_of(
        *shlex.split("build/cpu-bf16/07_combined_5d --tp 2 --cp 2 --pp 2 --show-mesh")
    ).split("\n")
    head = next(line for line in lines if line.startswith("rank "))
    ranks = [line for line in lines[lines.index(head) + 1 :] if line.strip()]
    svg = Svg(SIZE)
    at = [
        (tp * 92 + pp * 56, cp * 80 + (1 - pp) * 44)
        for tp, cp, _, pp in (map(int, line.split()[1:5]) for line in ranks)
    ]
    for number, (kind, style) in enumerate(
        zip(re.finditer("(tensor|context|pipeline|gradients)(?= )", head), "fbwc")
    ):
        left, top = 16 + number % 2 * 234, 48 + number // 2 * 214
        svg.legend(left - 16, top - 34, {style: kind[0] + ": context, data" * (kind[0] == "gradients")})
        groups = sorted({tuple(map(int, line[kind.start() :][:18].split())) for line in ranks})
        for a in range(len(ranks)):
            for b in range(a):
                if (a ^ b).bit_count() == 1:
                    svg.line(left + at[a][0], top + at[a][1], left + at[b][0], top + at[b][1], "wait")
        for group in groups:
            for a, b in zip(group, group[1:]):
                svg.line(left + at[a][0], top + at[a][1], left + at[b][0], top + at[b][1], f"{style} edge")
        for rank, (x, y) in enumerate(at):
            block(svg, left + x - 14, top + y - 14, 28, 28, "idle", str(rank))
    return svg


def experts():
    """The example of experts.md: where each token's copies go, and come back from."""
    note = pathlib.Path("07_combined_5d/experts.md").read_text()
    found = re.findall(r"^\| ([A-F]), rank (\d) .*\| (\d), (\d) \|.* = (\d+) \|$", note, re.MULTILINE)
    svg, side = Svg(SIZE), 23
    place = lambda rank, at, gaps: 82 + rank * 186 + at * side + 8 * gaps
    svg.legend(0, 14, {style: f"expert {expert}" for expert, style in enumerate(RANKS)})
    for rank in (0, 1):
        svg.text(place(rank, 0, 0), 48, f"rank {rank}: experts {2 * rank}, {2 * rank + 1}", "strong")
    rows = {"tokens": 88, "permute": 168, "dispatch": 230, "products": 288, "combine": 350, "sum": 488}
    for words, y in rows.items():
        svg.text(0, y, words)
    copies = sorted((int(rank), int(expert), token) for token, rank, *both, _ in found for expert in both)
    home, there = {}, {}  # x of each copy
    for rank in (0, 1):
        home |= {c: place(rank, at, c[1]) for at, c in enumerate(c for c in copies if c[0] == rank)}
        arrived = sorted((c for c in copies if c[1] // 2 == rank), key=lambda c: (c[1], c[0]))
        there |= {c: place(rank, at, c[1] % 2) for at, c in enumerate(arrived)}
    tokens = {token: place(int(rank), 2 * "ABCDEF".index(token) % 6, 0) for token, rank, *_ in found}
    middle = side / 2 - 1
    for copy in copies:
        rank, expert, token = copy
        for top, bottom, a, b in (
            (70, 150, tokens[token], home[copy]),
            (150, 270, home[copy], there[copy]),
            (270, 390, there[copy], home[copy]),
            (390, 470, home[copy], tokens[token]),
        ):
            svg.line(a + middle, top + 26, b + middle, bottom, f"{RANKS[expert]} thin")
        for y, x in ((150, home[copy]), (270, there[copy]), (390, home[copy])):
            block(svg, x, y, side - 2, 26, RANKS[expert], token)
    for token, rank, *_, total in found:
        block(svg, tokens[token], 70, side - 2, 26, "idle", token)
        block(svg, tokens[token] - 4, 470, side + 8, 26, "idle", total)
    return svg


def blocks():
    """Attention's backward of three heads of smollm-135m on an eighth of an H100, in both orders of its
    blocks."""
    svg, heads, slots, high = Svg(SIZE), 3, 33, 6
    of = makespan.both_orders(heads, makespan.steps_of_backward(2048), slots, True, True)
    end = max(end for _, drawn in of for *_, end in drawn)
    svg.legend(0, 14, {style: f"head {head}" for head, style in enumerate(RANKS[:heads])})
    svg.text(0, 38, f"{slots} rows: as many blocks run at once")
    for number, (title, (makes, drawn)) in enumerate(
        zip(("before: head by head", "now: the longest first"), of)
    ):
        top, share = 82 + 240 * number, WIDE * max(end for *_, end in drawn) / end / makes
        svg.text(0, top - 10, title, "strong")
        svg.text(190, top - 10, f"{makes:.2f} times equal shares")
        svg.rect(0, top, WIDE, slots * high, "idle")
        for slot, head, begin, until in drawn:
            svg.rect(
                WIDE * begin / end,
                top + slot * high,
                WIDE * (until - begin) / end,
                high,
                RANKS[head] + " pass",
            )
        svg.line(share, top - 4, share, top + slots * high + 4, "hop")
    svg.text(0, 544, "The line: all would end here, if shares were equal.")
    return svg


def icons():
    """What a stage splits, as in axes, and nothing else. The mesh of 07: a colour an axis."""
    for name, axis in {**SPLITS, "experts": "experts"}.items():
        svg = Svg(SIZE)
        transformer(svg, 0, 0, 0.83, axis)
        yield f"icon-{name}", svg
    svg, place = (
        Svg(SIZE),
        lambda r: (10 + 90 * (r & 1) + 50 * (r >> 2), 34 + 56 * (r >> 1 & 1) - 24 * (r >> 2)),
    )
    for a, b in ((a, a | bit) for bit in (1, 2, 4) for a in range(8) if not a & bit):
        svg.line(*place(a), *place(b), "fbw"[(b - a) // 2] + " edge")
    for rank in range(8):
        x, y = place(rank)
        svg.rect(x - 8, y - 8, 16, 16, "idle")
    yield "icon-07", svg


PICTURES = {"axes": axes, "01-kept": kept, "02-sync": sync, "03-buffers": buffers, "03-hybrid": hybrid}
PICTURES |= {
    "04-region": region,
    "05-schedules": schedules,
    "06-causal": causal,
    "07-mesh": mesh,
    "07-experts": experts,
}
PICTURES |= {"attention-blocks": blocks}


def main(folder=".github/pictures"):
    for name, picture in PICTURES.items():
        pathlib.Path(folder, f"{name}.svg").write_text(file_of(picture()))
    for name, svg in icons():
        pathlib.Path(folder, f"{name}.svg").write_text(file_of(svg, 160))


if __name__ == "__main__":
    runs.end_in_one_line(main, *sys.argv[1:])
