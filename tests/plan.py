"""Holds the planner against the programs: layouts of several models, each planned and then issued, operation by operation,
by a dry run of 07: FOLDED ones, and N random ones. python plan.py BUILD N [RANKS...]: BUILD has plan and 07_combined_5d. The
step's time must be within 10 %, memory equal to the byte; and of the random layouts of one model the planner's fastest must
be the fastest, or within 3 %. The last line is "N passed, N failed"."""

import json
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile

build, count = pathlib.Path(sys.argv[1]), int(sys.argv[2])
RANKS = [int(n) for n in sys.argv[3:]] or [8, 16, 32, 64]
MODELS = [["--model", "smollm-1.7b", "--layers", 12], ["--model", "llama-3.2-1b"],
          ["--model", "llama-3.1-8b", "--layers", 16], ["--model", "smollm-1.7b", "--layers", 8, "--experts", 16],
          ["--model", "smollm-1.7b", "--layers", 8, "--experts", 16, "--shared-experts", 1]]
# GPUs, the ranks of them that differ (fold.h), the model, sequences a step, the layout.
LLAMA_70B = ["--model", "llama-3.1-70b", "--seq-len", 4096]
FOLDED = [(256, 1, ["--model", "llama-3.1-8b", "--seq-len", 4096], 512, "tp4 dp64 zero2 mbs1 sp"),
          (512, 1, LLAMA_70B, 256, "tp8 dp64 zero3 mbs2 sp"),
          (1024, 4, LLAMA_70B, 256, "tp8 dp32 pp4 zero2 mbs1 zb-v sp"),
          (1024, 4, LLAMA_70B, 256, "tp4 dp64 pp4 zero3 mbs1 1f1b sp"),
          (1024, 4, ["--model", "llama-3.1-8b", "--layers", 8, "--seq-len", 16384], 128, "tp2 cp4 dp128 zero1 mbs1 sp"),
          (2048, 1, ["--model", "smollm-1.7b", "--layers", 8, "--experts", 16, "--seq-len", 4096], 2048, "tp2 dp1024 zero0 mbs1 ep4"),
          (4096, 1, ["--model", "llama-3.1-70b", "--seq-len", 8192], 2048, "tp8 dp512 zero2 mbs1 sp"),
          (4096, 8, ["--model", "llama-3.1-405b", "--seq-len", 8192], 256, "tp8 dp64 pp8 zero1 mbs1 1f1b sp full")]
EXCHANGES = ("ring", "all-gather", "ulysses", "ulysses-ring")
draw = random.Random(20)
passed = failed = 0


def expect(good, what):
    global passed, failed
    passed, failed = passed + bool(good), failed + (not good)
    print(("ok      " if good else "FAILED  ") + what, flush=True)


def run(*command):
    environment = {**os.environ, "UCX_LOG_LEVEL": "error", "OMP_NUM_THREADS": "1"}
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, env=environment)


def random_layout(ranks):
    left, degrees = ranks, {}
    for axis in draw.sample(["tp", "cp", "pp"], 3):
        degrees[axis] = draw.choice([n for n in (1, 1, 2, 4, 8) if n <= left])
        left //= degrees[axis]
    words = [f"{axis}{n}" for axis, n in degrees.items()] + [f"dp{left}", f"zero{draw.randrange(4)}"]
    words.append(f"mbs{draw.choice((1, 1, 2, 4))}")
    if degrees["pp"] > 1:
        words.append(draw.choice(("1f1b", "afab", "zb-h1", "interleaved2", "zb-v", "dualpipe-v")))
    if degrees["tp"] > 1:
        words += draw.choice(([], ["sp"]))
    return " ".join(words + draw.choice(([], [], ["full"])))


def planned(folder, model, ranks, layouts):
    """The planner's words for each layout, or None if it refuses one of them."""
    done = run(build / "plan", *model, "--gpus", ranks, "--compare", *layouts, "--json", folder / "plan.json")
    return json.loads((folder / "plan.json").read_text())["layouts"] if done.returncode == 0 else None


def issued(folder, model, processes, options):
    """(seconds of a step, bytes of the fullest rank) of a dry run, or None where it does not fit."""
    log = folder / "log.json"
    done = run("mpirun", "-n", processes, build / "07_combined_5d", *model, *options, "--dry-run", "--steps", 2, "--log-json", log)
    if done.returncode != 0:
        return None
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    steps = [line for line in lines if "step" in line]
    memory = max(sum(rank["predicted"].values()) for rank in lines[-1]["summary"]["memory"])
    return steps[-1]["modelled"]["seconds"], memory


def compare(what, plan, result):
    """Returns by how much the planned time differs."""
    seconds, memory = result
    apart = plan["step_seconds"] / seconds - 1
    what += f": {plan['layout']}"
    expect(abs(apart) < 0.1, f"{what}: {1e3 * plan['step_seconds']:.1f} ms, issued {1e3 * seconds:.1f} ms, {100 * apart:+.1f} %")
    expect(plan["tensor_bytes"] == memory, f"{what}: {plan['tensor_bytes']} bytes, issued {memory}")
    return apart


def check_folded(folder):
    """Returns by how much a planned time differs at most."""
    most = 0
    for gpus, processes, model, batch, layout in FOLDED:
        model = [*model, "--global-batch-size", batch]
        plan = planned(folder, model, gpus, [layout])[0]
        result = issued(folder, model, processes, [*plan["options"], "--ranks", gpus])
        most = max(most, abs(compare(f"{gpus} GPUs, {model[1]}", plan, result or (1, 0))))
    return most


def check_refusals(folder):
    (folder / "bad.csv").write_text("a,b\n")
    for words in (["--gpus", 0], ["--model", "foo"], ["--explain", "tp3"], ["--explain", "fast"], ["--style", "x"],
                  ["--score", folder / "none"], ["--score", folder / "bad.csv"], ["--json", folder / "none" / "x"],
                  ["--gpus", 1, "--model", "llama-3.1-8b"], ["--bogus"],
                  ["--only", "fast"], ["--tp", "8-x"], ["--tp", 3], ["--max-memory", "0"], ["--tokens", "2Q"], ["--days", 3], ["--heatmap", "--tokens", "2T", "--days", 3],
                  ["--why", "tp3"], ["--config", folder / "none"], ["--zero-stage", 1], ["--tp-overlap", 2],
                  ["--calculator", folder / "x", "--only", "1f1b"], ["--calculator", folder / "x", "--tp", "3"]):
        done = run(build / "plan", *words)
        lines = done.stderr.count("\n")
        expect(done.returncode == 2 and lines == 1, f"plan {' '.join(map(str, words))}: status {done.returncode}, {lines} line")


def check_calculator(folder, count):
    """The tables of plan --calculator against single layouts: memory of the fullest stage, and of the libraries."""
    run(build / "plan", "--calculator", folder / "tables.json", "--layers", 12, "--tp", "2-8", "--only", "full", "--max-memory", "9GiB")
    tables = json.loads((folder / "tables.json").read_text())
    choices = tables["choices"]
    expect((tables["model"], tables["memory_bytes"], choices["tp"], choices["recompute"]) == ("a model", 9 * 2**30, [2, 4, 8], ["full"]),
           "a calculator of what was asked for")  # fmt: skip
    right = 0
    for _ in range(count):
        entries, at = {}, {}
        while None in entries.values() or not entries or (at["sp"] and at["tp"] == 1):
            at = {axis: draw.choice(values) for axis, values in choices.items()}
            at["replicas"] = at["dp"] * at["cp"]
            for table, axes in (("states", "model tp pp seq_len zero replicas"), ("activations", "model tp pp sp recompute seq_len mbs cp"),
                                ("libraries", "tp cp pp replicas")):
                entry = tables[table]
                for axis in axes.split():
                    entry = entry[choices[axis].index(at[axis])]
                entries[table] = entry
        layout = "tp{tp} cp{cp} pp{pp} dp{dp} zero{zero} mbs{mbs} 1f1b".format(**at)
        layout += (" sp" if at["sp"] else "") + (" full" if at["recompute"] == "full" else "")
        model = [*tables["options"][choices["model"].index(at["model"])].split(), "--seq-len", at["seq_len"], "--global-batch-size", tables["micro_batches"] * at["mbs"] * at["dp"]]
        plan = planned(folder, model, at["tp"] * at["cp"] * at["pp"] * at["dp"], [layout])[0]
        fullest = max(sum(states) + sum(activations) for states, activations in zip(entries["states"], entries["activations"]))
        same = (plan["tensor_bytes"], plan["library_bytes"]) == (fullest, entries["libraries"])
        right += same
        if not same:
            print(f"{model} {layout}: {plan['tensor_bytes']} bytes, in the table {fullest}")
    expect(right == count, f"the calculator's tables: {right} of {count} layouts need what the planner says")


def check_answers(folder):
    """What plan answers beside a list: constraints, money, --why, a config.json, and a row of --score that is bad."""
    words = ["--model", "smollm-1.7b", "--gpus", 16, "--seq-len", 2048, "--global-batch-size", 64]
    run(build / "plan", *words, "--tp", "2-4", "--only", "zero3", "--max-memory", "40GiB", "--json", folder / "x.json")
    layouts = json.loads((folder / "x.json").read_text())["layouts"]
    good = all(plan["tp"] in (2, 4) and "zero3" in plan["layout"] and plan["tensor_bytes"] < 40 * 2**30 for plan in layouts)
    expect(layouts and good, "only layouts that were asked for")
    said = run(build / "plan", *words, "--tokens", "2T", "--price", 2.5, "--days", 1e6).stdout
    match = re.search(r"on 16 GPUs: ([\d.]+) days, (\d+) GPU hours, (\d+) of money", said)
    days, hours, money = map(float, match.groups()) if match else (0, 0, 1)
    expect(abs(days * 24 * 16 / hours - 1) < 0.01 and abs(2.5 * hours / money - 1) < 0.01, "days, GPU hours and money")
    expect("The fewest for 1e+06 days: 2.00T tokens on 1 GPUs" in said, "the fewest GPUs")
    run(build / "plan", "--heatmap", "--layers", 8, "--gpu", "a100", *words[2:], "--tp", 2, "--tokens", "2T", "--price", 2, "--json", folder / "x.json")
    cells = json.loads((folder / "x.json").read_text())["cells"]
    first = cells[0]["layouts"][0]
    expect(cells[0]["model"] == "a model" and all(cell["layouts"][0]["tp"] == 2 for cell in cells) and "--layers 8 --gpu a100" in first["command"]
           and abs(first["days"] * 86400 * 8 * first["tokens_per_second"] / 2e12 - 1) < 1e-9
           and abs(first["money"] / (first["days"] * 24 * 8 * 2) - 1) < 1e-9, "a heatmap of what was asked for")  # fmt: skip
    said = run(build / "plan", *words, "--why", "tp4 dp4").stdout
    rows = re.findall(r"^(\w+) +([-\d.]+) +([-\d.]+) +([-+\d.]+)$", said, re.MULTILINE)
    sums = [sum(float(row[i]) for row in rows if row[0] != "sum") for i in (1, 2)]
    totals = [float(row[i]) for row in rows if row[0] == "sum" for i in (1, 2)]
    expect(totals and all(abs(x - y) < 0.5 for x, y in zip(sums, totals)), "why a layout is not the best, in terms that add up")
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
             "num_key_value_heads": 8, "vocab_size": 128256, "model_type": "llama", "rope_theta": 500000}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(sizes))
    same = [run(build / "plan", *model, *words[2:]).stdout.split("\n", 1) for model in
            (["--config", folder / "config.json"], ["--model", "llama-3.2-1b"])]  # fmt: skip
    expect(same[0][1].split("mpirun")[0] == same[1][1].split("mpirun")[0], "a config.json is its preset")
    (folder / "tied.json").write_text(json.dumps(sizes | {"tie_word_embeddings": True, "attention_dropout": 0.1}))
    said = run(build / "plan", "--config", folder / "tied.json", *words[2:]).stdout.splitlines()
    expect("1.50G parameters" in said[0] and said[1].startswith("its head is the embedding, which makes 1.24G parameters")
           and said[2].startswith("its attention_dropout is above 0"), f"what a config.json has otherwise is said: {said[:3]}")  # fmt: skip
    expect(run(build / "plan", "--layers", 4).stdout.startswith("a model: 4 layers"), "a model of one's own is not called tiny")
    (folder / "rows.csv").write_text("1.3B,1,1,1,1,64,1,0\n1.3B,1,1,32,8,1,1,0\n")
    lines = run(build / "plan", "--style", "nanotron", "--score", folder / "rows.csv").stdout.splitlines()
    expect(len(lines) == 3 and "pp" in lines[1] and float(lines[2].split(",")[8]) > 0, "a bad row of --score is an error in its row")
    run(build / "plan", "--gpu", "a100", "--style", "megatron", "--profile", folder / "megatron.json")
    style = json.loads(pathlib.Path("07_combined_5d/plan/styles/megatron.json").read_text())
    ours, theirs = (json.loads(path.read_text()) for path in (pathlib.Path("common/clock/profiles/a100.json"), folder / "megatron.json"))
    differ = {name for name, of_theirs in theirs.items() if name != "name" and of_theirs["value"] != ours[name]["value"]}
    share = theirs["memory_achievable"]["value"] / ours["memory_achievable"]["value"]
    flash = {f"attention_{size}_{way}" for size in (64, 128) for way in ("forward", "backward")}
    good = abs(share - style["memory_share"]) < 1e-9 and theirs["launch_seconds"]["value"] == style["operation_seconds"]
    expect(good and differ == {"memory_achievable", "launch_seconds", *flash}, f"--profile is the GPU as --style uses it: {sorted(differ)}")
    small = ["--layers", 2, "--steps", 1, "--dry-run", "--log-json", folder / "log"]
    seconds = []
    for gpu in ("a100", folder / "megatron.json"):
        run(build / "07_combined_5d", *small, "--gpu", gpu)
        seconds.append(json.loads((folder / "log").read_text().splitlines()[1])["modelled"]["seconds"])
    expect(seconds[1] > 1.1 * seconds[0], f"a dry run takes it: {1e3 * seconds[0]:.2f} and {1e3 * seconds[1]:.2f} ms")


with tempfile.TemporaryDirectory() as name:
    folder, done = pathlib.Path(name), 0
    check_refusals(folder)
    check_answers(folder)
    check_calculator(folder, 50)
    most = check_folded(folder)
    times, kinds = {}, {}
    while done < count:
        ranks, number = draw.choice(RANKS), draw.randrange(len(MODELS))
        model = MODELS[number] + ["--seq-len", 4096, "--global-batch-size", 4 * ranks, "--cp-exchange", draw.choice(EXCHANGES)]
        layout = random_layout(ranks)
        if "--experts" in model:
            layout += f" ep{draw.choice((1, 2, 4))}"
        plans = planned(folder, model, ranks, [layout])
        if plans is None:
            continue
        plan = plans[0]
        result = issued(folder, model, ranks, plan["options"])
        if result is None:
            continue
        done += 1
        most = max(most, abs(compare(f"{ranks} ranks, {' '.join(map(str, MODELS[number] + model[-2:]))}", plan, result)))
        kinds.setdefault(plan["kind"], []).append(result[0] / plan["step_seconds"])
        times.setdefault((ranks, number), []).append((plan["step_seconds"], result[0]))
    for (ranks, number), pairs in times.items():
        if len(pairs) < 2:
            continue
        chosen, best = min(pairs)[1], min(seconds for _, seconds in pairs)
        expect(chosen <= 1.03 * best, f"{ranks} ranks, model {number}: the best of {len(pairs)} is {chosen / best:.3f} of the fastest")
    for kind, ratios in sorted(kinds.items()):
        print(f"{kind}: issued / planned {min(ratios):.3f} to {max(ratios):.3f} of {len(ratios)}")
    print(f"largest difference {100 * most:.1f} %")
print(f"{passed} passed, {failed} failed")
sys.exit(failed > 0)
