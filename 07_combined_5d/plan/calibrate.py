"""Fits a GPU's profile to measured steps of another framework, and judges the fit.

    python calibrate.py PLAN SWEEP.csv GPU TO.json [OPTIONS...]

SWEEP is a table that plan --rows reads (README.md); OPTIONS hold for all its rows. GPU is a profile
(common/clock/profiles) with the facts of the framework, such as a100-megatron; TO is the same one with numbers
that were fitted: shares of bandwidths and rates, and seconds of the host and the network for an operation. PLAN
predicts each row by its coarse time (coarse.h). What is made small is the mean of |log(measured / predicted)|, of
which each row gives 0.5 at most, so that stalls which no number explains do not decide. A row that is fast, or is
believed to be, counts most: up to five times as much as a slow one. One number after the other is made larger or
smaller, while that helps. Of many rows every n-th of a group is fitted, so that a fit takes a minute.

If there are several models, each is predicted by a fit to the others, too. These errors, not those of the
final fit, are printed, and are the profile's ranges. TO=- judges GPU as it is: nothing is fitted."""

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
    "memory_achievable": 0.8,
    "product_achievable": 0.9,
    "link_bandwidth": 0.9,
    "network_bandwidth": 0.8,
}
PLAIN = {
    "launch_seconds": 4e-5,
    "collective_seconds": 1e-4,
    "message_seconds": 1e-4,
    "network_latency": 5e-5,
    "contention": 0.1,
}
ROUNDS, LARGEST, FITTED_ROWS = 5, 0.5, 160
HOLDS = 0.002  # what it costs to make a number e times as large or small: one that explains nothing stays
SIZES = ("model", "config", "layers", "d-model", "heads", "d-ff", "experts")
PROFILES = pathlib.Path(__file__).parents[2] / "common/clock/profiles"


class Refused(Exception):
    pass


class Planner:
    def __init__(self, plan, gpu, folder, table, options):
        self.plan, self.folder, self.table, self.options = plan, folder, table, options
        self.facts = json.loads((PROFILES / f"{gpu}.json").read_text())
        self.base = self.facts.get("as", gpu)
        self.own = json.loads((PROFILES / f"{self.base}.json").read_text())
        self.given = gpu

    def profile(self, fit):
        """The GPU with the framework's facts, and these shares and seconds."""
        fitted = {
            name: {
                "value": float(f"{number * self.own[name]['value'] if name in SHARES else number:.4g}"),
                "source": "make calibrate",
            }
            for name, number in fit.items()
        }
        facts = {name: value for name, value in self.facts.items() if name not in ("name", "ranges")}
        return facts | {"as": self.base, **fitted}

    def predict(self, fit, rows):
        """What the planner says of each row; fit None: of the GPU as it is, and of the whole table."""
        profile, table = self.folder / "gpu.json", self.folder / "rows.csv"
        if fit is None:
            profile, table = self.given, self.table
        else:
            profile.write_text(json.dumps(self.profile(fit)))
            lines = lines_of(self.table)
            table.write_text("".join(lines[n - 1] + "\n" for n in [1] + [row["line"] for row in rows]))
        done = subprocess.run([self.plan, "--gpu", profile, *self.options, "--rows", table], capture_output=True, text=True)  # fmt: skip
        if done.returncode != 0:
            raise Refused(done.stderr.strip().splitlines()[-1])
        predicted = [json.loads(line) for line in done.stdout.splitlines()]
        if fit is not None:
            return predicted
        print(done.stderr, end="")
        for row in rows:
            if "refusal" in predicted[row["line"] - 2]:
                raise Refused(f"{self.table}, row {row['line']}: {predicted[row['line'] - 2]['refusal']}")
        return [predicted[row["line"] - 2] for row in rows]

    def loss(self, fit, rows):
        pairs = [(row["weight"], plan["seconds"] / row["seconds"], row["share"])
                 for row, plan in zip(rows, self.predict(fit, rows))]  # fmt: skip
        errors = [weight * min(1, 0.2 + 0.8 * max(share, share / ratio)) * min(abs(math.log(ratio)), LARGEST)
                  for weight, ratio, share in pairs]  # fmt: skip
        moves = sum(abs(math.log(fit[name] / number)) for name, number in {**SHARES, **PLAIN}.items())
        return statistics.mean(errors) + HOLDS * moves

    def fit(self, rows):
        rows = thinned(rows)
        fit = {**SHARES, **PLAIN}
        best, factors = self.loss(fit, rows), dict.fromkeys(fit, 1.5)
        for _ in range(ROUNDS):
            for name in fit:
                for factor in (factors[name], 1 / factors[name]):
                    moved = False
                    while name in PLAIN or fit[name] * factor <= 1.2:
                        tried = {**fit, name: fit[name] * factor}
                        now = self.loss(tried, rows)
                        if now > best - 1e-5:
                            break
                        fit, best, moved = tried, now, True
                    if moved:
                        break
                else:
                    factors[name] **= 0.5
        # Where memory was measured: the GPU has as much less as their runs keep more.
        kept = [row["memory"] / 1e9 / float(row["memory_gb"]) for row in rows
                if float(row.get("memory_gb") or 0) > 0 and row.get("pp", "1") == "1"]  # fmt: skip
        return fit | (
            {"memory_bytes": statistics.median(kept) * self.own["memory_bytes"]["value"]} if kept else {}
        )


def thinned(rows):
    """Every n-th of the rows, by their model; each model counts the same, whatever its number of rows."""
    kept = [row for of_model in by(rows, "model").values()
            for row in of_model[:: max(1, math.ceil(len(of_model) * len(by(rows, "model")) / FITTED_ROWS))]]  # fmt: skip
    sizes = {model: len(of_model) for model, of_model in by(kept, "model").items()}
    for row in kept:
        row["weight"] = len(kept) / len(sizes) / sizes[row["model"]]
    return kept


def by(rows, key):
    groups = defaultdict(list)
    for row in rows:
        groups[row[key]].append(row)
    return groups


def quantile(values, share):
    values = sorted(values)
    return values[round(share * (len(values) - 1))]


def rank_correlation(xs, ys):
    def ranks(values):
        return [sorted(values).index(value) for value in values]

    return statistics.correlation(ranks(xs), ranks(ys)) if len(set(xs)) > 1 < len(set(ys)) else 1


def judge(rows):
    """Prints how good the predictions of these rows are: means over groups of a model, GPUs and a batch."""
    head = (
        "model, GPUs                 groups  rows   mean error  its size  correlation  the worst  picked/best"
    )
    print(head)
    judged = defaultdict(list)
    for group in by(rows, "group").values():
        ratios = [row["predicted"] / row["seconds"] - 1 for row in group]
        pick = min(group, key=lambda row: (row["bytes"] > row["has"], row["predicted"]))  # it must fit
        order = [[row[key] for row in group] for key in ("predicted", "seconds")]
        entry = (len(group), statistics.mean(ratios), statistics.mean(map(abs, ratios)),
                 rank_correlation(*order) if len(group) > 3 else None, min(order[1]) / pick["seconds"])  # fmt: skip
        where = "64 GPUs or more" if group[0]["gpus"] >= 64 else "fewer GPUs"
        for name in (f"{group[0]['model'][:20]} {group[0]['gpus']:5}", where, "all"):
            judged[name].append(entry)
    for name in sorted(judged, key=lambda name: (name in ("64 GPUs or more", "fewer GPUs", "all"), name)):
        counts, means, sizes, correlations, picks = zip(*judged[name])
        known = [c for c in correlations if c is not None] or [math.nan]
        print(f"{name:27} {len(counts):6} {sum(counts):5} {100 * statistics.mean(means):+10.1f} % {100 * statistics.mean(sizes):7.1f} % "
              f"{statistics.mean(known):12.2f} {min(known):10.2f} {statistics.mean(picks):12.3f}")  # fmt: skip


def lines_of(path):
    """As plan --rows counts them."""
    return pathlib.Path(path).read_text("utf-8-sig", errors="replace").replace("\r", "").split("\n")


def read_rows(path):
    """The measured rows, and those that were out of memory."""
    if not pathlib.Path(path).is_file():
        raise Refused(f"{path} is no file")
    lines = lines_of(path)
    rows, oom = [], []
    for number, row in enumerate(csv.DictReader(lines), 2):
        said = row.get("seconds") or row.get("tokens_per_second_per_gpu") or ""
        if said == "":  # it did not run, for another reason
            continue
        try:
            row = {name: row[name] for name in row if name} | {
                "line": number,
                "gpus": int(row["gpus"]),
                "measured": said,
            }
            if said != "oom" and float(said) <= 0:
                continue
            if not all(math.isfinite(float(x)) for x in (said, row.get("memory_gb") or 0) if x != "oom"):
                raise ValueError
        except (KeyError, ValueError):
            raise Refused(f"{path}, row {number}: expected gpus, and seconds or tokens_per_second_per_gpu: a number or oom; memory_gb is a number, too") from None  # fmt: skip
        row["model"] = " ".join(row[name] for name in SIZES if row.get(name)) or "as said"
        (oom if said == "oom" else rows).append(row)
    if len(rows) < 20:
        raise Refused(
            f"{path}: {len(rows)} rows with seconds or tokens_per_second_per_gpu; expected 20 or more"
        )
    return rows, oom


def complete(planner, rows):
    """The seconds of each row, its group, and its share of the best speed there."""
    for row, plan in zip(rows, planner.predict(None, rows)):
        said = float(row["measured"])
        row["seconds"] = said if row.get("seconds") else plan["tokens"] / said / row["gpus"]
        row["group"], row["memory"] = (row["model"], row["gpus"], plan["batch"]), plan["memory"]
    for group in by(rows, "group").values():
        best = min(row["seconds"] for row in group)
        for row in group:
            row["share"] = best / row["seconds"]


def use(planner, fit, rows):
    for row, plan in zip(rows, planner.predict(fit, rows)):
        row |= {
            "predicted": plan["seconds"],
            "kind": plan["kind"],
            "bytes": plan["memory"],
            "has": plan["has"],
        }


def judge_memory(rows, oom):
    fits = [row["bytes"] <= row["has"] for row in rows]
    refuses = [row["bytes"] > row["has"] for row in oom]
    print(f"memory: {sum(fits) + sum(refuses)} of {len(fits) + len(refuses)} verdicts right, {len(fits) - sum(fits)} false refusals, "
          f"{len(refuses) - sum(refuses)} false hopes")  # fmt: skip


def main(plan, sweep, gpu, to, *options):
    if not sweep:
        raise Refused("SWEEP: value missing; expected a file of measured steps")
    if not (PROFILES / f"{gpu}.json").is_file():
        raise Refused(f"GPU: {gpu} is not valid; expected a name in common/clock/profiles")
    rows, oom = read_rows(sweep)
    with tempfile.TemporaryDirectory() as folder:
        planner = Planner(plan, gpu, pathlib.Path(folder), pathlib.Path(sweep), options)
        complete(planner, rows)
        models = by(rows, "model")
        if to == "-":
            use(planner, None, rows)
            print(f"{gpu} as it is: these rows have changed no number here")
        elif len(models) > 1:
            for model, these in models.items():
                use(planner, planner.fit([row for row in rows if row["model"] != model]), these)
            print("each model, predicted by a fit to the others")
        fit = None if to == "-" else planner.fit(rows)
        if to != "-" and len(models) == 1:
            use(planner, fit, rows)
            print("the rows that were fitted")
        use(planner, fit, oom) if oom else None
    judge(rows)
    judge_memory(rows, oom)
    kinds, ranges = by(rows, "kind"), {}
    print("\nmeasured / predicted seconds     layouts    10 %    50 %    90 %")
    for kind in sorted(kinds):
        ratios = [row["seconds"] / row["predicted"] for row in kinds[kind]]
        low, middle, high = (quantile(ratios, share) for share in (0.1, 0.5, 0.9))
        print(f"{kind:32} {len(ratios):7} {low:7.2f} {middle:7.2f} {high:7.2f}")
        ranges[kind] = [round(low, 3), round(high, 3)]
    if to == "-":
        return
    fit = {name: float(f"{value:.3g}") for name, value in fit.items()}
    profile = planner.profile(fit)
    profile["ranges"] = ranges
    lines = [f' "{name}": {json.dumps(value)}' for name, value in profile.items()]
    pathlib.Path(to).write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(
        f"\n{to}, shares of {planner.base} and seconds: "
        + ", ".join(f"{name} {value:g}" for name, value in fit.items())
    )


if __name__ == "__main__":
    if len(sys.argv) < 5:
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except (Refused, OSError, csv.Error) as error:
        print(f"calibrate: {error}", file=sys.stderr)
        sys.exit(2)
