"""The planner's fastest layouts, run:  python sweep.py CSV PLAN PROGRAM GPUS OPTIONS...

GPUS: how many ranks. OPTIONS are those of 07: --model, --seq-len, --global-batch-size ...; with --dry-run in
virtual time, folded: only the ranks that differ are there. Each layout is a row of CSV as soon as it has run.
A sweep that is interrupted goes on where it was: a row that is there is not run again."""

import csv
import os
import pathlib
import subprocess
import sys
import tempfile

import runs as logs

COLUMNS = ["model", "gpus", "options", "layout", "predicted_seconds", "seconds", "tokens_per_second", "predicted_bytes", "bytes",
           "status"]  # fmt: skip
LAYOUTS, TRIES, STEPS = 10, 3, 4
LIMIT = int(os.environ.get("SWEEP_LIMIT", 300))  # seconds of one run


def rows_of(path):
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    if rows and list(rows[0]) != COLUMNS:
        raise logs.Refused(f"{path}: expected the columns {','.join(COLUMNS)}; is it another file?")
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
    row = dict.fromkeys(COLUMNS, "")
    row |= {
        "gpus": gpus,
        "options": " ".join(words),
        "layout": plan["layout"],
        "predicted_seconds": plan["step_seconds"],
    }
    row["predicted_bytes"] = plan["tensor_bytes"]
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
        row["tokens_per_second"] = run.steps[0]["tokens"] / row["seconds"] / run.ranks
        row["bytes"] = max(sum(rank["measured"].values()) for rank in run.summary["memory"])
    return row


def main(path, plan, program, gpus, *words):
    path, options = pathlib.Path(path), " ".join(words)
    there = {(row["gpus"], row["options"], row["layout"]) for row in rows_of(path)}
    shape = [word for word in words if word != "--dry-run"]
    found = logs.planned(plan, "--json", *shape, "--gpus", gpus, "--top", LAYOUTS)
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if file.tell() == 0:
            writer.writeheader()
        for number, layout in enumerate(found["layouts"], 1):
            if (gpus, options, layout["layout"]) in there:
                print(f"{number:2}  {layout['layout']}: has run")
                continue
            row = {**row_of(program, gpus, list(words), layout), "model": found["model"]}
            writer.writerow(row)
            file.flush()
            result = f"{1e3 * row['seconds']:.1f} ms" if row["seconds"] else row["status"]
            print(
                f"{number:2}  {layout['layout']}: predicted {1e3 * layout['step_seconds']:.1f} ms, {result}",
                flush=True,
            )
    print(f"{path}: make report shows it")


if __name__ == "__main__":
    logs.end_in_one_line(main, *sys.argv[1:])
