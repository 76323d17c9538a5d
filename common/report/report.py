"""One page about runs:  python report.py PAGE BUILDS PLAN FOLDER|FILE...

PAGE is written: an HTML file that has all it needs. BUILDS has 07_combined_5d in cpu-bf16 and cpu-fp32;
cpu-bf16 has plan, too, and what lessons.py --table has run. PLAN are options of plan, for the calculator and
the heatmap. FILEs are logs (--log-json), and a FOLDER means those in it. A run with --trace has its timeline
drawn, too.

report.py PAGE --told TEXT FILE...: a learner's page. It begins with the lines of the file TEXT, and needs no
builds."""

import concurrent.futures
import csv
import html
import json
import pathlib
import string
import sys
import tempfile

import altair as alt
import vl_convert

import figures
import lessons
import planner
import runs as logs
import traces

# Of each figure what it shows, and how to read it.
SECTIONS = {
    "losses": (
        "Loss and gradient norm",
        "All runs of one training should have the same loss and the same gradient norm at every step. On the "
        "right stands how far each run is from the first one. The axis is logarithmic: fp32 is exact to about 1e-7. "
        "A difference of zero is drawn at 1e-17. Under a run's name is its line; its box hides it. Solid lines have circles "
        "on the right, dashed ones squares, dotted ones triangles.",
    ),
    "memory": (
        "Memory",
        "What a rank's memory was used for at its peak: above as predicted before the run, below as measured. "
        "Of the fullest rank.",
    ),
    "speed": (
        "Messages and time",
        "What a rank sends in a step, how long a step takes, and the share of communication during which "
        "something was computed. Without a GPU all times are modelled.",
    ),
    "timeline": (
        "Timeline of one step",
        "Each row is a stream of a rank, and only one operation at a time runs on it. On the compute stream a bar is a "
        "layer's pass; on the others it is one message or collective. Zoom with the sliders, or with the mouse wheel.",
    ),
    "pipeline": (
        "Pipeline schedules",
        "Each bar is a micro-batch that passes through a rank's layers; in the empty parts a rank waits. First the run as it was, "
        "then other schedules of the same run in virtual time.",
    ),
    "calculator": (
        "Memory of a layout",
        "Choose a layout, and see what memory a rank needs. The dashed line is the memory of one GPU. The numbers are those "
        "that the program predicts, less what pads shards to equal sizes (below 0.01 GiB). The title is the command that prints "
        "them. A step has 8 micro-batches. Of data ranks there may be any number.",
    ),
    "heatmap": (
        "The fastest layouts",
        "The planner tries every layout of every model on every number of GPUs. Each cell shows the best by its coarse time: the "
        "share of the GPU's speed that the model's FLOPs use (MFU), and the layout. {global_batch_size} sequences of {seq_len} "
        "tokens a step. PLAN of make report has other wishes, for the memory of a layout, too.",
    ),
    "sweep": (
        "Predicted and measured",
        "The layouts that make sweep has run: the time that the planner predicts, and the time that a step took.",
    ),
}
SPLIT = ("zb-h1", "zb-v", "dualpipe", "dualpipe-v")  # schedules that put weight gradients off
SCHEDULES = ("afab", "1f1b", "interleaved", *SPLIT)
# What another schedule leaves as it was.
KEPT = (
    "layers d-model heads kv-heads d-ff vocab-size data seq-len micro-batch-size global-batch-size recompute attention "
    "zero-stage shard-ranks sequence-parallel experts top-k gpu ranks ranks-per-node link"
).split()


def issued(builds, run, schedule):
    """The pipeline of the run with another schedule, in virtual time; nothing where it can not have this
    schedule."""
    with tempfile.TemporaryDirectory() as folder:
        trace = pathlib.Path(folder, "trace")
        program = builds / ("cpu-bf16" if run.precision == "bf16" else "cpu-fp32") / "07_combined_5d"
        words = ["--steps", 2, "--dry-run", "--trace", trace, "--pp-schedule", schedule]
        words += ["--vpp", 2] if schedule == "interleaved" else []
        for axis, degree in run.summary["layout"].items():
            words += ["--" + axis, degree]
        for name, value in run.options.items():
            if name in KEPT and value not in ("", False):
                words += ["--" + name] + ([value] if value is not True else [])
        try:
            all_there = run.there == run.ranks
            command = (
                ["mpirun", "-n", run.ranks, program, *words] if all_there else logs.folded(program, *words)
            )
            logs.output_of(*command)
        except logs.Refused:
            return []
        return traces.pipeline(trace, schedule in SPLIT)


def trace_of(run):
    """The path of its trace, None if it has none any more."""
    path = pathlib.Path(run.options.get("trace") or "/nowhere")
    return path if path.is_file() else None


def timelines(runs):
    return [
        {"run": run.label, **bar} for run in runs if trace_of(run) for bar in traces.timeline(trace_of(run))
    ]


def pipelines(runs, builds):
    bars = []
    for run in runs:
        if run.summary["layout"].get("pp", 1) == 1 or not trace_of(run):
            continue
        ran = run.options["pp-schedule"]
        bars += [
            {"run": run.label, "schedule": f"{ran}, as it ran", **bar}
            for bar in traces.pipeline(trace_of(run), ran in SPLIT)
        ]
        for schedule in SCHEDULES:
            if schedule != ran:
                bars += [
                    {"run": run.label, "schedule": schedule, **bar} for bar in issued(builds, run, schedule)
                ]
    return bars


def swept(path):
    """The runs of sweep.csv that ended well."""
    if not path.is_file():
        return []
    with path.open() as file:
        return [
            {
                "model": row.get("model") or row.get("config") or "a model",
                "gpus": int(row["gpus"]),
                "layout": row["layout"],
                "predicted": 1e3 * float(row["predicted_seconds"]),
                "measured": 1e3 * float(row["seconds"]),
            }
            for row in csv.DictReader(file)
            if row["status"] == "ok"
        ]


def table(rows):
    """Of rows of words; one that is alone is the heading of those that follow."""

    def row(words, tag, scope):
        first, *rest = map(html.escape, words)
        if not rest:
            return f'<tr><th colspan="{len(rows[0])}" scope="rowgroup">{first}</th></tr>'
        cells = "".join(f"<{tag}>{word}</{tag[:2]}>" for word in rest)
        return f'<tr><th scope="{scope}">{first}</th>{cells}</tr>'

    return row(["run", *rows[0][1:]], 'th scope="col"', "col") + "".join(
        row(words, "td", "row") for words in rows[1:]
    )


def real_sizes(builds):
    """The rows of what make run counts at a real size, from its logs."""
    folder = builds / "cpu-bf16" / "lessons"
    of = lessons.Lessons(pathlib.Path(__file__).parents[2] / "tests" / "lessons.txt")
    return lessons.table(
        of, {name: logs.Run(folder / f"{name}.jsonl") for name in of.names(of.texts_of_rows())}
    )


def first_section(builds):
    """What techniques buy and cost."""
    return f"""<section id="real">
<h2 id="real-title">What a technique buys and costs</h2>
<p>{lessons.HOW_TO_READ}</p>
<div class="wide" tabindex="0" role="region" aria-labelledby="real-title">
<table><caption>Layouts of one training at a real size.</caption>{table(real_sizes(builds))}</table>
</div>
</section>"""


def charts_of_runs(runs):
    """The figures that need nothing but logs and traces."""
    computed = [run for run in runs if not run.is_dry]
    every = {
        "losses": computed and figures.losses(computed),
        "memory": figures.memory(runs),
        "speed": figures.speed(runs),
    }
    bars = timelines(runs)
    every["timeline"] = bars and figures.timeline(bars)
    return every


def charts(runs, builds, given, sweep):
    # The planner searches for many seconds: meanwhile the rest is drawn.
    asked, others = planner.options_of(given, {"gpus": 128, "seq-len": 4096, "global-batch-size": 512})
    SECTIONS["heatmap"] = SECTIONS["heatmap"][0], SECTIONS["heatmap"][1].format_map(vars(asked))
    words = ["--seq-len", asked.seq_len, "--global-batch-size", asked.global_batch_size, *others]
    pool, plan = concurrent.futures.ThreadPoolExecutor(), builds / "cpu-bf16" / "plan"
    searched = pool.submit(planner.heatmap, plan, asked.gpus, *words)
    every = charts_of_runs(runs)
    bars = pipelines(runs, builds)
    every["pipeline"] = bars and figures.pipeline(bars)
    every["calculator"] = figures.calculator(planner.calculator(plan, *words))
    every["heatmap"] = figures.heatmap(searched.result())
    every["sweep"] = sweep and figures.sweep(sweep)
    return every


def write_page(path, title, first, runs, every):
    # A screen reader says the description.
    shown = {name: {**chart, "description": SECTIONS[name][1]} for name, chart in every.items() if chart}
    sections = "".join(
        f'<section id="{name}"><h2>{SECTIONS[name][0]}</h2><p>{SECTIONS[name][1]}</p><div class="figure" tabindex="0"></div></section>\n'
        for name in shown
    )
    links = "".join(f'<a href="#{name}">{SECTIONS[name][0]}</a>' for name in shown)
    # The choices of the losses are their legend: under the name of a run stands its line.
    looks = "\n".join(
        f"#losses .vega-bind:nth-child({len(figures.LOOKS)}n + {i}):has(input:checked) {{ border-bottom: 4px {dash} {color}; }}"
        for i, (dash, color) in enumerate(figures.LOOKS, 1)
    )
    version = ".".join(alt.SCHEMA_VERSION.lstrip("v").split(".")[:2])
    template = string.Template(pathlib.Path(__file__).with_name("page.html").read_text())
    text = template.substitute(
        links=links,
        looks=looks,
        title=title,
        first=first,
        table=table(logs.table(runs)),
        sections=sections,
        library=vl_convert.javascript_bundle(vl_version=version),
        figures=json.dumps(shown, separators=(",", ":")).replace("</", "<\\/"),
    )
    path.write_text(text)


def main(page, builds, given, *paths):
    if builds == "--told":
        runs, text = logs.runs_of(paths), html.escape(pathlib.Path(given).read_text())
        every = charts_of_runs(runs)
        del every["timeline"]
        for number, run in enumerate(runs):  # one below the other
            SECTIONS[f"timeline-{number}"] = f"One step: {run.label}", SECTIONS["timeline"][1]
            every[f"timeline-{number}"] = figures.timeline(timelines([run]))
        first = f'<pre style="white-space: pre-wrap">{text}</pre>'
        return write_page(pathlib.Path(page), pathlib.Path(page).stem, first, runs, every)
    runs = logs.runs_of(paths)
    sweep = swept(pathlib.Path(page).parent / "sweep.csv")
    builds = pathlib.Path(builds)
    write_page(
        pathlib.Path(page), "report", first_section(builds), runs, charts(runs, builds, given.split(), sweep)
    )
    print(f"{page}: {len(runs)} runs; open it in a browser")


if __name__ == "__main__":
    logs.end_in_one_line(main, *sys.argv[1:])
