"""The figures of the report: each function returns the JSON of a Vega-Lite chart. What a figure computes after a choice,
it computes as an expression of Vega; a choice is an element of the page that a keyboard can work."""

import json

import altair as alt

from runs import PURPOSES

WIDTH = 820
WORK = ["forward", "backward", "weight gradients", "optimizer and the rest", "communication"]
PURPOSE_NAMES = [*PURPOSES, "CUDA, NCCL"]
SMALLEST = 1e-17  # where a difference of zero is drawn, below what fp64 can tell
# Okabe and Ito's colours, which colour-blind readers tell apart; without yellow and black, which a light or a dark page
# hides. Black text is readable on the first three.
COLORS = ["#56b4e9", "#e69f00", "#cc79a7", "#0072b2", "#009e73", "#d55e00"]
DASHES = {"solid": [1, 0], "dashed": [8, 6], "dotted": [0.1, 5]}  # CSS's names
SHAPES = {"solid": "circle", "dashed": "square", "dotted": "triangle-up"}
LOOKS = [([*DASHES][(i + i // 6) % 3], COLORS[i % 6]) for i in range(18)]  # of the runs, one after the other


def colors(field, names):
    return alt.Color(field + ":N", scale=alt.Scale(domain=names), legend=alt.Legend(orient="bottom", title=None))


ROWS = alt.NamedData(name="rows")


def specification(chart, rows, **arrays):
    """The chart with its data, and with the values of these parameters. They go around Altair, which would look at every
    number."""
    chart = chart.configure(background="transparent", range=alt.RangeConfig(category=COLORS)).to_dict()
    chart["datasets"] = {"rows": rows}
    chart["autosize"] = {"type": "pad", "resize": True}  # a choice may change how many rows there are
    for parameter in chart.get("params", []):
        if parameter["name"] in arrays:
            parameter["value"] = arrays[parameter["name"]]
    return chart


def dropdown(name, options, label, value=None):
    return alt.param(
        name=name, value=options[0] if value is None else value, bind=alt.binding_select(options=options, name=label + " ")
    )


def losses(runs):
    """Loss and gradient norm over the steps, and how far each is from the first run of the same training."""
    rows = []
    for run in runs:
        reference = run.reference(runs)
        for value, name in (("loss", "loss"), ("grad_norm", "gradient norm")):
            for step, difference in zip(run.steps, run.differences(value, reference)):
                rows.append(
                    {
                        "run": run.label,
                        "step": step["step"],
                        "of": name,
                        "value": step[value],
                        "difference": max(difference, SMALLEST) if difference < 1e308 else None,
                    }
                )
    labels = list(dict.fromkeys(run.label for run in runs))
    boxes = {f"box_{i}": alt.binding_checkbox(name=label + " ") for i, label in enumerate(labels)}
    choices = [alt.param(name=box, value=True, bind=bind) for box, bind in boxes.items()]
    choices.append(dropdown("shown_run", ["all", *labels], "run"))
    dashes, shapes = (alt.Scale(domain=labels, range=[of[dash] for dash, _ in LOOKS]) for of in (DASHES, SHAPES))
    shown = alt.condition("shown_run == 'all' || datum.run == shown_run", alt.value(1), alt.value(0.08))
    base = (
        alt.Chart(ROWS)
        .transform_filter(f"[{', '.join(boxes)}][indexof({json.dumps(labels)}, datum.run)]")
        .encode(
            x=alt.X("step:Q", axis=alt.Axis(tickMinStep=1)),
            color=alt.Color("run:N", scale=alt.Scale(domain=labels), legend=None),
            strokeDash=alt.StrokeDash("run:N", scale=dashes, legend=None),
            strokeOpacity=shown,
            fillOpacity=shown,
            tooltip=["run:N", "step:Q", alt.Tooltip("value:Q", format=".6f"), alt.Tooltip("difference:Q", format=".2e")],
        )
    )
    size = {"width": 440, "height": 220}

    def row(name):
        of = base.transform_filter(f"datum.of == '{name}'")
        return alt.hconcat(
            of.mark_line(strokeCap="round", point="transparent")
            .encode(y=alt.Y("value:Q", title=name, scale=alt.Scale(zero=False)))
            .properties(**size),
            of.mark_point(filled=True, size=30, opacity=1)
            .encode(
                shape=alt.Shape("run:N", scale=shapes, legend=None),
                y=alt.Y(
                    "difference:Q",
                    title="difference, relative",
                    scale=alt.Scale(type="log"),
                    axis=alt.Axis(format=".0e", tickCount=8),
                ),
            )
            .properties(**size),
        )

    return specification(alt.vconcat(row("loss"), row("gradient norm")).add_params(*choices), rows)


def memory(runs):
    """Bytes of each purpose, predicted beside measured, of the rank that has most."""
    rows = [
        {"run": run.label, "which": which, "purpose": purpose, "MiB": bytes_ / 2**20}
        for run in runs
        for which in ("predicted", "measured")
        for purpose, bytes_ in run.memory(which).items()
    ]
    chart = (
        alt.Chart(ROWS)
        .mark_bar()
        .encode(
            y=alt.Y("run:N", sort=[run.label for run in runs], title=None, scale=alt.Scale(paddingInner=0.3)),
            yOffset=alt.YOffset("which:N", sort=["predicted", "measured"], scale=alt.Scale(paddingInner=0.15)),
            x=alt.X("sum(MiB):Q", title="MiB of a rank: predicted, and fainter below it measured"),
            color=colors("purpose", PURPOSES),
            order=alt.Order("rank:Q"),
            opacity=alt.condition("datum.which == 'predicted'", alt.value(1), alt.value(0.6)),
            tooltip=["run:N", "which:N", "purpose:N", alt.Tooltip("MiB:Q", format=",.3f")],
        )
        .transform_calculate(rank=f"indexof({PURPOSE_NAMES}, datum.purpose)")
        .properties(width=WIDTH - 180, height={"step": 14})
    )
    return specification(chart, rows)


def speed(runs):
    """Bytes sent, time of a step and how much communication was hidden."""
    rows = [
        {
            "run": run.label,
            "sent": run.sent_bytes / 2**20,
            "ms": 1e3 * run.step_seconds,
            "tokens": run.tokens_per_second,
            "hidden": 100 * run.modelled["hidden"] if run.modelled else None,
            "time": "modelled" if run.modelled else "measured",
        }
        for run in runs
    ]
    base = (
        alt.Chart(ROWS)
        .mark_bar()
        .encode(y=alt.Y("run:N", sort=None, title=None))
        .properties(width=200, height={"step": 18})
    )

    def bar(field, title, labels=None):
        y = alt.Y("run:N", sort=None, title=None, axis=labels)
        return base.encode(
            x=alt.X(field + ":Q", title=title, axis=alt.Axis(format="~s", tickCount=4)),
            y=y,
            tooltip=["run:N", "time:N", alt.Tooltip(field + ":Q", format=",.3f")],
        )

    modelled = "modelled " if all(run.modelled for run in runs) else ""
    chart = alt.hconcat(
        bar("sent", "MiB sent by a rank in a step", alt.Axis()),
        bar("ms", modelled + "ms a step"),
        bar("tokens", modelled + "tokens/s a rank"),
        bar("hidden", "% of communication hidden"),
    )
    return specification(chart, rows)


def timeline(bars):
    """One step of a run; bars: of traces.timeline, each with its "run"."""
    labels, ranks = list(dict.fromkeys(bar["run"] for bar in bars)), sorted({bar["rank"] for bar in bars})
    length = {run: max(bar["end"] for bar in bars if bar["run"] == run) for run in labels}
    several = [bar["run"] for bar in bars if bar["rank"] > 0]
    choices = [
        dropdown("traced_run", labels, "run", (several or labels)[0]),
        dropdown("traced_rank", ["all", *ranks], "rank", 0),
        alt.param(name="zoom", value=1, bind=alt.binding_range(min=1, max=50, step=1, name="zoom ")),
        alt.param(name="start", value=0, bind=alt.binding_range(min=0, max=99, step=1, name="from, % of the step ")),
        alt.param(name="length_of", value=length),
        alt.param(name="from_us", expr="start / 100 * length_of[traced_run]"),
        alt.param(name="to_us", expr="from_us + length_of[traced_run] / zoom"),
    ]
    scale = alt.Scale(domainMin=alt.expr("from_us"), domainMax=alt.expr("to_us"), nice=False)
    chart = (
        alt.Chart(ROWS)
        .transform_filter(
            "datum.run == traced_run && (traced_rank == 'all' || datum.rank == traced_rank)"
            " && datum.end > from_us && datum.begin < to_us"
        )
        .transform_calculate(row="datum.rank + ' ' + datum.stream")
        .mark_bar(clip=True, stroke="Canvas", strokeWidth=0.3)
        .encode(
            x=alt.X("begin:Q", title="us from the beginning of the step", scale=scale, axis=alt.Axis(labelOverlap=True)),
            x2="end:Q",
            y=alt.Y("row:N", title=None, sort=alt.EncodingSortField("rank", op="min")),
            color=colors("work", WORK),
            tooltip=[
                "what:N",
                "work:N",
                "stream:N",
                "who:N",
                alt.Tooltip("begin:Q", format=",.1f"),
                alt.Tooltip("end:Q", format=",.1f"),
            ],
        )
        .properties(width=WIDTH - 160, height={"step": 16})
        .add_params(*choices, alt.selection_interval(bind="scales", encodings=["x"]))
    )
    return specification(chart, bars)


def pipeline(bars):
    """Pipelines; bars: of traces.pipeline, each with its "run" and its "schedule"."""
    labels, schedules = list(dict.fromkeys(bar["run"] for bar in bars)), list(
        dict.fromkeys(bar["schedule"] for bar in bars)
    )
    base = alt.Chart().encode(y=alt.Y("rank:O", title="rank"))
    blocks = base.mark_bar(stroke="Canvas", strokeWidth=0.5).encode(
        x=alt.X("begin:Q", title="us"),
        x2="end:Q",
        color=colors("work", WORK[:3]),
        tooltip=[
            "work:N",
            "micro_batch:O",
            "who:N",
            alt.Tooltip("begin:Q", format=",.1f"),
            alt.Tooltip("end:Q", format=",.1f"),
        ],
    )
    numbers = base.mark_text(fontSize=8, color="black").encode(x="middle:Q", text="micro_batch:O")
    chart = (
        alt.layer(blocks, numbers, data=ROWS)
        .transform_filter("datum.run == piped_run")
        .transform_calculate(middle="(datum.begin + datum.end) / 2")
        .properties(width=WIDTH - 120, height={"step": 15})
        .facet(
            row=alt.Row(
                "schedule:N",
                title=None,
                sort=schedules,
                header=alt.Header(labelAngle=0, labelAlign="left", labelOrient="top"),
            )
        )
        .resolve_scale(y="independent")  # of a folded run, other ranks are there with other schedules
        .add_params(dropdown("piped_run", labels, "run"))
    )
    return specification(chart, bars)


def calculator(tables):
    """The memory of a layout, from the tables of plan --calculator (07_combined_5d/plan/calculator.h)."""
    names = {
        "model": "model",
        "seq_len": "sequence",
        "mbs": "micro-batch",
        "tp": "tensor ranks",
        "sp": "sequence parallelism",
        "cp": "context ranks",
        "pp": "pipeline ranks",
        "dp": "data ranks",
        "zero": "ZeRO stage",
        "recompute": "recomputation",
    }
    first = {"seq_len": 4096, "zero": 1, "model": "llama-3.1-8b"}
    choices = [dropdown(name, tables["choices"][name], label, first.get(name)) for name, label in names.items()]
    arrays = {name: tables[name] for name in ("states", "activations", "libraries")}

    def entry(table, axes):
        """An element of a table whose axes are choices."""

        def index(axis):
            return f"[indexof({json.dumps(tables['choices'][axis])}, {'dp * cp' if axis == 'replicas' else axis})]"

        return table + "".join(map(index, axes))

    states = entry("states", ["model", "tp", "pp", "seq_len", "zero", "replicas"])
    activations = entry("activations", ["model", "tp", "pp", "sp", "recompute", "seq_len", "mbs", "cp"])
    libraries = entry("libraries", ["tp", "cp", "pp", "replicas"])
    rows = [
        {"place": place, "stage": stage, "purpose": purpose}
        for stage, place in enumerate(["first stage", "last stage"])
        for purpose in PURPOSE_NAMES
    ]
    place = f"indexof({PURPOSE_NAMES}, datum.purpose)"
    gpu = tables["memory_bytes"] / 2**30
    command = alt.param(
        name="command",
        expr=(
            f"!{states} || !{activations} ? 'This layout does not divide the model: heads, layers or tokens.' :"
            " ['mpirun -n ' + tp * cp * pp * dp + ' 07_combined_5d --model ' + model + ' --seq-len ' + seq_len + ' --micro-batch-size ' + mbs"
            f" + ' --global-batch-size ' + {tables['micro_batches']} * mbs * dp, '--tp ' + tp + ' --cp ' + cp + ' --pp ' + pp"
            " + ' --zero-stage ' + zero + (sp ? ' --sequence-parallel' : '') + (recompute == 'full' ? ' --recompute full' : '')"
            f" + ' --attention {tables['attention']}']"
        ),
    )
    bars = (
        alt.Chart(ROWS)
        .transform_filter(f"{states} && {activations} && datum.stage < min(pp, 2)")
        .transform_calculate(
            order=place,
            of_state=f"{place} < 3 ? {states}[datum.stage][{place}] : 0",
            of_batch=f"{place} >= 3 && {place} < 5 ? {activations}[datum.stage][{place} - 3] : 0",
            of_library=f"{place} == 5 ? {libraries} : 0",
        )
        .transform_calculate(bytes="datum.of_state + datum.of_batch + datum.of_library")
        .transform_calculate(GiB="datum.bytes / pow(2, 30)")
    )
    y = alt.Y("place:N", title=None)
    stacked = bars.mark_bar().encode(
        y=y,
        x=alt.X("sum(GiB):Q", title="GiB"),
        color=colors("purpose", PURPOSE_NAMES),
        order="order:Q",
        tooltip=["place:N", "purpose:N", alt.Tooltip("bytes:Q", format=",d"), alt.Tooltip("GiB:Q", format=".3f")],
    )
    sums = (
        bars.transform_aggregate(GiB="sum(GiB)", groupby=["place"])
        .transform_calculate(text=f"format(datum.GiB, '.2f') + (datum.GiB > {gpu} ? ', does not fit' : ', fits')")
        .mark_text(align="left", dx=4, color="CanvasText")
        .encode(y=y, x="GiB:Q", text="text:N")
    )
    line = alt.Chart(alt.Data(values=[{"GiB": gpu}])).mark_rule(color="CanvasText", strokeDash=[4, 3]).encode(x="GiB:Q")
    name = (
        alt.Chart(alt.Data(values=[{"GiB": gpu}]))
        .mark_text(color="CanvasText", dy=-6, align="right", baseline="bottom")
        .encode(x="GiB:Q", y=alt.value(0), text=alt.value(f"{tables['gpu']}: {gpu:.1f} GiB"))
    )
    chart = (
        alt.layer(stacked, sums, line, name)
        .properties(
            width=WIDTH - 100,
            height={"step": 50},
            title=alt.Title(
                alt.expr("command"), anchor="start", fontSize=11, fontWeight="normal", font="monospace", offset=24
            ),
        )
        .add_params(*choices, *[alt.param(name=name, value=0) for name in arrays], command)
    )
    return specification(chart, rows, **arrays)


def zero_memory(tables):
    """What each stage of ZeRO takes with each number of data ranks, from the same tables as the calculator's."""
    choice = tables["choices"]
    choices = [dropdown("model", choice["model"], "model", "llama-3.1-8b"), dropdown("tp", choice["tp"], "tensor ranks")]
    choices.append(dropdown("pp", choice["pp"], "pipeline ranks"))
    index = "".join(f"[indexof({json.dumps(choice[axis])}, {axis})]" for axis in ("model", "tp", "pp"))
    length = choice["seq_len"].index(4096)
    states = [[[entry and entry[length] for entry in of_tp] for of_tp in of_model] for of_model in tables["states"]]
    rows = [
        {"stage": f"ZeRO-{stage}", "zero": i, "ranks": ranks, "replicas": j, "purpose": purpose, "order": k}
        for i, stage in enumerate(choice["zero"])
        for j, ranks in enumerate(choice["replicas"])
        for k, purpose in enumerate(PURPOSE_NAMES[:3])
    ]
    bars = (
        alt.Chart(ROWS)
        .transform_filter(f"states{index}")
        .transform_calculate(GiB=f"states{index}[datum.zero][datum.replicas][0][datum.order] / pow(2, 30)")
        .mark_bar()
        .encode(
            x=alt.X("ranks:O", title="data ranks", axis=alt.Axis(labelAngle=0)),
            y=alt.Y("sum(GiB):Q", title="GiB a rank", stack="zero"),
            color=colors("purpose", PURPOSE_NAMES[:3]),
            order="order:Q",
            tooltip=["stage:N", "ranks:O", "purpose:N", alt.Tooltip("GiB:Q", format=".2f")],
        )
        .properties(width=150, height=220)
    )
    chart = bars.facet(alt.Facet("stage:N", title=None), columns=4)
    return specification(chart.add_params(*choices, alt.param(name="states", value=0)), rows, states=states)


def heatmap(cells):
    """The fastest layout of each model on each number of nodes, from plan --heatmap --json."""
    rows = [
        {
            "model": cell["model"],
            "nodes": cell["nodes"],
            "MFU": cell["layouts"][0]["mfu"],
            "layout": cell["layouts"][0]["layout"],
            "command": cell["layouts"][0]["command"],
        }
        for cell in cells
    ]
    base = (
        alt.Chart(ROWS)
        .transform_calculate(lines="split(replace(datum.layout, ' zero', ';zero'), ';')")
        .encode(x=alt.X("nodes:O", title="nodes", axis=alt.Axis(labelAngle=0)), y=alt.Y("model:N", title=None, sort=None))
    )
    tiles = base.mark_rect().encode(
        color=alt.Color("MFU:Q", scale=alt.Scale(scheme="viridis"), legend=alt.Legend(format="%")),
        tooltip=["model:N", "nodes:O", alt.Tooltip("MFU:Q", format=".1%"), "layout:N", "command:N"],
    )
    least, most = min(row["MFU"] for row in rows), max(row["MFU"] for row in rows)
    middle = least + 0.43 * (most - least)  # where black and white are equally readable
    light = alt.condition(f"datum.MFU > {middle}", alt.value("black"), alt.value("white"))  # on dark and light tiles
    percent = base.mark_text(dy=-14, fontWeight="bold").encode(text=alt.Text("MFU:Q", format=".0%"), color=light)
    layouts = base.mark_text(dy=2, fontSize=10).encode(text="lines:N", color=light)
    return specification((tiles + percent + layouts).properties(width=WIDTH - 100, height={"step": 64}), rows)


def sweep(rows):
    """Measured over predicted time of a step; rows: of sweep.csv."""
    most = 1.1 * max(max(row["predicted"], row["measured"]) for row in rows)
    points = (
        alt.Chart(ROWS)
        .mark_point(filled=True, size=70)
        .encode(
            x=alt.X("predicted:Q", title="predicted, ms a step", scale=alt.Scale(domain=[0, most])),
            y=alt.Y(
                "measured:Q", title="measured (or issued in virtual time), ms a step", scale=alt.Scale(domain=[0, most])
            ),
            color=alt.Color("model:N", title=None),
            shape=alt.Shape("gpus:N", legend=alt.Legend(title="GPUs", symbolFillColor="CanvasText")),
            tooltip=[
                "model:N",
                "gpus:O",
                "layout:N",
                alt.Tooltip("predicted:Q", format=",.1f"),
                alt.Tooltip("measured:Q", format=",.1f"),
            ],
        )
    )
    same = (
        alt.Chart(alt.Data(values=[{"t": 0}, {"t": most}]))
        .mark_line(color="#999", strokeDash=[4, 3])
        .encode(x="t:Q", y="t:Q")
    )
    return specification((same + points).properties(width=460, height=460), rows)
