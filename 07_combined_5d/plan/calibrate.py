"""Fits the numbers of a style (styles/) to measured steps:  python calibrate.py PLAN SWEEP.csv STYLE TO.json

SWEEP has the columns of plan --score, tokens_per_second_per_gpu and memory_gb. STYLE says what the framework does or does not
do, and what one operation costs its host; its fitted numbers are not read. Memory is fitted first, to the rows without a
pipeline, whose ranks are all alike. Then the times: the mean of |log(measured / predicted)|, of which each row gives 1.5 at most, so
that stalls which no number explains do not decide. A row that is fast, or is believed to be, counts most: up to five times as
much as a slow one. One number after the other is made larger or smaller, while that helps.

If there are several models, each is predicted by a fit to the others, too. These errors, not those of the final fit, are
printed, and are the style's ranges."""

import csv
import json
import math
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict

# Where the fit begins.
MEMORY = {"activations": 1.5, "logits_bytes": 8}
TIMES = {"memory_share": 0.5, "product_share": 0.8, "link_share": 0.9, "network_share": 0.7,
         "crossing_seconds": 1e-4, "collective_seconds": 2e-4, "pipelined_seconds": 1e-4,
         "full_memory": 0.9, "retry_seconds": 0.3}  # fmt: skip
MOST = {name: 1.2 for name in TIMES if name.endswith("_share") or name == "full_memory"}
COLUMNS = "model nodes mbs grad_acc dp pp tp zero tokens_per_second_per_gpu memory_gb".split()
ROUNDS, LARGEST = 6, 1.5


class Refused(Exception):
    pass


class Planner:
    def __init__(self, plan, folder):
        self.plan, self.folder = plan, folder

    def predict(self, style, rows):
        """(tokens/s a GPU, bytes, kind) of each row."""
        style_file, rows_file, kinds = (self.folder / name for name in ("style.json", "rows.csv", "kinds.json"))
        style_file.write_text(json.dumps(style))
        lines = [",".join(COLUMNS[:8])] + [",".join(row[name] for name in COLUMNS[:8]) for row in rows]
        rows_file.write_text("\n".join(lines) + "\n")
        done = subprocess.run(
            [self.plan, "--style", style_file, "--score", rows_file, "--json", kinds], capture_output=True, text=True
        )
        if done.returncode != 0:
            raise Refused(done.stderr.strip())
        answers = list(csv.reader(done.stdout.splitlines()))[1:]
        bad = next((answer for answer in answers if not answer[-1]), None)
        if bad:
            raise Refused(f"{','.join(bad[:8])}: {bad[-2]}")
        numbers = [(float(answer[-2]), float(answer[-1])) for answer in answers]
        return [(*pair, kind) for pair, kind in zip(numbers, json.loads(kinds.read_text())["kinds"])]

    def time_loss(self, style, rows):
        predicted = self.predict(style, rows)
        best = defaultdict(float)
        for row in rows:
            best[row["model"], row["nodes"]] = max(best[row["model"], row["nodes"]], row["speed"])
        losses = []
        for p, row in zip(predicted, rows):
            weight = min(1, 0.2 + 0.8 * max(p[0], row["speed"]) / best[row["model"], row["nodes"]])
            losses.append(weight * min(abs(math.log(p[0] / row["speed"])), LARGEST))
        return sum(losses) / len(losses)

    def memory_loss(self, style, rows):
        rows = [row for row in rows if row["bytes"] > 0]
        rows = [row for row in rows if row["pp"] == "1"] or rows
        if not rows:
            return 0
        predicted = self.predict(style, rows)
        return sum(min(abs(math.log(p[1] / r["bytes"])), LARGEST) for p, r in zip(predicted, rows)) / len(rows)

    def descend(self, style, rows, names, loss):
        best, factors = loss(style, rows), {name: 1.5 for name in names}
        for _ in range(ROUNDS):
            for name in names:
                for factor in (factors[name], 1 / factors[name]):
                    moved = False
                    while style[name] * factor <= MOST.get(name, math.inf):
                        tried = {**style, name: style[name] * factor}
                        now = loss(tried, rows)
                        if now > best - 1e-5:
                            break
                        style, best, moved = tried, now, True
                    if moved:
                        break
                else:
                    factors[name] **= 0.5
        return style

    def fit(self, style, rows):
        style = self.descend(style, rows, MEMORY, self.memory_loss)
        return self.descend(style, rows, TIMES, self.time_loss)


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
        print(f"{model:>8} {nodes:5} {len(pairs):10} {shares[-1]:12.3f} {correlations[-1]:12.2f} {100 * error:11.1f} %")
    errors = [abs(row["speed"] / speed - 1) for row, (speed, _, _) in zip(rows, predicted)]
    print(f"mean of picked/best {sum(shares) / len(shares):.3f}, worst {min(shares):.3f}; correlation "
          f"{sum(correlations) / len(correlations):.2f}; median error {100 * quantile(errors, 0.5):.1f} %")  # fmt: skip


def read_rows(path):
    try:
        rows = list(csv.DictReader(pathlib.Path(path).read_text().splitlines()))
        if len(rows) < 20 or any(row.get(name) is None for row in rows for name in COLUMNS):
            raise Refused(f"{path}: expected 20 rows or more, with the columns {','.join(COLUMNS)}")
        for row in rows:
            row["speed"], row["bytes"] = float(row["tokens_per_second_per_gpu"]), 1e9 * float(row["memory_gb"] or 0)
    except (OSError, ValueError) as error:
        raise Refused(f"{path}: {error}") from None
    return [row for row in rows if row["speed"] > 0]


def main(plan, sweep, style, to):
    rows = read_rows(sweep)
    try:
        start = json.loads(pathlib.Path(style).read_text())
    except (OSError, ValueError) as error:
        raise Refused(f"{style}: {error}") from None
    start = {**start, **MEMORY, **TIMES, "ranges": {}}
    with tempfile.TemporaryDirectory() as folder:
        planner = Planner(plan, pathlib.Path(folder))
        models = sorted({row["model"] for row in rows})
        judged = []
        for model in models if len(models) > 1 else []:
            fitted = planner.fit(start, [row for row in rows if row["model"] != model])
            these = [row for row in rows if row["model"] == model]
            judged += zip(these, planner.predict(fitted, these))
        final = planner.fit(start, rows)
        judged = judged or list(zip(rows, planner.predict(final, rows)))
    print("each model, predicted by a fit to the others" if len(models) > 1 else "the rows that were fitted")
    print_cells([row for row, _ in judged], [predicted for _, predicted in judged])
    kinds = defaultdict(list)
    for row, (speed, _, kind) in judged:
        kinds[kind].append(speed / row["speed"])  # seconds: measured / predicted
    final["ranges"] = {}
    print("\nmeasured / predicted seconds     layouts    10 %    50 %    90 %")
    for kind, ratios in sorted(kinds.items()):
        low, middle, high = (quantile(ratios, share) for share in (0.1, 0.5, 0.9))
        print(f"{kind:32} {len(ratios):7} {low:7.2f} {middle:7.2f} {high:7.2f}")
        final["ranges"][kind] = [round(low, 3), round(high, 3)]
    for name in {**MEMORY, **TIMES}:
        final[name] = float(f"{final[name]:.3g}")
    pathlib.Path(to).write_text(json.dumps(final, indent=1) + "\n")
    print(f"\n{to}: " + ", ".join(f"{name} {final[name]:g}" for name in {**MEMORY, **TIMES}))


if __name__ == "__main__":
    if len(sys.argv) != 5:
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except (Refused, OSError) as error:
        print(f"calibrate: {error}", file=sys.stderr)
        sys.exit(2)
