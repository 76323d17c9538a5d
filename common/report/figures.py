"""The figures of the report: each function returns the JSON of a Vega-Lite chart. What a figure computes
after a choice, it computes as an expression of Vega; a choice is an element of the page that a keyboard can
work."""

import json

import altair as alt

import planner
from runs import PURPOSES

WIDTH = 820
WORK = ["forward", "backward", "weight gradients", "optimizer and the rest", "communication"]
PURPOSE_NAMES = [*PURPOSES, "CUDA, NCCL"]
SMALLEST = 1e-17  # where a difference of zero is drawn, below what fp64 can tell
# Okabe and Ito's colours, which colour-blind readers tell apart; without yellow and black, which a light or a
# dark page hides. Black text is readable on the first three.
COLORS = ["#56b4e9", "#e69f00", "#cc79a7", "#0072b2", "#009e73", "#d55e00"]
DASHES = {"solid": [1, 0], "dashed": [8, 6], "dotted": [0.1, 5]}  # CSS's names
SHAPES = {"solid": "circle", "dashed": "square", "dotted": "triangle-up"}
LOOKS = [([*DASHES][(i + i // 6) % 3], COLORS[i % 6]) for i in range(18)]  # of the runs, one after the other
ROWS = alt.NamedData(name="rows")


def colors(field, names):
    return alt.Color(
        field + ":N", scale=alt.Scale(domain=names), legend=alt.Legend(orient="bottom", title=None)
    )


def tips(*fields):
    """What a bar or a point says of itself: fields, each with the format of its number."""
    words = [field.split() for field in fields]
    return [alt.Tooltip(name, format=form[0]) if form else name for name, *form in words]


def specification(chart, rows, **arrays):
    """The chart with its data, and with the values of these parameters. They go around Altair, which would
    look at every number."""
    chart = chart.configure(background="transparent", range=alt.RangeConfig(category=COLORS)).to_dict()
    chart["datasets"] = {"rows": rows}
    chart["autosize"] = {"type": "pad", "resize": True}  # a choice may change how many rows there are
    for parameter in chart.get("params", []):
        if parameter["name"] in arrays:
            parameter["value"] = arrays[parameter["name"]]
    return chart


def dropdown(name, options, label, value=None):
    bind = alt.binding_select(options=options, name=label + " ")
    return alt.param(name=name, value=value if value in options else options[0], bind=bind)


def slider(name, least, most, label):
    return alt.param(
        name=name, value=least, bind=alt.binding_range(min=least, max=most, step=1, name=label + " ")
    )


def losses(runs):
    """Loss and gradient norm over the steps, and how far each is from the first run of the same training."""
    rows = [
        {
            "run": run.label,
            "step": step["step"],
            "of": name,
            "value": step[value],
            "difference": max(difference, SMALLEST) if difference < 1e308 else None,
        }
        for run in runs
        for value, name in (("loss", "loss"), ("grad_norm", "gradient norm"))
        for step, difference in zip(run.steps, run.differences(value, run.reference(runs)))
    ]
    labels = list(dict.fromkeys(run.label for run in runs))
    boxes = [f"box_{i}" for i in range(len(labels))]
    choices = [
        alt.param(name=box, value=True, bind=alt.binding_checkbox(name=label + " "))
        for box, label in zip(boxes, labels)
    ]
    choices.append(dropdown("shown_run", ["all", *labels], "run"))
    dashes, shapes = (
        alt.Scale(domain=labels, range=[of[dash] for dash, _ in LOOKS]) for of in (DASHES, SHAPES)
    )
    shown = alt.condition("shown_run == 'all' || datum.run == shown_run", alt.value(1), alt.value(0.08))
    base = alt.Chart(ROWS).transform_filter(f"[{', '.join(boxes)}][indexof({json.dumps(labels)}, datum.run)]")
    base = base.properties(width=440, height=220).encode(
        x=alt.X("step:Q", axis=alt.Axis(tickMinStep=1)),
        color=alt.Color("run:N", scale=alt.Scale(domain=labels), legend=None),
        strokeDash=alt.StrokeDash("run:N", scale=dashes, legend=None),
        strokeOpacity=shown,
        fillOpacity=shown,
        tooltip=tips("run:N", "step:Q", "value:Q .6f", "difference:Q .2e"),
    )
    difference = alt.Y(
        "difference:Q",
        title="difference, relative",
        scale=alt.Scale(type="log"),
        axis=alt.Axis(format=".0e", tickCount=8),
    )

    def row(name):
        of = base.transform_filter(f"datum.of == '{name}'")
        value = alt.Y("value:Q", title=name, scale=alt.Scale(zero=False))
        points = of.mark_point(filled=True, size=30, opacity=1)
        return alt.hconcat(
            of.mark_line(strokeCap="round", point="transparent").encode(y=value),
            points.encode(shape=alt.Shape("run:N", scale=shapes, legend=None), y=difference),
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
    bars = alt.Chart(ROWS).mark_bar().transform_calculate(rank=f"indexof({PURPOSE_NAMES}, datum.purpose)")
    scale = alt.Scale(paddingInner=0.15)
    chart = bars.encode(
        y=alt.Y("run:N", sort=[run.label for run in runs], title=None, scale=alt.Scale(paddingInner=0.3)),
        yOffset=alt.YOffset("which:N", sort=["predicted", "measured"], scale=scale),
        x=alt.X("sum(MiB):Q", title="MiB of a rank: predicted, and fainter below it measured"),
        color=colors("purpose", PURPOSES),
        order=alt.Order("rank:Q"),
        opacity=alt.condition("datum.which == 'predicted'", alt.value(1), alt.value(0.6)),
        tooltip=tips("run:N", "which:N", "purpose:N", "MiB:Q ,.3f"),
    )
    return specification(chart.properties(width=WIDTH - 180, height={"step": 14}), rows)


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

    def bar(field, title, labels=None):
        return (
            alt.Chart(ROWS)
            .mark_bar()
            .properties(width=200, height={"step": 18})
            .encode(
                x=alt.X(field + ":Q", title=title, axis=alt.Axis(format="~s", tickCount=4)),
                y=alt.Y("run:N", sort=None, title=None, axis=labels),
                tooltip=tips("run:N", "time:N", field + ":Q ,.3f"),
            )
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
        slider("zoom", 1, 50, "zoom"),
        slider("start", 0, 99, "from, % of the step"),
        alt.param(name="length_of", value=length),
        alt.param(name="from_us", expr="start / 100 * length_of[traced_run]"),
        alt.param(name="to_us", expr="from_us + length_of[traced_run] / zoom"),
        alt.selection_interval(bind="scales", encodings=["x"]),
    ]
    shown = (
        "datum.run == traced_run && (traced_rank == 'all' || datum.rank == traced_rank)"
        " && datum.end > from_us && datum.begin < to_us"
    )
    scale = alt.Scale(domainMin=alt.expr("from_us"), domainMax=alt.expr("to_us"), nice=False)
    chart = (
        alt.Chart(ROWS)
        .mark_bar(clip=True, stroke="Canvas", strokeWidth=0.3)
        .encode(
            x=alt.X(
                "begin:Q",
                title="us from the beginning of the step",
                scale=scale,
                axis=alt.Axis(labelOverlap=True),
            ),
            x2="end:Q",
            y=alt.Y("row:N", title=None, sort=alt.EncodingSortField("rank", op="min")),
            color=colors("work", WORK),
            tooltip=tips("what:N", "work:N", "stream:N", "who:N", "begin:Q ,.1f", "end:Q ,.1f"),
        )
    )
    chart = chart.transform_filter(shown).transform_calculate(row="datum.rank + ' ' + datum.stream")
    return specification(chart.properties(width=WIDTH - 160, height={"step": 16}).add_params(*choices), bars)


def pipeline(bars):
    """Pipelines; bars: of traces.pipeline, each with its "run" and its "schedule"."""
    labels, schedules = (list(dict.fromkeys(bar[key] for bar in bars)) for key in ("run", "schedule"))
    base = alt.Chart().encode(y=alt.Y("rank:O", title="rank"))
    blocks = base.mark_bar(stroke="Canvas", strokeWidth=0.5).encode(
        x=alt.X("begin:Q", title="us"),
        x2="end:Q",
        color=colors("work", WORK[:3]),
        tooltip=tips("work:N", "micro_batch:O", "who:N", "begin:Q ,.1f", "end:Q ,.1f"),
    )
    numbers = base.mark_text(fontSize=8, color="black").encode(x="middle:Q", text="micro_batch:O")
    layers = alt.layer(blocks, numbers, data=ROWS).transform_filter("datum.run == piped_run")
    layers = layers.transform_calculate(middle="(datum.begin + datum.end) / 2")
    header = alt.Header(labelAngle=0, labelAlign="left", labelOrient="top")
    row = alt.Row("schedule:N", title=None, sort=schedules, header=header)
    chart = layers.properties(width=WIDTH - 120, height={"step": 15}).facet(row=row)
    return specification(chart.add_params(dropdown("piped_run", labels, "run")), bars)


def in_shards(entry, of, replicas):
    """Bytes with so many replicas: an entry has them for planner.CHOICES["replicas"], 8 and 64."""
    return f"round({entry}[1]{of} + ({entry}[0]{of} - {entry}[1]{of}) * (64 / ({replicas}) - 1) / 7)"


def calculator(tables):
    """The memory of a layout, from planner.calculator."""
    names = {
        "model": "model",
        "seq_len": "sequence",
        "mbs": "micro-batch",
        "tp": "tensor ranks",
        "sp": "sequence parallelism",
        "cp": "context ranks",
        "pp": "pipeline ranks",
        "zero": "ZeRO stage",
        "recompute": "recomputation",
    }
    first, gpus = {"seq_len": 4096, "zero": 1, "model": tables["model"]}, tables["gpus"]
    choices = [
        dropdown(name, tables["choices"][name], label, first.get(name)) for name, label in names.items()
    ]
    choices.append(alt.param(name="dp", value=1, bind=alt.BindInput(input="number", name="data ranks ")))
    choices.append(alt.param(name="ranks", expr="max(1, floor(toNumber(dp)))"))
    choices.append(dropdown("gpu", [*gpus], "GPU"))
    arrays = {name: tables[name] for name in ("states", "activations", "libraries")}

    def entry(table, axes):
        """An element of a table whose axes are choices."""
        return table + "".join(f"[indexof({json.dumps(tables['choices'][axis])}, {axis})]" for axis in axes)

    states = entry("states", ["model", "tp", "pp", "seq_len", "zero"])
    activations = entry("activations", ["model", "tp", "pp", "sp", "recompute", "seq_len", "mbs", "cp"])
    libraries = entry("libraries", ["tp", "cp", "pp"]) + "[ranks * cp > 1 ? 1 : 0]"
    model = f"[indexof({json.dumps(tables['choices']['model'])}, model)]"
    divides = f"{states}[0] && {states}[1] && {activations} && ranks * cp % {tables['ep']}{model} == 0"
    rows = [
        {"place": place, "stage": stage, "purpose": purpose}
        for stage, place in enumerate(["first stage", "last stage"])
        for purpose in PURPOSE_NAMES
    ]
    place = f"indexof({PURPOSE_NAMES}, datum.purpose)"
    gpu = f"({json.dumps(gpus)}[gpu] / pow(2, 30))"
    words = f"{tables['options']}{model}"
    command = (
        f"!({divides}) ? 'This layout does not divide the model: heads, layers or tokens.' :"
        f" ['mpirun -n ' + tp * cp * pp * ranks + ' 07_combined_5d ' + {words}, '--seq-len ' + seq_len + ' --micro-batch-size ' + mbs"
        f" + ' --global-batch-size ' + {planner.MICRO_BATCHES} * mbs * ranks, '--tp ' + tp + ' --cp ' + cp + ' --pp ' + pp"
        " + ' --zero-stage ' + zero + (sp ? ' --sequence-parallel' : '') + (recompute == 'full' ? ' --recompute full' : '')"
        f" + (gpu == '{[*gpus][0]}' ? '' : ' --gpu ' + gpu)]"
    )
    choices += [*[alt.param(name=name, value=0) for name in arrays], alt.param(name="command", expr=command)]
    bars = alt.Chart(ROWS).transform_filter("datum.stage < min(pp, 2)")
    bars = bars.transform_calculate(  # a layout that does not divide has empty bars
        order=place,
        bytes=f"!({divides}) ? 0 : {place} < 3 ? {in_shards(states, f'[datum.stage][{place}]', 'ranks * cp')} : {place} < 5 ? {activations}[datum.stage][{place} - 3]"
        f" : {libraries}",
    ).transform_calculate(GiB="datum.bytes / pow(2, 30)")
    y = alt.Y("place:N", title=None)
    stacked = bars.mark_bar().encode(
        y=y,
        x=alt.X("sum(GiB):Q", title="GiB"),
        color=colors("purpose", PURPOSE_NAMES),
        order="order:Q",
        tooltip=tips("place:N", "purpose:N", "bytes:Q ,d", "GiB:Q .3f"),
    )
    fits = f"!datum.GiB ? '' : format(datum.GiB, '.2f') + (datum.GiB > {gpu} ? ', does not fit' : ', fits')"
    sums = bars.transform_aggregate(GiB="sum(GiB)", groupby=["place"]).transform_calculate(text=fits)
    sums = sums.mark_text(align="left", dx=4, color="CanvasText").encode(y=y, x="GiB:Q", text="text:N")
    limit = alt.Chart(alt.Data(values=[{}])).transform_calculate(
        GiB=gpu, name=f"gpu + ': ' + format({gpu}, '.1f') + ' GiB'"
    )
    limit = limit.encode(x="GiB:Q")
    line = limit.mark_rule(color="CanvasText", strokeDash=[4, 3])
    name = limit.mark_text(color="CanvasText", dy=-6, align="right", baseline="bottom").encode(
        y=alt.value(0), text="name:N"
    )
    title = alt.Title(
        alt.expr("command"), anchor="start", fontSize=11, fontWeight="normal", font="monospace", offset=24
    )
    chart = alt.layer(stacked, sums, line, name).properties(
        width=WIDTH - 100, height={"step": 50}, title=title
    )
    return specification(chart.add_params(*choices), rows, **arrays)


def zero_memory(tables):
    """What each stage of ZeRO takes with each number of data ranks, from the same tables as the
    calculator's."""
    choice = tables["choices"]
    choices = [
        dropdown("model", choice["model"], "model", "llama-3.1-8b"),
        dropdown("tp", choice["tp"], "tensor ranks"),
    ]
    choices.append(dropdown("pp", choice["pp"], "pipeline ranks"))
    index = "".join(f"[indexof({json.dumps(choice[axis])}, {axis})]" for axis in ("model", "tp", "pp"))
    length = choice["seq_len"].index(4096)
    states = [
        [[entry and entry[length] for entry in of_tp] for of_tp in of_model] for of_model in tables["states"]
    ]
    rows = [
        {"stage": f"ZeRO-{stage}", "zero": i, "ranks": ranks, "purpose": purpose, "order": k}
        for i, stage in enumerate(choice["zero"])
        for ranks in (1, 2, 4, 8, 16, 32, 64, 128, 256)
        for k, purpose in enumerate(PURPOSE_NAMES[:3])
    ]
    gib = in_shards(f"states{index}[datum.zero]", "[0][datum.order]", "datum.ranks") + " / pow(2, 30)"
    bars = alt.Chart(ROWS).mark_bar().transform_filter(f"states{index}").transform_calculate(GiB=gib)
    bars = bars.properties(width=190, height=220).encode(
        x=alt.X("ranks:O", title="data ranks", axis=alt.Axis(labelAngle=0)),
        y=alt.Y("sum(GiB):Q", title="GiB a rank", stack="zero"),
        color=colors("purpose", PURPOSE_NAMES[:3]),
        order="order:Q",
        tooltip=tips("stage:N", "ranks:O", "purpose:N", "GiB:Q .2f"),
    )
    chart = bars.facet(alt.Facet("stage:N", title=None), columns=4)
    return specification(chart.add_params(*choices, alt.param(name="states", value=0)), rows, states=states)


def heatmap(cells):
    """The fastest layout of each model on each number of GPUs, from planner.heatmap."""
    rows = []
    for cell in cells:
        best = cell["layouts"][0]
        days, money = (f"{best[name]:,.1f} {name}" if name in best else "" for name in ("days", "money"))
        words = {"layout": best["layout"], "command": best["command"], "days": days, "money": money}
        rows.append({"model": cell["model"], "GPUs": cell["gpus"], "MFU": best["mfu"], **words})
    lines = "split(replace(datum.layout, ' zero', ';zero') + (datum.days ? ';' + datum.days : ''), ';')"
    base = alt.Chart(ROWS).transform_calculate(lines=lines)
    base = base.encode(
        x=alt.X("GPUs:O", title="GPUs", axis=alt.Axis(labelAngle=0)),
        y=alt.Y("model:N", title=None, sort=None),
    )
    tiles = base.mark_rect().encode(
        color=alt.Color("MFU:Q", scale=alt.Scale(scheme="viridis"), legend=alt.Legend(format="%")),
        tooltip=tips("model:N", "GPUs:O", "MFU:Q .1%", "days:N", "money:N", "layout:N", "command:N"),
    )
    least, most = min(row["MFU"] for row in rows), max(row["MFU"] for row in rows)
    middle = least + 0.43 * (most - least)  # where black and white are equally readable
    light = alt.condition(
        f"datum.MFU > {middle}", alt.value("black"), alt.value("white")
    )  # on dark and light tiles
    percent = base.mark_text(dy=-14, fontWeight="bold").encode(
        text=alt.Text("MFU:Q", format=".0%"), color=light
    )
    layouts = base.mark_text(dy=2, fontSize=10).encode(text="lines:N", color=light)
    return specification((tiles + percent + layouts).properties(width=WIDTH - 100, height={"step": 70}), rows)


def sweep(rows):
    """Measured over predicted time of a step; rows: of sweep.csv."""
    most = 1.1 * max(max(row["predicted"], row["measured"]) for row in rows)
    scale = alt.Scale(domain=[0, most])
    points = (
        alt.Chart(ROWS)
        .mark_point(filled=True, size=70)
        .encode(
            x=alt.X("predicted:Q", title="predicted, ms a step", scale=scale),
            y=alt.Y("measured:Q", title="measured (or issued in virtual time), ms a step", scale=scale),
            color=alt.Color("model:N", title=None),
            shape=alt.Shape("gpus:N", legend=alt.Legend(title="GPUs", symbolFillColor="CanvasText")),
            tooltip=tips("model:N", "gpus:O", "layout:N", "predicted:Q ,.1f", "measured:Q ,.1f"),
        )
    )
    same = alt.Chart(alt.Data(values=[{"t": 0}, {"t": most}])).encode(x="t:Q", y="t:Q")
    return specification(
        (same.mark_line(color="#999", strokeDash=[4, 3]) + points).properties(width=460, height=460), rows
    )
