"""What a trace (--trace) shows of the last step: bars, for the figures of the report."""

import json
import math

from runs import Refused

PASSES = {"f": "forward", "b": "backward", "w": "weight gradients", "o": "optimizer and the rest"}


def intervals(path):
    """The step's operations, in the order of their beginning: rank, stream, begin and end in us from the
    step's begin, who (the rank in words), name, pass, micro_batch, layer (None where there is none)."""
    try:
        events = json.loads(path.read_text())["traceEvents"]
    except (OSError, ValueError, KeyError, TypeError):
        raise Refused(f"{path}: not a trace; expected a file that --trace wrote") from None
    streams = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in events
        if e["ph"] == "M" and e["name"] == "thread_name"
    }
    who = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    operations = sorted((e for e in events if e["ph"] == "X" and e["dur"] > 0), key=lambda e: e["ts"])
    begin = min((e["ts"] for e in operations), default=0)
    return [
        {
            "rank": e["pid"],
            "who": who[e["pid"]],
            "stream": streams[e["pid"], e["tid"]],
            "begin": e["ts"] - begin,
            "end": e["ts"] + e["dur"] - begin,
            "name": e["name"],
            "pass": e["args"]["pass"],
            "micro_batch": e["args"].get("micro_batch"),
            "layer": e["args"].get("layer"),
        }
        for e in operations
    ]


def bars(operations, same, gap):
    """Operations of a rank's stream that follow each other within `gap` us, and for which same(operation) is
    the same, are one bar."""
    joined, last = [], {}  # last: of each stream
    for operation in operations:
        stream = operation["rank"], operation["stream"]
        bar = last.get(stream)
        if bar and bar["same"] == same(operation) and operation["begin"] - bar["end"] < gap:
            bar["end"] = max(bar["end"], operation["end"])
            bar["operations"] += 1
        else:
            last[stream] = bar = {**operation, "same": same(operation), "operations": 1}
            joined.append(bar)
    return joined


def timeline(path):
    """The bars of every stream: on the compute stream a layer's pass, on the others an operation."""

    def work(o):
        return (o["pass"], o["micro_batch"], o["layer"]) if o["stream"] == "compute" else o["name"]

    operations = intervals(path)
    gap = 1e-3 * max((o["end"] for o in operations), default=0)  # so small that nobody sees it
    return [
        {
            "rank": bar["rank"],
            "who": bar["who"],
            "stream": bar["stream"],
            "begin": round(bar["begin"], 3),
            "end": round(bar["end"], 3),
            "work": PASSES[bar["pass"]] if bar["stream"] == "compute" else "communication",
            "what": describe(bar),
        }
        for bar in bars(operations, work, gap)
    ]


def describe(bar):
    words = [bar["name"] if bar["operations"] == 1 else f"{bar['operations']} operations"]
    words += [
        f"{name.replace('_', '-')} {bar[name]}" for name in ("layer", "micro_batch") if bar[name] is not None
    ]
    return ", ".join(words)


def pipeline(path, splits):
    """The bars of the compute streams: a micro-batch's pass on a rank, with the waits in it. splits: whether
    the schedule puts weight gradients off; else they are a part of backward."""

    def work(o):
        return "b" if o["pass"] == "w" and not splits else o["pass"], o["micro_batch"]

    computed = [
        o
        for o in intervals(path)
        if o["stream"] == "compute" and o["pass"] in "fbw" and o["micro_batch"] is not None
    ]
    return [
        {
            "rank": bar["rank"],
            "who": bar["who"],
            "begin": round(bar["begin"], 3),
            "end": round(bar["end"], 3),
            "work": PASSES[bar["same"][0]],
            "micro_batch": bar["micro_batch"],
        }
        for bar in bars(computed, work, math.inf)
    ]
