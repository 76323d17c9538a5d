"""Fits a GPU's profile to measured steps of another framework.

    python calibrate.py PLAN SWEEP.csv GPU TO.json

SWEEP has the columns below. TO is a profile as GPU (common/clock/profiles), as this framework uses it: shares
of bandwidths and rates, and seconds of the host and the network for an operation. PLAN predicts each row by
its coarse time (coarse.h). What is made small is the mean of |log(measured / predicted)|, of which each row
gives 0.5 at most, so that stalls which no number explains do not decide. A row that is fast, or is believed
to be, counts most: up to five times as much as a slow one. One number after the other is made larger or
smaller, while that helps.

If there are several models, each is predicted by a fit to the others, too. These errors, not those of the
final fit, are printed, and are the profile's ranges."""

import csv
import json
import math
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict

# Where the fit begins: shares of the GPU's own numbers; seconds of the host and the network, and an exponent
# (layouts.h).
SHARES = {
    "memory_achievable": 0.4,
    "product_achievable": 0.8,
    "link_bandwidth": 0.9,
    "network_bandwidth": 0.7,
}
PLAIN = {"launch_seconds": 3e-5, "collective_seconds": 2e-4, "network_latency": 1e-4, "contention": 0.5}
ROUNDS, LARGEST = 8, 0.5
COLUMNS = "model mbs grad_acc dp pp tp zero nodes tokens_per_second_per_gpu memory_gb".split()
# Of the Ultra-Scale Playbook's models: sequences of 4096 tokens.
MODELS = {
    "1.3B": (16, 2048, 32, 8192),
    "3.6B": (28, 3072, 32, 8192),
    "8.9B": (32, 4096, 32, 14336),
    "80B": (80, 8192, 64, 28672),
}


PROFILES = pathlib.Path(__file__).parents[2] / "common/clock/profiles"


class Refused(Exception):
    pass


def line_of(row):
    """A row as plan --rows reads it."""
    batch = int(row["dp"]) * int(row["mbs"]) * int(row["grad_acc"])
    layout = "tp{tp} dp{dp} pp{pp} zero{zero} mbs{mbs}".format(**row) + (" sp" if row["tp"] != "1" else "")
    layers, d, heads, ff = MODELS[row["model"]]
    return (f"{layout} | --layers {layers} --d-model {d} --heads {heads} --kv-heads {heads} --d-ff {ff} --vocab-size 131072 "
            f"--seq-len 4096 --global-batch-size {batch}")  # fmt: skip


class Planner:
    def __init__(self, plan, gpu, folder):
        self.plan, self.gpu, self.folder = plan, gpu, folder
        self.own = json.loads((PROFILES / f"{gpu}.json").read_text())

    def profile(self, fit):
        """The GPU with these shares and seconds, and with FlashAttention-2 in place of our attention."""
        numbers = {
            name: number if name in PLAIN else self.own[name]["value"] * number
            for name, number in fit.items()
        }
        for size in (64, 128):
            numbers |= {
                f"attention_{size}_{way}": self.own[f"flash_{way}"]["value"]
                for way in ("forward", "backward")
            }
        numbers["attention_blocks"] = 0  # its blocks are not ours
        framework = {"contention": numbers.pop("contention")}  # which the clock of a dry run does not read
        fitted = {name: {"value": value, "source": "make calibrate"} for name, value in numbers.items()}
        return {"as": self.gpu, **fitted, "framework": framework}

    def predict(self, fit, rows):
        """(tokens/s a GPU, bytes, kind) of each row."""
        profile, lines = self.folder / "gpu.json", self.folder / "rows"
        profile.write_text(json.dumps(self.profile(fit)))
        lines.write_text("".join(row["line"] + "\n" for row in rows))
        done = subprocess.run([self.plan, "--gpu", profile, "--rows", lines], capture_output=True, text=True)
        if done.returncode != 0:
            raise Refused(done.stderr.strip())
        predicted = []
        for row, line in zip(rows, done.stdout.splitlines()):
            plan = json.loads(line)
            if "refusal" in plan:
                raise Refused(f"{row['line']}: {plan['refusal']}")
            tokens = 4096 * int(row["mbs"]) * int(row["grad_acc"]) / int(row["tp"]) / int(row["pp"])
            predicted.append((tokens / plan["seconds"], plan["memory"], plan["kind"]))
        return predicted

    def time_loss(self, fit, rows):
        predicted = self.predict(fit, rows)
        best = defaultdict(float)
        for row in rows:
            best[row["model"], row["nodes"]] = max(best[row["model"], row["nodes"]], row["speed"])
        losses = []
        for p, row in zip(predicted, rows):
            weight = min(1, 0.2 + 0.8 * max(p[0], row["speed"]) / best[row["model"], row["nodes"]])
            losses.append(weight * min(abs(math.log(p[0] / row["speed"])), LARGEST))
        return sum(losses) / len(losses)

    def fit(self, rows):
        fit = {**SHARES, **PLAIN}
        best, factors = self.time_loss(fit, rows), dict.fromkeys(fit, 1.5)
        for _ in range(ROUNDS):
            for name in fit:
                for factor in (factors[name], 1 / factors[name]):
                    moved = False
                    while name in PLAIN or fit[name] * factor <= 1.2:
                        tried = {**fit, name: fit[name] * factor}
                        now = self.time_loss(tried, rows)
                        if now > best - 1e-5:
                            break
                        fit, best, moved = tried, now, True
                    if moved:
                        break
                else:
                    factors[name] **= 0.5
        return fit


def quantile(values, share):
    values = sorted(values)
    return values[round(share * (len(values) - 1))]


def rank_correlation(xs, ys):
    def ranks(values):
        return [sorted(values).index(value) for value in values]

    return statistics.correlation(ranks(xs), ranks(ys)) if len(set(xs)) > 1 < len(set(ys)) else 1


def print_cells(rows, predicted):
    cells = defaultdict(list)
    for row, (speed, _, _) in zip(rows, predicted):
        cells[row["model"], int(row["nodes"])].append((speed, row["speed"]))
    shares, correlations = [], []
    print("model, nodes     layouts  picked/best  correlation  median error")
    for (model, nodes), pairs in sorted(cells.items()):
        shares.append(max(pairs)[1] / max(measured for _, measured in pairs))
        correlations.append(rank_correlation(*zip(*pairs)))
        error = quantile([abs(measured / speed - 1) for speed, measured in pairs], 0.5)
        print(
            f"{model:>8} {nodes:5} {len(pairs):10} {shares[-1]:12.3f} {correlations[-1]:12.2f} {100 * error:11.1f} %"
        )
    errors = [abs(row["speed"] / speed - 1) for row, (speed, _, _) in zip(rows, predicted)]
    print(f"mean of picked/best {sum(shares) / len(shares):.3f}, worst {min(shares):.3f}; correlation "
          f"{sum(correlations) / len(correlations):.2f}; median error {100 * quantile(errors, 0.5):.1f} %")  # fmt: skip


def read_rows(path):
    try:
        rows = list(csv.DictReader(pathlib.Path(path).read_text().splitlines()))
        if len(rows) < 20 or any(row.get(name) is None for row in rows for name in COLUMNS):
            raise Refused(f"{path}: expected 20 rows or more, with the columns {','.join(COLUMNS)}")
        for row in rows:
            row["speed"], row["bytes"] = (
                float(row["tokens_per_second_per_gpu"]),
                1e9 * float(row["memory_gb"] or 0),
            )
            row["line"] = line_of(row)
    except (OSError, ValueError) as error:
        raise Refused(f"{path}: {error}") from None
    return [row for row in rows if row["speed"] > 0]


def main(plan, sweep, gpu, to):
    if not sweep:
        raise Refused("SWEEP: value missing; expected a file of measured steps")
    rows = read_rows(sweep)
    with tempfile.TemporaryDirectory() as folder:
        planner = Planner(plan, gpu, pathlib.Path(folder))
        models = sorted({row["model"] for row in rows})
        judged = []
        for model in models if len(models) > 1 else []:
            fitted = planner.fit([row for row in rows if row["model"] != model])
            these = [row for row in rows if row["model"] == model]
            judged += zip(these, planner.predict(fitted, these))
        fit = planner.fit(rows)
        judged = judged or list(zip(rows, planner.predict(fit, rows)))
    print("each model, predicted by a fit to the others" if len(models) > 1 else "the rows that were fitted")
    print_cells([row for row, _ in judged], [predicted for _, predicted in judged])
    kinds = defaultdict(list)
    for row, (speed, _, kind) in judged:
        kinds[kind].append(speed / row["speed"])  # seconds: measured / predicted
    ranges = {}
    print("\nmeasured / predicted seconds     layouts    10 %    50 %    90 %")
    for kind, ratios in sorted(kinds.items()):
        low, middle, high = (quantile(ratios, share) for share in (0.1, 0.5, 0.9))
        print(f"{kind:32} {len(ratios):7} {low:7.2f} {middle:7.2f} {high:7.2f}")
        ranges[kind] = [round(low, 3), round(high, 3)]
    fit["memory_bytes"] = statistics.median(
        bytes_ / row["bytes"] for row, (_, bytes_, _) in judged if row["bytes"] and row["pp"] == "1"
    )
    fit = {name: float(f"{value:.3g}") for name, value in fit.items()}
    profile = planner.profile(fit)
    profile["framework"]["ranges"] = ranges
    lines = [f' "{name}": {json.dumps(value)}' for name, value in profile.items()]
    pathlib.Path(to).write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(
        f"\n{to}, shares of {gpu} and seconds: "
        + ", ".join(f"{name} {value:g}" for name, value in fit.items())
    )


if __name__ == "__main__":
    if len(sys.argv) != 5:
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except (Refused, OSError) as error:
        print(f"calibrate: {error}", file=sys.stderr)
        sys.exit(2)
