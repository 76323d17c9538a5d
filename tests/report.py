"""Opens the report in a browser without a window:  python report.py PAGE BUILDS.  Every figure must have
marks, and the console must stay empty. Choices must change what is shown. Nothing may lie outside the window
of a computer or a phone, and all must be readable, light or dark, with a keyboard or a screen reader. The
memory of a layout must be what the program predicts, but for the padding of shards, whose command the page shows. BUILDS has cpu-bf16 with
07_combined_5d. A picture of each figure is left beside the page. The last line is "N passed, N failed"."""

import json
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile

from playwright.sync_api import sync_playwright

from browser import chromium, expect, expect_readable, finish, watched_page

page_file, builds = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2])
FIGURES = ["losses", "memory", "speed", "timeline", "pipeline", "calculator", "heatmap", "sweep"]
PURPOSES = ["weights", "gradients", "optimizer", "activations", "communication"]
LAYOUTS, MOST_RANKS = 6, 8
PADDING = 100000  # bytes that shards of up to 8 ranks have more, to be equal; all else is exact
draw = random.Random(7)


def marks(page, figure):
    """What a screen reader says of each bar, point or line."""
    found = page.locator(
        f"#{figure} .figure svg [role=graphics-symbol], #{figure} .figure svg [aria-roledescription$=mark i]"
    )
    return found.evaluate_all("all => all.map(mark => mark.getAttribute('aria-label'))")


def shown_memory(page):
    """{place: {purpose: bytes}}."""
    shown = {}
    for label in marks(page, "calculator"):
        found = re.search(r"place: (.* stage); purpose: (.*?); .*bytes: ([\d,]+)", label or "")
        if found:
            shown.setdefault(found[1], {})[found[2]] = int(found[3].replace(",", ""))
    return shown


def predicted_memory(command):
    """The same, of the program that this command starts."""
    words = re.sub(" --gpu \\S+", "", command).split()
    place = words.index("07_combined_5d")
    words[place] = str(builds / "cpu-bf16" / "07_combined_5d")
    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder, "log.json")
        gpu = pathlib.Path(folder, "gpu.json")
        profile = json.loads(pathlib.Path("common/clock/profiles/h100.json").read_text())
        profile["memory_bytes"]["value"] = 256 * 2**30  # whether it fits is another question
        gpu.write_text(json.dumps(profile))
        done = subprocess.run(
            [*words, "--dry-run", "--gpu", str(gpu), "--steps", "1", "--log-json", str(log)],
            capture_output=True,
            text=True,
            env={**os.environ, "UCX_LOG_LEVEL": "error", "OMP_NUM_THREADS": "1"},
        )
        if done.returncode != 0:
            return done.stderr.strip()
        ranks = json.loads(log.read_text().splitlines()[-1])["summary"]["memory"]
    places = {"first stage": ranks[0], "last stage": ranks[-1]}
    return {
        name: {purpose: rank["predicted"][purpose] for purpose in PURPOSES} for name, rank in places.items()
    }


def open_page(page):
    page.goto(page_file.as_uri())
    page.wait_for_function(
        "figures => figures.every(name => document.querySelector('#' + name + ' svg .mark-rect, #' + name + ' svg .mark-symbol'))",
        arg=FIGURES,
        timeout=60000,
    )


def check_calculator(page):
    choices = page.locator("#calculator select")
    names = choices.evaluate_all("all => all.map(choice => choice.name)")
    tried = 0
    while tried < LAYOUTS:
        chosen = {}
        for name in names:
            options = page.locator(f"#calculator select[name={name}] option").evaluate_all(
                "all => all.map(option => option.value)"
            )
            chosen[name] = draw.choice(options)
        chosen["dp"] = str(draw.choice([1, 2, 3, 4, 5, 6, 8]))
        if int(chosen["tp"]) * int(chosen["cp"]) * int(chosen["pp"]) * int(chosen["dp"]) > MOST_RANKS:
            continue
        page.fill("#calculator input[name=dp]", chosen["dp"])
        for name in names:
            page.select_option(f"#calculator select[name={name}]", chosen[name])
        page.wait_for_timeout(200)
        if any(sum(bytes_.values()) > 200 * 2**30 for bytes_ in shown_memory(page).values()):
            continue  # more than a CPU build has of addresses
        command = " ".join(page.locator("#calculator .role-title-text tspan").all_text_contents())
        if "mpirun" not in command:
            continue
        tried += 1
        predicted, shown = predicted_memory(command), shown_memory(page)
        stages = ["first stage", "last stage"][: min(2, int(chosen["pp"]))]
        of_tensors = {
            stage: {purpose: bytes_[purpose] for purpose in PURPOSES} for stage, bytes_ in shown.items()
        }
        off = [
            abs(of_tensors[stage][purpose] - predicted[stage][purpose])
            / (PADDING if purpose in PURPOSES[:3] else 1)
            for stage in stages
            for purpose in PURPOSES
            if not isinstance(predicted, str)
        ]
        good = off and max(off) < 1 and len(of_tensors) == len(stages)
        profile = json.loads(pathlib.Path(f"common/clock/profiles/{chosen['gpu']}.json").read_text())
        limit = f"{chosen['gpu']}: {0.96 * profile['memory_bytes']['value'] / 2**30:.1f} GiB"
        expect(limit in page.locator("#calculator").text_content(), f"the line is that of {limit}")
        expect(
            good,
            f"memory, {' '.join(f'{k} {v}' for k, v in chosen.items())}"
            + ("" if good else f": shown {shown}, predicted {predicted}"),
        )


def check_choices(page):
    for name, figure, value in (
        ("traced_run", "timeline", "07-3d"),
        ("traced_rank", "timeline", "all"),
        ("piped_run", "pipeline", "07-3d"),
    ):
        before = marks(page, figure)
        page.select_option(f"#{figure} select[name={name}]", value)
        page.wait_for_timeout(500)
        expect(marks(page, figure) != before, f"{figure}: {name} {value} changes the bars")
    before = marks(page, "timeline")
    page.locator("#timeline input[name=zoom]").focus()
    for _ in range(9):
        page.keyboard.press("ArrowRight")
    page.wait_for_timeout(500)
    zoomed = marks(page, "timeline")
    expect(
        0 < len(zoomed) < len(before) / 4,
        f"timeline: the keyboard zooms, {len(before)} bars to {len(zoomed)}",
    )
    page.locator("#losses select").focus()
    page.keyboard.press("ArrowDown")
    page.wait_for_timeout(300)
    expect(page.locator("#losses select").input_value() == "01", "losses: the keyboard chooses a run")


def check_legend(page):
    """A click and a key hide a run's lines and points, and show them again."""
    box, before = page.locator("#losses").get_by_label("07-3d", exact=True), marks(page, "losses")
    for what, act in (("click", box.click), ("key", lambda: box.press("Space"))):
        for hidden in (True, False):
            act()
            page.wait_for_timeout(300)
            now = marks(page, "losses")
            good = any("07-3d" in mark for mark in now) != hidden and (len(now) < len(before)) == hidden
            expect(
                good,
                f"losses: a {what} in the legend {'hides' if hidden else 'shows'} a run, {len(now)} marks",
            )


def check_names(page):
    """What a screen reader says of what a reader can work, of the charts and of the tables."""
    names = page.locator("select, input, button, a, [tabindex]").evaluate_all(
        """all => all.map(one => one.ariaLabel ||
          (one.labels ? [...one.labels] : [one.ariaLabelledByElements?.[0] || one])
          .map(label => label.textContent.trim()).join())"""
    )
    expect(len(names) > 30 and all(names), f"{len(names)} controls, links and boxes that scroll have names")
    charts = page.locator("[role=graphics-document]").evaluate_all("all => all.map(chart => chart.ariaLabel)")
    expect(len(set(charts)) == len(FIGURES), "each chart has its own description")
    boxes = page.locator(".wide, .figure").evaluate_all("all => all.map(box => box.tabIndex)")
    expect(set(boxes) == {0}, "the keyboard reaches each box that scrolls")
    heads = [page.locator(f"th[scope={scope}]").count() for scope in ("col", "row")]
    expect(
        page.locator("table caption").count() == 2 and min(heads) > 4,
        f"a caption, heads of columns and rows: {heads}",
    )
    levels = page.locator("h1, h2, h3, h4").evaluate_all("all => all.map(title => title.tagName)")
    expect(
        levels == ["H1"] + ["H2"] * (len(FIGURES) + 2) and page.locator("html[lang]").count(),
        "titles are in order",
    )


def check_width(page, width):
    """The page does not scroll sideways; tables do not where they have room."""
    wide = page.evaluate("document.documentElement.scrollWidth")
    expect(wide <= width, f"the page is {wide} pixels wide in a window of {width}")
    if width > 1000:
        widths = "all => all.map(table => [table.offsetWidth, table.parentElement.clientWidth])"
        for table, box in page.locator("table").evaluate_all(widths):
            expect(table <= box, f"a table is {table} pixels wide in a box of {box}")


def check_colors(page):
    """In both schemes each text is readable, and the page and its charts follow the reader's scheme."""
    seen = {}
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        expect_readable(page, "h1, h2, p, a, td, th, caption, label, select, svg text", scheme)
        seen[scheme] = page.evaluate(
            """['body', '#losses svg .role-axis-label text', '#sweep svg .role-legend-label text'].map((place,
            i) =>
              getComputedStyle(document.querySelector(place))[i ? 'fill' : 'backgroundColor'])"""
        )
    expect(
        all(a != b for a, b in zip(*seen.values())),
        f"the page and its charts follow the reader's scheme: {seen}",
    )


def check_refusals(folder):
    """A log that can not be read, or a bad PLAN, is refused in one line, and an older page stays."""
    page, log = pathlib.Path(folder, "page.html"), pathlib.Path(folder, "log.json")
    page.write_text("older")
    whole = next(page_file.parent.glob("runs/*.jsonl")).read_text()
    for what, text, plan in (
        ("no file", None, ""),
        ("no JSON", "{", ""),
        ("another JSON", "[1]", ""),
        ("a run that was killed", whole[: whole.index('{"step":3')], ""),
        ("an option without its value", whole, "--gpus"),
    ):
        log.unlink(missing_ok=True)
        if text is not None:
            log.write_text(text)
        done = subprocess.run(
            ["build/python-report/bin/python", "common/report/report.py", page, builds, plan, log],
            capture_output=True,
            text=True,
        )
        good = done.returncode == 2 and done.stderr.count("\n") == 1 and page.read_text() == "older"
        expect(good, f"{what}: status {done.returncode}: {done.stderr.strip()[-150:]}")


with tempfile.TemporaryDirectory() as folder:
    check_refusals(folder)
with sync_playwright() as playwright:
    browser = chromium(playwright)
    page = watched_page(browser, 1440, 1000)
    open_page(page)
    for figure in FIGURES:
        count = len(marks(page, figure))
        expect(count > 5, f"{figure}: {count} marks")
        page.locator("#" + figure).screenshot(path=page_file.parent / f"{figure}.png")
    expect(page.locator("#runs tr").count() == 6, "the table has a row for each of the five runs")
    expect(page.locator("main section").first.get_attribute("id") == "real", "real sizes come first")
    expect(
        "512 sequences of 2048 tokens a step" in page.locator("#heatmap").inner_text(),
        "the heatmap is of what PLAN says",
    )
    told = re.findall("^(?:row|table) ", pathlib.Path("tests/lessons.txt").read_text(), re.MULTILINE)
    expect(
        page.locator("#real tr").count() == 1 + len(told), f"real sizes have {len(told)} rows and headings"
    )
    check_width(page, 1440)
    check_names(page)
    check_colors(page)
    check_legend(page)
    check_choices(page)
    check_calculator(page)
    phone = watched_page(browser, 390, 844, phone=True)
    open_page(phone)
    check_width(phone, 390)
    browser.close()
finish()
