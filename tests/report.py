"""Opens the report in a browser without a window:  python report.py PAGE BUILDS.  Every figure must have marks, and the
console must stay empty. Choices must change what is shown. The memory of a layout must be what the program predicts, whose
command the page shows. BUILDS has cpu-bf16 and cpu-fp32 with 07_combined_5d. A picture of each figure is left beside the
page. The last line is "N passed, N failed"."""

import json
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tempfile

from playwright.sync_api import sync_playwright

page_file, builds = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2])
FIGURES = ["losses", "memory", "speed", "timeline", "pipeline", "calculator", "heatmap", "sweep"]
PURPOSES = ["weights", "gradients", "optimizer", "activations", "communication"]
LAYOUTS, MOST_RANKS = 8, 8
draw = random.Random(7)
passed = failed = 0


def expect(good, what):
    global passed, failed
    passed, failed = passed + bool(good), failed + (not good)
    print(("ok      " if good else "FAILED  ") + what, flush=True)


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


def predicted_memory(command, precision):
    """The same, of the program that this command starts."""
    words = command.split()
    place = words.index("07_combined_5d")
    words[place] = str(builds / f"cpu-{precision}" / "07_combined_5d")
    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder, "log.json")
        gpu = pathlib.Path(folder, "gpu.json")
        profile = json.loads(pathlib.Path("common/device/profiles/h100.json").read_text())
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
    return {name: {purpose: rank["predicted"][purpose] for purpose in PURPOSES} for name, rank in places.items()}


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
        if int(chosen["tp"]) * int(chosen["cp"]) * int(chosen["pp"]) * int(chosen["dp"]) > MOST_RANKS:
            continue
        for name, value in chosen.items():
            page.select_option(f"#calculator select[name={name}]", value)
        page.wait_for_timeout(200)
        if any(sum(bytes_.values()) > 200 * 2**30 for bytes_ in shown_memory(page).values()):
            continue  # more than a CPU build has of addresses
        command = " ".join(page.locator("#calculator .role-title-text tspan").all_text_contents())
        if "mpirun" not in command:
            continue
        tried += 1
        predicted, shown = predicted_memory(command, chosen["precision"]), shown_memory(page)
        stages = ["first stage", "last stage"][: min(2, int(chosen["pp"]))]
        of_tensors = {stage: {purpose: bytes_[purpose] for purpose in PURPOSES} for stage, bytes_ in shown.items()}
        good = not isinstance(predicted, str) and of_tensors == {stage: predicted[stage] for stage in stages}
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
    expect(0 < len(zoomed) < len(before) / 4, f"timeline: the keyboard zooms, {len(before)} bars to {len(zoomed)}")
    page.locator("#losses select").focus()
    page.keyboard.press("ArrowDown")
    page.wait_for_timeout(300)
    expect(page.locator("#losses select").input_value() == "01", "losses: the keyboard chooses a run")


def check_refusals(folder):
    """A log that can not be read is refused in one line, and an older page stays."""
    page, log = pathlib.Path(folder, "page.html"), pathlib.Path(folder, "log.json")
    page.write_text("older")
    whole = next(page_file.parent.glob("runs/*.json")).read_text()
    for what, text in (
        ("no file", None),
        ("no JSON", "{"),
        ("another JSON", "[1]"),
        ("a run that was killed", whole[: whole.index('{"step":3')]),
    ):
        log.unlink(missing_ok=True)
        if text is not None:
            log.write_text(text)
        done = subprocess.run(
            ["build/python-report/bin/python", "common/report/report.py", page, builds, log], capture_output=True, text=True
        )
        good = done.returncode == 2 and done.stderr.count("\n") == 1 and page.read_text() == "older"
        expect(good, f"{what}: status {done.returncode}: {done.stderr.strip()[-150:]}")


with tempfile.TemporaryDirectory() as folder:
    check_refusals(folder)
with sync_playwright() as playwright:
    browser = playwright.chromium.launch(executable_path=shutil.which("chromium") or shutil.which("chromium-browser"))
    page = browser.new_page(viewport={"width": 1200, "height": 1000}, offline=True)
    messages = []
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.on(
        "request",
        lambda request: None if request.url.startswith(("file:", "data:", "blob:")) else messages.append(request.url),
    )
    page.goto(page_file.as_uri())
    page.wait_for_function(
        "figures => figures.every(name => document.querySelector('#' + name + ' svg .mark-rect, #' + name + ' svg .mark-symbol'))",
        arg=FIGURES,
        timeout=60000,
    )
    for figure in FIGURES:
        count = len(marks(page, figure))
        expect(count > 5, f"{figure}: {count} marks")
        page.locator("#" + figure).screenshot(path=page_file.parent / f"{figure}.png")
    expect(page.locator("#runs tr").count() == 6, "the table has a row for each of the five runs")
    check_choices(page)
    check_calculator(page)
    expect(not messages, f"no message: {messages[:3]}")
    browser.close()

print(f"{passed} passed, {failed} failed")
sys.exit(failed > 0)
