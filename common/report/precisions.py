"""What the precision does to learning:  python precisions.py OUT BUILD [STEPS]

BUILD/cpu-{fp32,bf16,fp16,fp8}/01_single_gpu train the same model on the same batches, at two sizes. A third
time a few channels of the activations are a hundred times as large: norms have weights of 100 there, and the
next layer's columns are divided by 100, so that nothing else changes. Writes OUT.md, a table, and OUT.svg,
the curves. A run whose log is complete in OUT.runs is not repeated."""

import json
import pathlib
import shutil
import sys

import altair as alt
import numpy as np
import vl_convert
from safetensors.numpy import load_file, save_file

import runs as logs

SIZES = {
    "128 wide": "--layers 4 --d-model 128 --heads 4 --kv-heads 4 --d-ff 384",
    "256 wide": "--layers 2 --d-model 256 --heads 4 --kv-heads 4 --d-ff 512",
}
TRAINING = "--seq-len 128 --global-batch-size 16 --micro-batch-size 16 --log-every 100 --lr 3e-3"
KINDS = {  # name: build, options
    "fp32": ("fp32", ""),
    "bf16": ("bf16", ""),
    "fp16": ("fp16", ""),
    "fp16, not scaled": ("fp16", "--loss-scale 1"),
    "fp8": ("fp8", ""),
}
LARGE = [3, 40, 77, 101]  # channels


def train(build, precision, *words):
    """Runs 01 of this precision. Of an option that is given twice the later value counts."""
    logs.output_of(build / f"cpu-{precision}/01_single_gpu", *TRAINING.split(), *words)


def with_outliers(build, folder, shape):
    """The folder of a checkpoint of initial weights, whose norms give LARGE channels a hundred times their
    size."""
    run = folder / "initial"
    if not (run / "large.txt").exists():
        shutil.rmtree(run, ignore_errors=True)  # of a run that was killed
        train(build, "fp32", *shape.split(), "--lr", 0, "--steps", 1, "--save", run)
        path = run / "step_000001/model.safetensors"
        weights = load_file(path)
        for name, weight in weights.items():
            if name.endswith("layernorm.weight"):
                weight[LARGE] *= 100
            if any(part in name for part in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")):
                weight[:, LARGE] /= 100
        save_file(
            {name: np.ascontiguousarray(weight) for name, weight in weights.items()},
            path,
            metadata={"format": "pt"},
        )
        (run / "large.txt").write_text(f"channels {LARGE}\n")
    return run / "step_000001"


def losses(build, folder, name, program, words, steps):
    """Of each step."""
    log = folder / (name.replace(" ", "-").replace(",", "") + ".jsonl")
    for attempt in range(2):
        if log.exists():
            lines = [json.loads(line) for line in log.read_text().splitlines()]
            found = [line["loss"] for line in lines if "step" in line]
            if len(found) == steps and "summary" in lines[-1]:
                print(f"{folder.name}, {name}: {np.mean(found[-50:]):.4f}", flush=True)
                return [np.nan if loss is None else loss for loss in found]
        train(build, program, *words.split(), "--steps", steps, "--log-json", log)
    raise logs.Refused(f"{log}: not complete")


def main(out, build, steps="400"):
    if not steps.isdigit() or int(steps) < 20:
        raise logs.Refused(f"STEPS: {steps} is not valid; expected a whole number from 20")
    out, build, steps = pathlib.Path(out), pathlib.Path(build), int(steps)
    curves, rows, exact = [], [], 0
    for size, shape in [*SIZES.items(), ("128 wide, outliers", SIZES["128 wide"])]:
        folder = out.with_suffix(".runs") / size.replace(" ", "-").replace(",", "")
        folder.mkdir(parents=True, exist_ok=True)
        outliers = "outliers" in size
        for kind, (program, words) in KINDS.items():
            if outliers:
                words += f" --load-weights {with_outliers(build, folder, shape)}"
            found = losses(build, folder, kind, program, f"{shape} {words}", steps)
            means = [np.mean(found[at : at + 20]) for at in range(0, steps, 20)]
            curves += [
                {"size": size, "kind": kind, "step": 20 * i + 10, "loss": float(m)}
                for i, m in enumerate(means)
            ]
            mean = np.mean(found[-50:])
            exact = mean if kind == "fp32" else exact
            rows.append((kind, mean, mean - exact))
    with out.with_suffix(".md").open("w") as table:
        table.write("| | " + " | ".join(SIZES) + " | 128 wide, outliers |\n|---|" + "---|" * 3 + "\n")
        for kind in KINDS:
            cells = [f"{mean:.4f} ({apart:+.4f})" for k, mean, apart in rows if k == kind]
            table.write(f"| {kind} | " + " | ".join(cells) + " |\n")
    chart = (
        alt.Chart(alt.Data(values=curves))
        .mark_line()
        .encode(
            x="step:Q",
            y=alt.Y("loss:Q", scale=alt.Scale(zero=False)),
            color=alt.Color("kind:N", sort=list(KINDS)),
            column=alt.Column("size:N", sort=[*SIZES, "128 wide, outliers"]),
        )
    )
    out.with_suffix(".svg").write_text(
        vl_convert.vegalite_to_svg(chart.properties(width=260, height=240).to_dict())
    )
    print(f"{out.with_suffix('.md')}, {out.with_suffix('.svg')}")


if __name__ == "__main__":
    logs.end_in_one_line(main, *sys.argv[1:])
