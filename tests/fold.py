"""Holds folded worlds (07_combined_5d/fold.h) against whole ones: random meshes, models and options of 07, each dry run
with all its ranks and again with --ranks and those that differ. python fold.py BUILD N [RANKS...] [--seed S]: BUILD has
07_combined_5d. What the two say of the ranks that are in both must be the same: seconds of each step, bytes and calls,
memory, and each operation of the trace, to the nanosecond. The last line is "N passed, N failed"."""

import argparse
import collections
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile

parser = argparse.ArgumentParser()
parser.add_argument("build", type=pathlib.Path)
parser.add_argument("count", type=int)
parser.add_argument("ranks", type=int, nargs="*", default=[4, 6, 8, 12, 16])
parser.add_argument("--seed", type=int, default=36)
arguments = parser.parse_args()
draw = random.Random(arguments.seed)
# Small ones, in which the host is slower than the GPU, and large ones. Layers of two kinds of experts.
MODELS = [[], ["--d-model", 96, "--heads", 24, "--kv-heads", 12, "--d-ff", 264, "--vocab-size", 264],
          ["--model", "smollm-1.7b", "--layers", 8], ["--model", "llama-3.1-8b", "--layers", 7]]


def options_of(ranks):
    left, degrees = ranks, {}
    for axis in draw.sample(["tp", "cp", "pp"], 3):
        degrees[axis] = draw.choice([n for n in (1, 1, 2, 3, 4, 6, 8) if left % n == 0])
        left //= degrees[axis]
    model = draw.choice(MODELS)
    kinds = ("naive", "tiled", "tensor-core") if "--model" in model else ("naive", "tiled", "tiled")
    words = model + ["--attention", draw.choice(kinds), "--dp", left]
    for axis, degree in degrees.items():
        words += [f"--{axis}", degree]
    words += ["--zero-stage", draw.randrange(4), "--seq-len", 24 * 64, "--optimizer", draw.choice(("adamw", "adamw", "sgd"))]
    words += ["--micro-batch-size", 2, "--global-batch-size", 2 * left * draw.choice((6, 12))]
    words += ["--ranks-per-node", draw.choice((2, 3, 4, 5, 6, 8, 8, 8)), "--gpu", draw.choice(("h100", "h100", "a100", "b200"))]
    words += draw.choice(([], ["--recompute", "full"], ["--recompute", "selective"]))
    if degrees["pp"] > 1:
        words += ["--pp-schedule", draw.choice(("1f1b", "afab", "zb-h1", "interleaved", "zb-v", "dualpipe", "dualpipe-v"))]
        words += draw.choice(([], [], ["--pp-messages", "grouped"]))
    if degrees["tp"] > 1:
        words += draw.choice(([], ["--sequence-parallel"], ["--tp-overlap", 2]))
    if degrees["cp"] > 1:
        words += ["--cp-exchange", draw.choice(("ring", "all-gather", "ulysses", "ulysses-ring"))]
        words += ["--cp-layout", draw.choice(("zigzag", "contiguous"))]
    if draw.random() < 0.4:
        experts = draw.choice((4, 6, 8, 12))
        words += ["--experts", experts, "--top-k", draw.choice((1, 2))]
        words += ["--ep", draw.choice([n for n in range(1, experts + 1) if experts % n == 0 and left * degrees["cp"] % n == 0])]
        words += draw.choice(([], ["--balance", "bias"], ["--shared-experts", 1], ["--expert-products", "loop"]))
        words += draw.choice(([], ["--dispatch", "once"], ["--expert-chunks", 2]))
    elif words[words.index("--zero-stage") + 1] == 0:
        words += ["--dp-sync", draw.choice(("naive", "overlap", "bucket"))]
    return [str(word) for word in words]


def dry_run(processes, options):
    """(status, what it complained of, lines of the log, the ranks' operations)."""
    with tempfile.TemporaryDirectory() as folder:
        log, trace = pathlib.Path(folder, "log"), pathlib.Path(folder, "trace")
        environment = {**os.environ, "UCX_LOG_LEVEL": "error", "OMP_NUM_THREADS": "1"}
        command = ["mpirun", "-n", str(processes), str(arguments.build / "07_combined_5d"), "--dry-run", "--steps", "3", *options,
                   "--log-json", str(log), "--trace", str(trace)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500)
        if done.returncode != 0:
            return done.returncode, done.stderr, [], {}
        events = json.loads(trace.read_text())["traceEvents"]
        streams = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
        operations = collections.defaultdict(list)
        for e in events:
            if e["ph"] == "X":
                nanoseconds = round(1e3 * e["ts"]), round(1e3 * e["dur"])
                operations[e["pid"]].append((streams[e["pid"], e["tid"]], *nanoseconds, e["name"], str(e["args"])))
        return 0, "", [json.loads(line) for line in log.read_text().splitlines()], operations


def differences(whole, folded, means):
    """What a folded run says otherwise than the whole one. `means`: those of all ranks, too, which are those of ranks that do
    less where shards or places in a sequence differ."""
    (_, _, log, operations), (_, _, folded_log, folded_operations) = whole, folded
    found = []
    for step, folded_step in zip(log[1:-1], folded_log[1:-1], strict=True):
        for a, b, what in ((step["modelled"]["seconds"], folded_step["modelled"]["seconds"], "seconds"),
                           (step["comm_bytes"], folded_step["comm_bytes"], "bytes")):
            if a != b:
                found.append(f"step {step['step']}: {a} {what}, folded {b}")
        for what in ("compute_seconds", "communication_seconds", "hidden") if means else ():
            a, b = step["modelled"][what], folded_step["modelled"][what]
            if abs(a - b) > 1e-12 * abs(a):
                found.append(f"step {step['step']}: {what} {a}, folded {b}")
    for table in ("memory", "communication"):
        rows = {row["rank"]: row for row in log[-1]["summary"][table]}
        for row in folded_log[-1]["summary"][table]:
            row.pop("stands_for", None)
            if rows[row["rank"]] != row:
                found.append(f"{table} {rows[row['rank']]}, folded {row}")
    for rank, list_of_rank in folded_operations.items():
        differ = [pair for pair in zip(sorted(operations[rank]), sorted(list_of_rank)) if pair[0] != pair[1]]
        if differ or len(operations[rank]) != len(list_of_rank):
            found.append(f"rank {rank}: {len(operations[rank])} operations, folded {len(list_of_rank)}; {differ[:1]}")
    return found


passed = failed = tried = there = of = 0
while tried < arguments.count:
    ranks = draw.choice(arguments.ranks)
    options = options_of(ranks)
    status, words, *_ = folded = dry_run(1, options + ["--ranks", str(ranks)])
    wanted = re.search(r"expected (\d+), the ranks that differ", words)
    processes = int(wanted[1]) if wanted else 1
    if status not in (0, 1) and not wanted or processes == ranks:
        continue  # the options do not fit each other, or nothing folds
    whole = dry_run(ranks, options)
    if wanted:
        folded = dry_run(processes, options + ["--ranks", str(ranks)])
    if whole[0] != 0 and whole[:2] == folded[:2]:
        continue  # both do not fit into memory
    tried, there, of = tried + 1, there + processes, of + ranks
    if whole[0] == folded[0] == 0:
        found = differences(whole, folded, means=all(options[options.index(axis) + 1] == "1" for axis in ("--dp", "--cp")))
    else:
        found = [f"{whole[:2]}, folded {folded[:2]}"]
    passed, failed = passed + (not found), failed + bool(found)
    print(("FAILED  " if found else "ok      ") + f"{processes} of {ranks} ranks: {' '.join(options)}", *found[:3], sep="\n          ", flush=True)
print(f"{there} of {of} ranks were there")
print(f"{passed} passed, {failed} failed")
sys.exit(failed > 0)
