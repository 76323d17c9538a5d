"""What the page and the book ask the planner (07_combined_5d/plan) for several models."""

import argparse

import runs as logs

MODELS = ["smollm-1.7b", "llama-3.2-1b", "llama-2-7b", "llama-3.1-8b", "llama-3.1-70b"]
SIZES = ["model", "config", "layers", "d-model", "heads", "kv-heads", "d-ff", "vocab-size", "experts", "top-k", "shared-experts"]


def models_of(given):
    """(the words that say a model, of each: first the one that `given` says, if any, then the presets; whether it says one; its
    other words)."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for option in SIZES:
        parser.add_argument("--" + option)
    try:
        sizes, others = parser.parse_known_args(list(map(str, given)))
    except argparse.ArgumentError as error:
        raise logs.Refused(f"PLAN: {error}") from None
    given = {"--" + option: value for option in SIZES if (value := vars(sizes)[option.replace("-", "_")])}
    asked = [word for pair in given.items() for word in pair]
    models = [["--model", name] for name in MODELS if ["--model", name] != asked]
    return ([asked] if asked else []) + models, bool(asked), others


def calculator(plan, *given):
    """The tables of plan --calculator, of each model: states and activations have it as their first axis."""
    models, is_asked, others = models_of(given)
    each = [logs.planned(plan, "--calculator", *model, *others) for model in models]
    first = each[0]
    tables = {name: first[name] for name in ("precision", "micro_batches", "choices", "libraries", "gpu", "memory_bytes")}
    tables["model"] = first["model"] if is_asked else "llama-3.1-8b"
    tables["options"] = [f"{' '.join(model)} --attention {of['attention']}" for model, of in zip(models, each)]
    tables["choices"] = {"model": [of["model"] for of in each], **first["choices"]}
    return tables | {name: [of[name] for of in each] for name in ("states", "activations")}


def heatmap(plan, gpus, *given):
    """The fastest layout by coarse time of each model on 8, 16, 32 ... GPUs, up to so many, where one fits: the JSON of plan."""
    models, _, others = models_of(given)
    numbers = [8 * 2**i for i in range(20) if 8 * 2**i <= max(8, int(gpus))]
    cells, refused = [], None
    for model in models:
        for number in numbers:
            try:
                cells.append(logs.planned(plan, "--json", *model, *others, "--coarse", "--top", 1, "--gpus", number))
            except logs.Refused as error:
                refused = error
    if not cells:
        raise refused
    return cells
