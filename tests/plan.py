"""Holds the planner against the program.  python plan.py BUILD N [RANKS...]: BUILD has plan and
07_combined_5d.

What it prints is what a dry run of 07 says, to the byte and the nanosecond: for layouts that need one process
or several. Its coarse time is near. Of N random layouts for each of RANKS it puts those of a model on so many
GPUs in nearly the order in which dry runs do, and the layout that it would pick is nearly the fastest. The
last line is "N passed, N failed"."""

import json
import os
import pathlib
import random
import re
import statistics
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "common/report"))
import planner  # noqa: E402

build, count = pathlib.Path(sys.argv[1]), int(sys.argv[2])
RANKS = [int(n) for n in sys.argv[3:]] or [8, 16, 32]
MODELS = [["--model", "smollm-1.7b"], ["--model", "llama-3.2-1b"], ["--model", "llama-3.1-8b"],
          ["--model", "smollm-1.7b", "--layers", 8, "--experts", 16],
          ["--model", "smollm-1.7b", "--layers", 8, "--experts", 16, "--shared-experts", 1]]  # fmt: skip
# GPUs, the ranks of them that differ (fold.h), the model, sequences a step, the layout.
LLAMA_70B = ["--model", "llama-3.1-70b", "--seq-len", 4096]
FOLDED = [(512, 1, LLAMA_70B, 256, "tp8 dp64 zero3 mbs2 sp"),
          (512, 1, ["--model", "llama-3.1-8b", "--seq-len", 4096], 512, "tp2 dp256 zero3 shards16 mbs1 sp"),
          (1024, 4, LLAMA_70B, 256, "tp8 dp32 pp4 zero2 mbs1 zb-v sp"),
          (1024, 4, LLAMA_70B, 256, "tp8 dp32 pp4 zero2 mbs1 dualpipe sp"),
          (1024, 4, ["--model", "llama-3.1-8b", "--layers", 8, "--seq-len", 16384], 128, "tp2 cp4 dp128 zero1 mbs1 sp"),
          (2048, 1, ["--model", "smollm-1.7b", "--layers", 8, "--experts", 16, "--seq-len", 4096], 2048, "tp2 dp1024 zero0 mbs1 ep4")]  # fmt: skip
draw = random.Random(20)
passed = failed = 0


def expect(good, what):
    global passed, failed
    passed, failed = passed + bool(good), failed + (not good)
    print(("ok      " if good else "FAILED  ") + what, flush=True)


def run(*command):
    environment = {**os.environ, "UCX_LOG_LEVEL": "error", "OMP_NUM_THREADS": "1"}
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, env=environment)


def planned(folder, *words):
    """The planner's layouts, or None if it refuses."""
    done = run(build / "plan", *words, "--json", folder / "plan.json")
    return json.loads((folder / "plan.json").read_text())["layouts"] if done.returncode == 0 else None


def random_layout(ranks):
    left, degrees = ranks, {}
    for axis in draw.sample(["tp", "cp", "pp"], 3):
        degrees[axis] = draw.choice([n for n in (1, 1, 2, 4, 8) if n <= left])
        left //= degrees[axis]
    words = [f"{axis}{n}" for axis, n in degrees.items()] + [f"dp{left}", f"zero{draw.randrange(4)}"]
    words.append(f"mbs{draw.choice((1, 1, 2, 4))}")
    if degrees["pp"] > 1:
        words.append(draw.choice(("1f1b", "afab", "zb-h1", "interleaved2", "zb-v", "dualpipe-v", "dualpipe")))
    if degrees["tp"] > 1:
        words += draw.choice(([], ["sp"]))
    return " ".join(words + draw.choice(([], [], ["full"])))


def check_folded(folder):
    """What the planner prints is what its command says, folded."""
    for gpus, processes, model, batch, layout in FOLDED:
        model = [*model, "--global-batch-size", batch]
        plan = planned(folder, *model, "--gpus", gpus, "--compare", layout)[0]
        done = run("mpirun", "-n", processes, build / "07_combined_5d", *model, *plan["options"], "--ranks", gpus, "--dry-run",
                   "--steps", 2, "--log-json", folder / "log.json")  # fmt: skip
        summary = json.loads((folder / "log.json").read_text().splitlines()[-1])["summary"]
        memory = max(sum(rank["predicted"].values()) for rank in summary["memory"])
        libraries = max(rank["libraries"]["estimated"] for rank in summary["memory"])
        seconds = summary["modelled"]["seconds"]
        same = abs(plan["step_seconds"] / seconds - 1) < 1e-6 and done.returncode == 0
        same = same and (plan["tensor_bytes"], plan["library_bytes"]) == (memory, libraries)
        expect(
            same, f"{gpus} GPUs, {model[1]}, {layout}: {1e3 * seconds:.1f} ms and {memory} bytes, as planned"
        )


def check_coarse(folder):
    """Random layouts, in groups of a model on so many GPUs."""
    groups = {}
    while sum(map(len, groups.values())) < count * len(RANKS):
        ranks, number = draw.choice(RANKS), draw.randrange(len(MODELS))
        layout = random_layout(ranks)
        if "--experts" in MODELS[number]:
            layout += f" ep{draw.choice((1, 2, 4))}"
        words = [*MODELS[number], "--seq-len", 4096, "--global-batch-size", 4 * ranks, "--gpus", ranks]
        plans = planned(folder, *words, "--coarse", "--compare", layout)
        if plans is None or plans[0]["tensor_bytes"] + plans[0]["library_bytes"] > 84e9:
            continue
        issued = planned(folder, *words, "--compare", layout)
        if issued is None:  # a schedule that needs --dp-sync overlap
            continue
        groups.setdefault((ranks, number), []).append(
            (plans[0]["step_seconds"], issued[0]["step_seconds"], layout)
        )
    errors, correlations, weights = [], [], []
    for (ranks, number), pairs in sorted(groups.items()):
        errors += [abs(coarse / seconds - 1) for coarse, seconds, _ in pairs]
        for coarse, seconds, layout in sorted(pairs):
            print(
                f"    {layout}: coarse {1e3 * coarse:.1f} ms, {1e3 * seconds:.1f} ms, {100 * (coarse / seconds - 1):+.0f} %"
            )
        if len(pairs) < 4:
            continue
        order = [[sorted(values).index(value) for value in values] for values in list(zip(*pairs))[:2]]
        correlations.append(statistics.correlation(*order))
        weights.append(len(pairs))
        chosen, best = min(pairs)[1], min(seconds for _, seconds, _ in pairs)
        print(f"{ranks} GPUs, {' '.join(map(str, MODELS[number][1:]))}: {len(pairs)} layouts, rank correlation {correlations[-1]:.2f}, "
              f"the one picked takes {chosen / best:.3f} of the fastest")  # fmt: skip
        expect(chosen <= 1.1 * best, f"it picks one of the fastest: {min(pairs)[2]}")
    print(
        f"a coarse time is {100 * statistics.median(errors):.1f} % off in the median, at most {100 * max(errors):.0f} %"
    )
    if weights:
        mean = sum(c * n for c, n in zip(correlations, weights)) / sum(weights)
        expect(mean > 0.9, f"rank correlation {mean:.3f}")


def check_refusals(folder):
    (folder / "typo.json").write_text('{"as": "h100", "ranges": {"data": 1}}')
    for words in (["--gpus", 0], ["--model", "foo"], ["--compare", "tp3"], ["--compare", "fast"], ["--gpu", "x"],
                  ["--rows", folder / "none"], ["--json", folder / "none" / "x", "--coarse"],
                  ["--gpus", 1, "--model", "llama-3.1-8b"], ["--gpus", 1, "--model", "llama-3.1-8b", "--max-memory", "1000GiB"], ["--bogus"],
                  ["--gpu", folder / "typo.json"], ["--only", "fast"], ["--tp", "8-x"], ["--tp", 3], ["--max-memory", "0"], ["--tokens", "2Q"], ["--price", 3],
                  ["--measured", "1.9s"], ["--compare", "dp8", "--measured", "fast"], ["--compare", "dp8", "--measured", "0s"], ["--compare", "dp8", "tp8", "--measured", "2s"],
                  ["--why", "tp3"], ["--config", folder / "none"], ["--zero-stage", 1], ["--ranks", 8], ["--save", folder / "x"], ["--show-mesh"],
                  ["--model", "llama-3.1-8b", "--compare", "dp8 zero0 mbs1"]):  # fmt: skip
        done = run(build / "plan", *words)
        lines = done.stderr.count("\n")
        expect(
            done.returncode == 2 and lines == 1,
            f"plan {' '.join(map(str, words))}: status {done.returncode}, {lines} line",
        )
    said = run(build / "plan", "--gpus", 8, "--global-batch-size", 32, "--only", "mbs3").stderr
    expect(
        said.startswith("--only: mbs3 is not valid; "),
        f"words that no layout has are blamed, not --gpus: {said.strip()}",
    )


def check_command(words):
    """The printed command is one of a build for GPUs, which has no --gpu; 07 takes its options."""
    said = run(build / "plan", *words, "--gpu", "h200", "--coarse").stdout.splitlines()
    command = [
        line.split() for line in said if line.startswith("mpirun -n 16 build/cuda-bf16/07_combined_5d ")
    ]
    good = len(command) == 1 and not any(word.startswith("--gpu") for word in command[0])
    plan = command[0][4:] if command else []
    done = run(build / "07_combined_5d", *plan, "--ranks", 16, "--dry-run", "--show-mesh")
    expect(
        good and done.returncode == 0,
        f"the printed command has no --gpu, and 07 takes it: {done.stderr.strip()}",
    )


def check_heads(folder, words):
    """Heads of 96: ours are slow, and a line says so; those of others have their rates, in a dry run, too."""

    def heads(number):
        return [
            "--layers",
            4,
            "--d-model",
            1536,
            "--heads",
            number,
            "--kv-heads",
            number,
            "--d-ff",
            4096,
            *words,
        ]

    model = heads(16)
    ours = run(build / "plan", *model, "--coarse").stdout
    flash = run(build / "plan", *model, "--coarse", "--gpu", "h100-flash").stdout
    expect(
        "attention ours" in ours and "heads of 96 are slow here" in ours,
        "a line says that heads of 96 are slow",
    )
    expect("attention FlashAttention-2's" in flash and "slow here" not in flash, "those of others are not")
    seconds = [planned(folder, *m, "--gpu", gpu, "--compare", "dp16 mbs1")[0]["step_seconds"]
               for m, gpu in ((model, "h100-flash"), (heads(24), "h100-flash"), (model, "h100"))]  # fmt: skip
    expect(abs(seconds[0] / seconds[1] - 1) < 0.02 and seconds[2] > 1.3 * seconds[0], f"their rates are those of heads of 64: {seconds}")  # fmt: skip


def check_rows(folder):
    """Tables of measured runs: plan --rows and calibrate.py read them; a wrong one is a line with its row."""
    table, options = folder / "rows.csv", ["--vocab-size", 32000, "--seq-len", 2048]
    head = "gpus,layers,d-model,heads,d-ff,tp,pp,micro-batch-size,global-batch-size,zero-stage,sequence-parallel,recompute,seconds\n"
    rows = [f"8,8,2048,16,5504,{tp},{pp},{mbs},64,1,{str(tp > 1).lower()},{how}," for tp in (1, 2, 4) for pp in (1, 2)
            for mbs in (1, 2) for how in ("none", "full")]  # fmt: skip
    table.write_text(head + "\n".join(row + "1" for row in rows) + "\n")
    done = run(build / "plan", *options, "--rows", table)
    said = [json.loads(line) for line in done.stdout.splitlines()]
    one = planned(folder, "--layers", 8, "--d-model", 2048, "--heads", 16, "--kv-heads", 16, "--d-ff", 5504, *options,
                  "--global-batch-size", 64, "--coarse", "--compare", "tp4 pp2 mbs2 zero1 1f1b sp full")[0]  # fmt: skip
    expect(len(said) == len(rows) and abs(said[-1]["seconds"] / one["step_seconds"] - 1) < 1e-9 and done.stderr == "",
           f"a row is its layout, all options are said: {done.stderr}")  # fmt: skip
    few = folder / "few.csv"  # as a spreadsheet may write it
    few.write_bytes(b"\xef\xbb\xbfgpus,tp\r\n8,2\r\n\r\n6,4\r\n")
    of_few = run(build / "plan", *options, "--rows", few).stdout.splitlines()
    expect(len(of_few) == 2 and json.loads(of_few[0]).get("seconds", 0) > 0 and "divisor of the number of ranks, 6" in of_few[1],
           f"dp is what a row leaves, a layout that cannot be is refused: {of_few}")  # fmt: skip
    done = run(build / "plan", "--rows", table)
    expect(done.stderr.count("\n") == 1 and "does not say vocab-size, seq-len:" in done.stderr, f"what rows do not say is printed once: {done.stderr.strip()}")  # fmt: skip
    # Rows that are exactly predicted, of which one did not fit, one is not known.
    exact = [f"{row}{line['seconds']!r}" for row, line in zip(rows, said)]
    exact[3] = rows[3] + "oom"
    table.write_text(head + "\n".join(exact) + "\n")
    calibrate = [sys.executable, "07_combined_5d/plan/calibrate.py", build / "plan", table, "h100", "-"]
    done = run(*calibrate, *options)
    judged = [line.split() for line in done.stdout.splitlines() if line.startswith("all ")]
    expect(judged and judged[0][1:] == ["1", str(len(rows) - 1), "+0.0", "%", "0.0", "%", "1.00", "1.00", "1.000"], f"exact predictions are judged so: {judged}")  # fmt: skip
    expect("false refusals, 1 false hopes" in done.stdout, "memory is judged, too")
    wrong = {"a cell too few": (rows[2][:-1], 4), "no number": (rows[2].replace("5504", "x") + "1", 4), "no GPUs": (rows[2][1:] + "1", 4),
             "no option": (None, 2), "no seconds": (rows[2] + "soon", 4)}  # fmt: skip
    for what, (row, number) in wrong.items():
        lines = list(exact) if row is None else [*exact[:2], row, *exact[3:]]
        table.write_text((head.replace("tp", "tpp", 1) if row is None else head) + "\n".join(lines) + "\n")
        for command in (calibrate, [build / "plan", "--rows", table]):
            if what == "no seconds" and command is not calibrate:
                continue
            done = run(*command, *options)
            expect(done.returncode == 2 and f"row {number}: " in done.stderr.splitlines()[-1], f"{what}: {done.stderr.strip()[-150:]}")  # fmt: skip


def check_calculator(folder, number):
    """The tables of the page's calculator against single layouts, of any number of data ranks: memory of the fullest stage,
    less the padding of shards, and of the libraries."""
    model = ["--model", "smollm-1.7b"]
    planner.MODELS = []
    tables = planner.calculator(build / "plan", *model, "--max-memory", "9GiB")
    choices = tables["choices"]
    expect(
        (tables["model"], next(iter(tables["gpus"].values()))) == ("smollm-1.7b", 9 * 2**30),
        "a calculator of what was asked for",
    )
    right = 0
    for _ in range(number):
        entries, at = {}, {}
        while None in entries.values() or not entries or (at["sp"] and at["tp"] == 1):
            at = {axis: draw.choice(values) for axis, values in planner.CHOICES.items()}
            at["dp"] = draw.choice([1, draw.randint(2, 16), draw.randint(17, 512)])
            at["several"] = 64 if at["dp"] * at["cp"] > 1 else 1
            for table, axes in (("states", "tp pp seq_len zero"), ("activations", "tp pp sp recompute seq_len mbs cp"),
                                ("libraries", "tp cp pp several")):  # fmt: skip
                entry = tables[table] if table == "libraries" else tables[table][0]
                for axis in axes.split():
                    entry = entry[choices[axis].index(at[axis])]
                entries[table] = entry if None not in (entry, *(entry if table == "states" else ())) else None
        layout = "tp{tp} cp{cp} pp{pp} dp{dp} zero{zero} mbs{mbs} 1f1b".format(**at)
        layout += (" sp" if at["sp"] else "") + (" full" if at["recompute"] == "full" else "")
        plan = planned(folder, *model, "--seq-len", at["seq_len"], "--global-batch-size", planner.MICRO_BATCHES * at["mbs"] * at["dp"],
                       "--gpus", at["tp"] * at["cp"] * at["pp"] * at["dp"], "--coarse", "--compare", layout)[0]  # fmt: skip
        part = (64 / (at["dp"] * at["cp"]) - 1) / 7  # from 64 replicas to 8, as 1 / replicas goes
        fullest = max(
            sum(of_64) + part * (sum(of_8) - sum(of_64)) + sum(activations)
            for of_8, of_64, activations in zip(*entries["states"], entries["activations"])
        )
        same = (
            abs(plan["tensor_bytes"] - fullest) < 0.01 * 2**30
            and plan["library_bytes"] == entries["libraries"]
        )
        right += same
        if not same:
            print(f"{layout}, {at['seq_len']} tokens: {plan['tensor_bytes']} bytes, in the table {fullest}")
    expect(
        right == number, f"the calculator's tables: {right} of {number} layouts need what the planner says"
    )


def check_answers(folder):
    """What plan answers beside a list: constraints, money, --why, a config.json, other GPUs."""
    words = ["--model", "smollm-1.7b", "--gpus", 16, "--seq-len", 2048, "--global-batch-size", 64]
    layouts = planned(folder, *words, "--tp", "2-4", "--only", "zero3", "--max-memory", "40GiB", "--top", 3)
    good = all(
        plan["tp"] in (2, 4) and "zero3" in plan["layout"] and plan["tensor_bytes"] < 40 * 2**30
        for plan in layouts
    )
    expect(len(layouts) == 3 and good, "only layouts that were asked for")
    meshes = [[plan[axis] for axis in ("tp", "cp", "dp", "pp", "ep")] for plan in layouts]
    expect(all(meshes.count(mesh) == 1 for mesh in meshes), "one layout of each mesh")
    times = [plan["step_seconds"] for plan in layouts]
    expect(times == sorted(times), "the fastest first")
    # Of these meshes a dry run finds another one the fastest than the coarse time does.
    large = [
        "--model",
        "llama-3.1-70b",
        "--gpus",
        64,
        "--seq-len",
        8192,
        "--global-batch-size",
        64,
        "--pp",
        1,
    ]
    fastest = [
        planned(folder, *large, *more)[0]["layout"]
        for more in (["--top", 10], ["--top", 1], ["--why", "cp8 dp8 zero3 mbs2"])
    ]
    expect(
        fastest == [fastest[0]] * 3, f"the fastest layout is {fastest[0]}, however many are shown: {fastest}"
    )
    said = run(build / "plan", *words, "--coarse", "--tokens", "2T", "--price", 2.5).stdout
    match = re.search(r"on 16 GPUs: ([\d.]+) to ([\d.]+) days, (\d+) to (\d+) GPU hours, (\d+) to (\d+) of money", said)  # fmt: skip
    numbers = list(map(float, match.groups())) if match else [1, 1, 1, 1, 1, 1]
    expect(
        all(abs(24 * 16 * days / hours - 1) < 0.01 and abs(2.5 * hours / money - 1) < 0.01
            for days, hours, money in (numbers[::2], numbers[1::2])) and abs(numbers[3] / numbers[2] - 1.5) < 0.01,
        f"days, GPU hours and money, from and to: {numbers}",
    )  # fmt: skip
    best, asked = planned(folder, *words, "--only", "dp16 zero1-2 mbs1", "--why", "tp4 dp4")
    good = (
        asked["layout"].startswith("tp4 dp4")
        and best["dp"] == 16
        and asked["step_seconds"] > best["step_seconds"]
    )
    sums = [
        plan["seconds"]["compute"] + plan["seconds"]["idle"] - plan["step_seconds"] for plan in (best, asked)
    ]
    expect(good and max(map(abs, sums)) < 1e-9, "why a layout is not the best: it computes, or is idle")
    said = run(build / "plan", *words, "--only", "dp16 zero1-2 mbs1", "--why", "tp4 dp4").stdout
    longer = round(1e3 * (asked["step_seconds"] - best["step_seconds"]))
    expect(
        f"{asked['layout']} takes {longer} ms longer: " in said and " ms more of tensor" in said,
        "and says so in a sentence",
    )
    one = planned(folder, *words, "--compare", "tp4 dp4 zero1 mbs1")[0]
    seconds, parts = one["step_seconds"], one["seconds"]
    for more in (0.25 * parts["tensor"], -0.25 * parts["tensor"]):
        measured = f"{seconds + more:.9f}s"
        said = run(build / "plan", *words, "--compare", "tp4 dp4 zero1 mbs1", "--measured", measured).stdout
        _, difference, way, as_if = re.search(r"measured ([\d.]+) ms is ([\d.]+) ms (more|less) than modelled, (.*)", said, re.S).groups()  # fmt: skip
        took = {part: (float(now), float(was)) for part, now, was in re.findall(r"(\w+) +took ([\d.]+) ms in place of ([\d.]+)", as_if)}  # fmt: skip
        good = way == ("more" if more > 0 else "less") and {"compute", "tensor"} <= set(took)
        good = good and all(abs(was - 1e3 * parts[part]) < 0.06 and abs(now - was - 1e3 * more) < 0.11 for part, (now, was) in took.items())  # fmt: skip
        now, was = map(float, re.search(r"at ([\d.]+) % of the peak in place of ([\d.]+)", as_if).groups())
        good = good and abs(now / was * took["compute"][0] / took["compute"][1] - 1) < 0.01
        expect(good and (" us late, each of " in as_if) == (more > 0), f"where {difference} ms {way} can be: {took}, {now} % of peak")  # fmt: skip
    said = run(build / "plan", *words, "--compare", "tp4 dp4 zero1 mbs1", "--measured", f"{seconds + 1:.9f}s").stdout  # fmt: skip
    late, kernels = re.search(r"came ([\d.]+) us late, each of a rank's (\d+)", said).groups()
    hidden, share = re.search(r"was nothing; ([\d.]+) ms of transfers are, (\d+) % of", said).groups()
    expect(
        0 < float(hidden) < 1e3 * seconds and abs(float(hidden) / 10 - int(share)) < 0.6,
        f"{hidden} ms are hidden",
    )
    expect(
        int(kernels) == 24 * 42 * 16 and abs(float(late) * int(kernels) / 1e6 - 1) < 0.01,
        f"{kernels} launches, {late} us",
    )
    said = run(build / "plan", "-h").stdout
    named = (" smollm-1.7b ", " h100-flash,", " dualpipe-v sp none ")
    expect(
        all(word in said for word in named) and "INT" not in said,
        "--help names models, GPUs, words of layouts",
    )
    check_command(words)
    check_heads(folder, words[2:])
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
             "num_key_value_heads": 8, "vocab_size": 128256, "model_type": "llama", "rope_theta": 500000}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(sizes))
    same = [run(build / "plan", "--coarse", *model, *words[2:]).stdout.split("\n", 1) for model in
            (["--config", folder / "config.json"], ["--model", "llama-3.2-1b"])]  # fmt: skip
    expect(same[0][1].split("mpirun")[0] == same[1][1].split("mpirun")[0], "a config.json is its preset")
    (folder / "tied.json").write_text(
        json.dumps(sizes | {"tie_word_embeddings": True, "attention_dropout": 0.1})
    )
    said = run(build / "plan", "--coarse", "--config", folder / "tied.json", *words[2:]).stdout.splitlines()
    expect("1.50G parameters" in said[0] and said[1].startswith("its head is the embedding, which makes 1.24G parameters")
           and said[2].startswith("its attention_dropout is above 0"), f"what a config.json has otherwise is said: {said[:3]}")  # fmt: skip
    for kind, more, options, left_out in (
        ("mistral", {"sliding_window": 4096}, [], "its sliding window of 4096 tokens is left out\n"),
        ("qwen2", {"sliding_window": 4096, "use_sliding_window": False}, [], "its biases of queries, keys and values are left out\n"),
        ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": None}, ["--experts", 8, "--top-k", 3], ""),
    ):  # fmt: skip
        of_kind = {"model_type": kind, "architectures": [kind.capitalize() + "ForCausalLM"]}
        (folder / "relative.json").write_text(json.dumps(sizes | of_kind | more))
        said = [run(build / "plan", "--coarse", "--compare", "dp16 zero3", *model, *words[2:]).stdout.split("\n", 1)[1]
                for model in (["--config", folder / "relative.json"], ["--model", "llama-3.2-1b", *options])]  # fmt: skip
        expect(said[0] == left_out + said[1], f"a {kind} is a Llama, less what a line says: {said[0][:60]!r}")
    expect(
        run(build / "plan", "--coarse", "--layers", 4).stdout.startswith("a model: 4 layers"),
        "a model of one's own is not called tiny",
    )
    said = run(build / "plan", *words, "--gpu", "h100-nanotron").stdout
    expect(
        "by a coarse time" in said and "8 of 10 are in" in said,
        "a GPU as another framework uses it, and how sure that is",
    )
    at_80 = f"stty cols 80; {build / 'plan'} --coarse --compare 'dp8 zero2'"
    said = run("script", "-qc", at_80, "/dev/null").stdout.split("layout", 2)[-1].splitlines()[:3]
    expect(
        "8 zero2" in said[2] and " compute" in said[1] and max(map(len, said)) <= 80,
        f"a table is as wide as the terminal: {said}",
    )
    (folder / "slow.json").write_text('{"as": "h100", "memory_achievable": {"value": 0.1}}')
    seconds = [
        planned(folder, *words, "--gpu", gpu, "--compare", "dp16")[0]["step_seconds"]
        for gpu in ("h100", folder / "slow.json")
    ]
    expect(
        seconds[1] > 1.1 * seconds[0],
        f"dry runs take a GPU of one's own: {1e3 * seconds[0]:.1f} and {1e3 * seconds[1]:.1f} ms",
    )


with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    check_refusals(folder)
    check_answers(folder)
    check_rows(folder)
    check_calculator(folder, 50)
    check_folded(folder)
    check_coarse(folder)
print(f"{passed} passed, {failed} failed")
sys.exit(failed > 0)
