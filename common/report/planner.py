"""What the page and the book ask the planner (07_combined_5d/plan) for several models."""

import argparse
import itertools
import json
import pathlib
import tempfile

import runs as logs

MODELS = ["smollm-1.7b", "llama-3.2-1b", "llama-2-7b", "llama-3.1-8b", "llama-3.1-70b"]
SIZES = [
    "model",
    "config",
    "layers",
    "d-model",
    "heads",
    "kv-heads",
    "d-ff",
    "vocab-size",
    "experts",
    "top-k",
    "shared-experts",
]


def options_of(given, defaults):
    """(the values of the options in `defaults`, as attributes; the other words). Throws Refused."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for option, value in defaults.items():
        parser.add_argument("--" + option, default=value)
    try:
        return parser.parse_known_args(list(map(str, given)))
    except argparse.ArgumentError as error:
        raise logs.Refused(f"PLAN: {error}") from None


def models_of(given):
    """(the words that say a model, of each: first the one that `given` says, if any, then the presets;
    whether it says one; its other words)."""
    sizes, others = options_of(given, dict.fromkeys(SIZES))
    given = {"--" + option: value for option in SIZES if (value := vars(sizes)[option.replace("-", "_")])}
    asked = [word for pair in given.items() for word in pair]
    models = [["--model", name] for name in MODELS if ["--model", name] != asked]
    return ([asked] if asked else []) + models, bool(asked), others


# What can be chosen in the calculator. A data rank has 8 micro-batches; replicas = dp x cp. Of data ranks there may be any
# number: memory in shards is a / replicas + b, so two numbers of replicas say it, but for what pads shards to equal sizes
# (below 0.01 GiB). The libraries' memory depends on whether there is more than one replica.
MICRO_BATCHES = 8
EXPERTS = (["--model", "llama-3.2-1b", "--experts", "8"], (1, 2, 4, 8))  # a model, over so many ranks
MARGIN = 0.04  # of a GPU's memory, for fragments: plan.cu
CHOICES = {
    "seq_len": [1024, 2048, 4096, 8192, 16384, 32768],
    "mbs": [1, 2, 4, 8],
    "tp": [1, 2, 4, 8],
    "sp": [False, True],
    "cp": [1, 2, 4, 8],
    "pp": [1, 2, 4, 8],
    "replicas": [8, 64],
    "several": [1, 64],
    "zero": [0, 1, 2, 3],
    "recompute": ["none", "full"],
}


# Of a table that plan --rows reads, and what of a layout here is in them.
COLUMNS = {"gpus": "gpus", "tp": "tp", "cp": "cp", "pp": "pp", "dp": "dp", "ep": "ep", "zero-stage": "zero", "micro-batch-size": "mbs",
           "sequence-parallel": "sp", "recompute": "recompute", "seq-len": "seq_len", "global-batch-size": "batch"}  # fmt: skip


def table(plan, words, axes, entry, ep=1):
    """Nested lists: for each value of the first axis those of the others. An entry is made of what the
    planner says of the layout, None where it refuses it."""
    rows = []
    for values in itertools.product(*(CHOICES[axis] for axis in axes)):
        at = {"tp": 1, "cp": 1, "pp": 1, "zero": 0, "mbs": 1, "seq_len": 1024} | dict(zip(axes, values))
        dp = max(ep, at["replicas"] if "replicas" in at else at.get("several", 1) // at["cp"])
        at |= {
            "dp": dp,
            "ep": ep,
            "batch": MICRO_BATCHES * at["mbs"] * dp,
            "sp": str(at.get("sp", False)).lower(),
        }
        at |= {"gpus": at["tp"] * at["cp"] * at["pp"] * at["dp"], "recompute": at.get("recompute", "none")}
        rows.append(",".join(str(at[name]) for name in COLUMNS.values()))
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "rows")
        file.write_text("\n".join([",".join(COLUMNS), *rows]) + "\n")
        said = map(json.loads, logs.output_of(plan, *words, "--rows", file).splitlines())
    entries = (None if "refusal" in layout else entry(layout) for layout in said)

    def nested(axes):
        return [nested(axes[1:]) for _ in CHOICES[axes[0]]] if axes else next(entries)

    return nested(axes)


def calculator(plan, *given):
    """The memory of many layouts of each model, for a page that has no formula. Memory has parts that depend
    on different choices, so three small tables serve instead of a huge one. In the first two, whose first
    axis is the model, an entry has the bytes of the first pipeline stage, then those of the last one; the
    stages between need less. The schedule is 1F1B."""
    models, is_asked, others = models_of(given)
    first = [
        logs.planned(plan, "--json", *model, *others, "--coarse", "--gpus", 1, "--compare", "mbs1")
        for model in models
    ]
    first.append(
        logs.planned(plan, "--json", *EXPERTS[0], *others, "--coarse", "--gpus", 1, "--compare", "mbs1")
    )
    words = [([*model, *others], 1) for model in models]
    words += [([*EXPERTS[0], *others], ep) for ep in EXPERTS[1]]
    profiles = sorted(pathlib.Path(__file__).parents[1].glob("clock/profiles/*.json"))
    numbers = {path.stem: json.loads(path.read_text()) for path in profiles}  # but those of a framework alone
    gpus = {
        name: (1 - MARGIN) * of["memory_bytes"]["value"]
        for name, of in numbers.items()
        if "memory_bytes" in of
    }
    asked = {first[0]["gpu"]: first[0]["memory_bytes"]}
    tables = {"gpus": {**asked, **gpus, **asked}}  # the asked one stands first
    tables["model"] = first[0]["model"] if is_asked else "llama-3.1-8b"
    options = [
        " ".join([*model, *of["layouts"][0]["options"][-2:]])
        for model, of in zip([*models, EXPERTS[0]], first)
    ]
    tables["ep"] = [ep for _, ep in words]
    tables["options"] = options[:-1] + [f"{options[-1]} --ep {ep}" for ep in EXPERTS[1]]
    names = [of["model"] for of in first[:-1]]
    names += [f"{first[-1]['model']}, 8 experts, ep {ep}" for ep in EXPERTS[1]]
    tables["choices"] = {"model": names, **CHOICES}

    def tables_of(axes, purposes):
        return [
            table(plan, w, axes, lambda layout: [stage[purposes] for stage in layout["stages"]], ep)
            for w, ep in words
        ]

    tables["states"] = tables_of(["tp", "pp", "seq_len", "zero", "replicas"], slice(0, 3))
    tables["activations"] = tables_of(["tp", "pp", "sp", "recompute", "seq_len", "mbs", "cp"], slice(3, None))
    tables["libraries"] = table(
        plan, words[0][0], ["tp", "cp", "pp", "several"], lambda layout: layout["libraries"]
    )
    return tables


def heatmap(plan, gpus, *given):
    """The fastest layout by coarse time of each model on 8, 16, 32 ... GPUs, up to so many, where one fits:
    the JSON of plan."""
    models, _, others = models_of(given)
    numbers = [8 * 2**i for i in range(20) if 8 * 2**i <= max(8, int(gpus))]
    cells, refused = [], None
    for model in models:
        for number in numbers:
            try:
                cells.append(
                    logs.planned(plan, "--json", *model, *others, "--coarse", "--top", 1, "--gpus", number)
                )
            except logs.Refused as error:
                refused = error
    if not cells:
        raise refused
    return cells
