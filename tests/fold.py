"""Holds folded worlds (07_combined_5d/fold.h) against whole ones: random meshes, models and options of 07,
each dry run with all its ranks and again with --ranks and those that differ. python fold.py BUILD N
[RANKS...] [--seed S]: BUILD has 07_combined_5d. Memory, calls and elements of the ranks that are in both must
be the same, the fullest rank's memory, too; and the seconds of each step within 0.5 %. The last line is "N
passed, N failed"."""

import argparse
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
# Small ones, in which the host is slower than the GPU, and large ones.
MODELS = [
    [],
    ["--d-model", 96, "--heads", 24, "--kv-heads", 12, "--d-ff", 264, "--vocab-size", 264],
    ["--model", "smollm-1.7b", "--layers", 8],
    ["--model", "llama-3.1-8b", "--layers", 7],
]


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
    words += [
        "--zero-stage",
        draw.randrange(4),
        "--seq-len",
        24 * 64,
        "--optimizer",
        draw.choice(("adamw", "adamw", "sgd")),
    ]
    words += ["--micro-batch-size", 2, "--global-batch-size", 2 * left * draw.choice((6, 12))]
    words += [
        "--ranks-per-node",
        draw.choice((2, 3, 4, 4, 6, 8, 8, 8)),
        "--gpu",
        draw.choice(("h100", "h100", "a100", "b200")),
    ]
    words += draw.choice(([], ["--recompute", "full"], ["--recompute", "selective"]))
    if degrees["pp"] > 1:
        words += [
            "--pp-schedule",
            draw.choice(("1f1b", "afab", "zb-h1", "interleaved", "zb-v", "dualpipe", "dualpipe-v")),
        ]
    if degrees["tp"] > 1:
        words += draw.choice(([], ["--sequence-parallel"], ["--tp-overlap", 2]))
    if degrees["cp"] > 1:
        words += ["--cp-exchange", draw.choice(("ring", "all-gather", "ulysses", "ulysses-ring"))]
        words += ["--cp-layout", draw.choice(("zigzag", "contiguous"))]
    if draw.random() < 0.4:
        experts = draw.choice((4, 6, 8, 12))
        words += ["--experts", experts, "--top-k", draw.choice((1, 2))]
        words += [
            "--ep",
            draw.choice(
                [n for n in range(1, experts + 1) if experts % n == 0 and left * degrees["cp"] % n == 0]
            ),
        ]
        words += draw.choice(([], ["--balance", "bias"], ["--shared-experts", 1]))
    elif words[words.index("--zero-stage") + 1] == 0:
        words += ["--dp-sync", draw.choice(("naive", "overlap", "bucket"))]
    else:
        words += ["--shard-ranks", draw.choice([0, 0] + [n for n in range(1, left + 1) if left % n == 0])]
    return [str(word) for word in words]


def dry_run(processes, options):
    """(status, what it complained of, lines of the log)."""
    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder, "log")
        environment = {**os.environ, "UCX_LOG_LEVEL": "error", "OMP_NUM_THREADS": "1"}
        command = [
            "mpirun",
            "-n",
            str(processes),
            str(arguments.build / "07_combined_5d"),
            "--dry-run",
            "--steps",
            "3",
            *options,
            "--log-json",
            str(log),
        ]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500)
        if done.returncode != 0:
            return done.returncode, done.stderr, []
        return 0, "", [json.loads(line) for line in log.read_text().splitlines()]


def apart(log, folded_log):
    """By how much the seconds of a step differ at most, as a share."""
    seconds = [[line["modelled"]["seconds"] for line in lines[1:-1]] for lines in (log, folded_log)]
    return max(abs(b / a - 1) for a, b in zip(*seconds, strict=True))


def differences(log, folded_log):
    """What a folded run says otherwise than the whole one."""
    found = []
    for table in ("memory", "communication"):
        rows = {row["rank"]: row for row in log[-1]["summary"][table]}
        for row in folded_log[-1]["summary"][table]:
            row.pop("stands_for", None)
            if rows[row["rank"]] != row:
                found.append(f"{table} {rows[row['rank']]}, folded {row}")
    fullest, folded_fullest = (
        max(sum(row["predicted"].values()) for row in run[-1]["summary"]["memory"])
        for run in (log, folded_log)
    )
    if fullest != folded_fullest:
        found.append(f"the fullest rank has {fullest}, folded {folded_fullest}")
    if apart(log, folded_log) > 0.005:
        found.append(f"{100 * apart(log, folded_log):.2f} % apart")
    return found


passed = failed = tried = there = of = most = 0
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
        found, most = differences(whole[2], folded[2]), max(most, apart(whole[2], folded[2]))
    else:
        found = [f"{whole[:2]}, folded {folded[:2]}"]
    passed, failed = passed + (not found), failed + bool(found)
    print(
        ("FAILED  " if found else "ok      ") + f"{processes} of {ranks} ranks: {' '.join(options)}",
        *found[:3],
        sep="\n          ",
        flush=True,
    )
print(f"{there} of {of} ranks were there; times are at most {100 * most:.3f} % apart")
print(f"{passed} passed, {failed} failed")
sys.exit(failed > 0)
