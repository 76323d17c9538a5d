"""The planner's fastest layouts, run:  python sweep.py CSV PLAN PROGRAM GPUS OPTIONS...

GPUS: how many ranks. OPTIONS are those of 07: --model, --seq-len, --global-batch-size ...; with --dry-run in
virtual time, folded: only the ranks that differ are there. Each layout is a row of CSV as soon as it has run: its
columns are options of 07, and what was measured, as make calibrate and plan --rows read them. A sweep that is
interrupted goes on where it was: a row that is there is not run again."""

import csv
import os
import pathlib
import subprocess
import sys
import tempfile

import runs as logs

LAYOUT = ["tp", "cp", "dp", "pp", "ep", "zero-stage", "shard-ranks", "micro-batch-size", "pp-schedule", "vpp", "sequence-parallel",
          "recompute", "attention"]  # fmt: skip
MEASURED = ["layout", "predicted_seconds", "seconds", "predicted_gb", "memory_gb", "status"]
LAYOUTS, TRIES, STEPS = 10, 3, 4
LIMIT = int(os.environ.get("SWEEP_LIMIT", 300))  # seconds of one run


def cells_of(words):
    """Options as the cells of a row: --tp 2 --sequence-parallel is {"tp": "2", "sequence-parallel": "true"}."""
    cells, words = {}, [word for word in map(str, words) if word != "--dry-run"]
    for word, following in zip(words, [*words[1:], "--"]):
        if word.startswith("--"):
            cells[word[2:]] = "true" if following.startswith("--") else following
    return cells


def rows_of(path, columns):
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    if rows and list(rows[0]) != columns:
        raise logs.Refused(f"{path}: expected the columns {','.join(columns)}; is it of other options?")
    return rows


def measured(command, log):
    """(the log, what went wrong): the run of this command, or None. Ends all its ranks when it takes too
    long."""
    process = subprocess.Popen(
        list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        errors = process.communicate(timeout=LIMIT)[1].strip().splitlines()
    except subprocess.TimeoutExpired:
        return None, f"not finished after {LIMIT} s"
    finally:
        if process.poll() is None:  # mpirun ends its ranks when it is asked to end
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
    if process.returncode != 0:
        return None, (errors or [f"status {process.returncode}"])[0][:200]
    return logs.Run(log), "ok"


def row_of(program, gpus, words, plan):
    """The row of one layout. The first steps, in which a GPU warms up, do not count."""
    row = {"gpus": gpus, **cells_of(words), **cells_of(plan["options"]), "layout": plan["layout"]}
    row |= {"predicted_seconds": plan["step_seconds"], "predicted_gb": plan["tensor_bytes"] / 1e9}
    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder, "log.jsonl")
        command, is_dry = (
            [program, *words, *plan["options"], "--steps", STEPS, "--log-json", log],
            "--dry-run" in words,
        )
        for _ in range(TRIES):
            try:
                started = (
                    logs.folded(*command, "--ranks", gpus) if is_dry else ["mpirun", "-n", gpus, *command]
                )
                run, row["status"] = measured(started, log)
            except logs.Refused as refused:
                run, row["status"] = None, str(refused)
            if run or row["status"].startswith("not finished"):
                break
    if run:
        times = sorted((step.get("modelled") or step)["seconds"] for step in run.steps[1:])
        row["seconds"] = times[len(times) // 2]
        row["memory_gb"] = max(sum(rank["measured"].values()) for rank in run.summary["memory"]) / 1e9
    elif row["status"].startswith("memory:"):
        row["seconds"] = "oom"
    return row


def main(path, plan, program, gpus, *words):
    path = pathlib.Path(path)
    columns = [name for name in ["gpus", *cells_of(words)] if name not in LAYOUT] + LAYOUT + MEASURED
    key = [name for name in columns if name not in MEASURED or name == "layout"]
    there = [[row[name] for name in key] for row in rows_of(path, columns)]
    shape = [word for word in words if word != "--dry-run"]
    found = logs.planned(plan, "--json", *shape, "--gpus", gpus, "--top", LAYOUTS)
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns)
        if file.tell() == 0:
            writer.writeheader()
        for number, layout in enumerate(found["layouts"], 1):
            cells = {
                "gpus": gpus,
                **cells_of(words),
                **cells_of(layout["options"]),
                "layout": layout["layout"],
            }
            if [cells.get(name, "") for name in key] in there:
                print(f"{number:2}  {layout['layout']}: has run")
                continue
            row = row_of(program, gpus, list(words), layout)
            writer.writerow(row)
            file.flush()
            result = f"{1e3 * row['seconds']:.1f} ms" if row["status"] == "ok" else row["status"]
            print(
                f"{number:2}  {layout['layout']}: predicted {1e3 * layout['step_seconds']:.1f} ms, {result}",
                flush=True,
            )
    print(f"{path}: make report shows it")


if __name__ == "__main__":
    logs.end_in_one_line(main, *sys.argv[1:])
