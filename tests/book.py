"""Opens the book in a browser without a window:  python book.py BUILDS.  BUILDS has book/, book.html and
cpu-fp32 with 05_pipeline_parallel. No link is dead, the console stays empty, nothing outside is asked for;
every figure has its sentence, every formula is set, and pages fit a computer and a phone. The pictures are what pictures.py draws
today, and none is missing. What the live figures show is compared with the programs. The last line is "N
passed, N failed"."""

import html
import pathlib
import posixpath
import random
import re
import subprocess
import sys
import tempfile
import urllib.parse

from playwright.sync_api import Error, sync_playwright

from browser import chromium, expect, expect_readable, finish, watched_page

builds = pathlib.Path(sys.argv[1]).resolve()
book, whole = builds / "book", builds / "book.html"
LEAST_FIGURES, LEAST_FORMULAS = 20, 500
PICTURES = sorted(pathlib.Path(".github/pictures").glob("*.svg"))
ICONS = [path for path in PICTURES if path.name.startswith("icon-")]
draw = random.Random(7)


def check_links(pages):
    """Each link of a page leads to a file of the book, and to an anchor in it."""
    text = {page.relative_to(builds).as_posix(): page.read_text() for page in pages}
    anchors = {name: set(re.findall(r'\bid="?([^" >]+)', page)) for name, page in text.items()}
    links, dead, outside = 0, [], []
    for name, page in text.items():
        page = re.sub(
            r"<script\b.*?</script>", lambda found: found[0].split(">")[0] + ">", page, flags=re.DOTALL
        )
        for tag, target in set(re.findall(r'<(\w+)\b[^>]*? (?:href|src)="([^"]*)"', page)):
            target = urllib.parse.unquote(html.unescape(target))
            if re.match(r"(https?|mailto):|//", target):
                outside += [] if tag == "a" else [f"{name}: {target}"]
                continue
            if (
                target.startswith("data:") or posixpath.basename(name) == "404.html"
            ):  # whose links begin at the root of a server
                continue
            links += 1
            path, _, anchor = target.partition("#")
            path = posixpath.normpath(posixpath.join(posixpath.dirname(name), path)) if path else name
            if not (builds / path).is_file() or anchor and path in anchors and anchor not in anchors[path]:
                dead.append(f"{name}: {target}")
    expect(
        links > 1000 and not dead, f"{links} links in {len(text)} pages, {len(dead)} of them dead {dead[:5]}"
    )
    expect(not outside, f"pages ask for nothing outside {outside[:5]}")
    hidden = [str(path) for path in book.rglob(".*")]
    expect(not hidden, f"no folder of the book is hidden: GitHub Pages would leave it out {hidden[:5]}")


FIGURES = """() => [...document.querySelectorAll('figure')].map(figure => {
  const drawing = figure.querySelector('svg'), box = drawing?.getBoundingClientRect();
  return [figure.querySelector('svg[aria-label], .alive[aria-label]')?.ariaLabel || '',
    box ? box.width * box.height * drawing.querySelectorAll('rect, path, line, text').length : 0];
})"""


# Formulas that are not drawn, or too small (an ex has 7 pixels), or have no words; and what looks like TeX in the text.
BAD_FORMULAS = """() => [
  ...[...document.querySelectorAll('.formula')].filter(one => !one.ariaLabel || one.innerText.trim() ||
    one.checkVisibility() && !(one.querySelector('svg')?.getBoundingClientRect().width >
      4.5 * parseFloat(one.querySelector('svg')?.getAttribute('width')))).map(one => one.outerHTML.slice(0, 80)),
  ...[...document.querySelectorAll('article p, article li, article td')].map(one => {
    const copy = one.cloneNode(true);
    copy.querySelectorAll('code, pre, .drawing, script, summary').forEach(part => part.remove());
    return copy.textContent.match(/\\$[^$]+\\$|\\\\[a-z(\\[]+/)?.[0];
  }).filter(Boolean)]"""


def check_page(page, path, width):
    """It fits the window; its formulas are set; its figures are drawn, and named. Returns how many figures
    and formulas there are."""
    page.goto(path.as_uri())
    page.wait_for_function("[...document.querySelectorAll('.alive')].every(one => one.querySelector('svg'))")
    wide = page.evaluate("document.documentElement.scrollWidth")
    figures = page.evaluate(FIGURES)
    unset = page.evaluate(BAD_FORMULAS)
    poor = [label for label, size in figures if len(label) < 30 or size < 10000]
    if wide > width or poor or unset:
        expect(
            False,
            f"{path.relative_to(builds)}: {wide} pixels wide in a window of {width}; figures without text or picture: {poor}; formulas that are not set: {unset[:5]}",
        )
    return len(figures), page.locator(".formula").count()


def check_pictures(pages):
    """Each is what is drawn today. But for icons, each stands on a page and in the single file."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([builds / "python-book/bin/python", "common/report/pictures.py", folder], check=True)
        drawn = sorted(path.name for path in pathlib.Path(folder).iterdir())
        expect(drawn == [path.name for path in PICTURES] and len(drawn) == 19, f"pictures: {' '.join(drawn)}")
        for path in PICTURES:
            same = path.read_bytes() == pathlib.Path(folder, path.name).read_bytes()
            shown = sum(f'id="picture-{path.stem}"' in page.read_text() for page in pages)
            in_one = len(re.findall(f'id="[^"]*--picture-{path.stem}"', whole.read_text()))
            good = same and path.stat().st_size < 60000 and shown == in_one == (path not in ICONS)
            expect(
                good,
                f"{path}: {path.stat().st_size} bytes, {'as' if same else 'not what'} make pictures draws; on {shown} page",
            )


def check_front(page, width):
    """The first screen has the two commands; the stages' pictures stay wide enough to see, and have no text."""
    page.goto((book / "index.html").as_uri())
    low = page.get_by_text("make test").first.bounding_box()
    widths = page.locator("td img").evaluate_all("all => all.map(one => one.getBoundingClientRect().width)")
    expect(
        low and low["y"] < 600 and len(widths) == len(ICONS) and min(widths) >= 100,
        f"{width} pixels: make test stands at {low and low['y']}, pictures are {set(widths)} wide",
    )
    expect(not any("<text" in path.read_text() for path in ICONS), f"{len(ICONS)} pictures without text")


def check_class(page):
    """For each week its figures, one a screen, with a question."""
    page.goto((book / "class.html").as_uri())
    page.wait_for_function("[...document.querySelectorAll('.alive')].every(one => one.querySelector('svg'))")
    screens = page.locator(".screen").evaluate_all(
        """all => all.map(one => [one.querySelector('h2').innerText, one.querySelectorAll('figure').length,
          one.querySelector('.asked').innerText, one.getBoundingClientRect().height])"""
    )
    weeks = [int(re.match(r"Week (\d+): ", title)[1]) for title, *_ in screens]
    expect(weeks == sorted(weeks) and len(set(weeks)) >= 8, f"figures of weeks {weeks}")
    expect(len({asked for _, _, asked, _ in screens}) == len(screens), f"{len(screens)} questions")
    bad = [(title, figures, high) for title, figures, _, high in screens if figures != 1 or high > 910]
    expect(not bad, f"each figure of a week has a screen of 900 pixels {bad}")


def check_schedule(page):
    """Time and bubble of the reader's schedule are what the program says; with the reader's costs, what the
    formula says."""
    page.goto((book / "05_pipeline_parallel" / "index.html").as_uri())
    box = page.locator("[data-alive=schedule]")
    names = box.locator("select[name=name] option").all_text_contents()
    expect(len(names) == 7, f"schedules to choose from: {' '.join(names)}")

    def slide(name, value):
        box.locator(f"input[name={name}]").evaluate(
            "(one, value) => { one.value = value; one.dispatchEvent(new Event('input')); }", value
        )

    for name in names:
        box.locator("select[name=name]").select_option(name)
        for place, p in enumerate((2, 4)):
            slide("p", place)
            slide("m", 1)  # 8 micro-batches
            command = [
                builds / "cpu-fp32" / "05_pipeline_parallel",
                "--show-schedule",
                "--pp",
                p,
                "--micro-batch-size",
                1,
            ]
            command += ["--global-batch-size", 8, "--layers", 16, "--pp-schedule", name]
            said = subprocess.run([str(word) for word in command], capture_output=True, text=True).stdout
            program = re.search(r"Time ([\d.]+) = work ([\d.]+) \+ bubble ([\d.]+)", said)
            shown = re.search(r"time ([\d.]+) = work ([\d.]+) \+ bubble ([\d.]+)", box.inner_text())
            good = program and shown and program.groups() == shown.groups()
            expect(
                good,
                f"{name}, {p} ranks: {shown and shown[0]}"
                + ("" if good else f", not {program and program[0]}"),
            )
    box.locator("select[name=name]").select_option("afab")
    *costs, message = *draw.choices([0.5, 1, 1.5, 2], k=3), draw.choice([0.1, 0.2])
    for letter, cost in zip("FBWT", [*costs, message]):
        slide(letter, cost)
    bubble = f"bubble {3 * (sum(costs) + 2 * message):.4g}"
    expect(bubble in box.inner_text(), f"afab, 4 ranks, costs {costs} and {message} for a message: {bubble}")
    before = box.locator(".later").count()
    for _ in range(8):  # with costs of messages the ends lie close together
        box.get_by_role("button", name="◀ step").click()
    expect(
        before < box.locator(".later").count() and "until" in box.inner_text(),
        "a step back hides what has not begun",
    )


def check_alive(page):
    page.goto((book / "02_data_parallel" / "index.html").as_uri())
    ring = page.locator("[data-alive=steps]")
    shown = [ring.locator("[data-step].later").count()]
    for _ in range(5):
        ring.get_by_role("button", name="step ▶").click()
        shown.append(ring.locator("[data-step].later").count())
    expect(shown == [0, 4, 3, 2, 1, 0], f"the ring goes step by step: {shown} rows are hidden")
    page.goto((book / "03_zero" / "index.html").as_uri())
    chart = page.locator("[data-alive=chart]")
    bars = "all => all.map(bar => bar.ariaLabel)"
    marks = chart.locator("[aria-roledescription=bar]")
    marks.first.wait_for()
    before = marks.evaluate_all(bars)
    chart.locator("select[name=model]").select_option("llama-3.2-1b")
    page.wait_for_function(
        "before => document.querySelector('[data-alive=chart] [aria-roledescription=bar]').ariaLabel !== before",
        arg=before[0],
    )
    expect(
        len(before) == 4 * 9 * 3 and marks.evaluate_all(bars) != before,
        f"ZeRO's memory: {len(before)} bars, others for another model",
    )


def check_code(page):
    """A link to a line shows the file, with this line marked."""
    page.goto((book / "03_zero" / "index.html").as_uri())
    link = page.locator("a[href*='zero.h.html#line-']").first
    number = re.search(r"line-(\d+)", link.get_attribute("href"))[1]
    link.click()
    of = "one => getComputedStyle(one).backgroundColor"
    line = page.locator(f"#line-{number}")
    text = pathlib.Path("03_zero/zero.h").read_text().split("\n")[int(number) - 1].strip()
    marked = line.evaluate(of) != page.locator(f"#line-{int(number) + 1}").evaluate(of)
    expect(
        marked and text in line.inner_text() and line.is_visible(),
        f"zero.h:{number} is shown and marked: {text[:50]}",
    )
    expect(page.locator("article a[href*='index.html']").count() > 0, "a source leads back to its notes")


# What people call it, and a title that the search then has.
SOUGHT = {
    "bubble": "pipeline",
    "OOM": "Other words",
    "out of memory": "Memory",
    "FSDP": "Other words",
    "sharding": "Other words",
    "NCCL timeout": "Other words",
}


def check_search(page):
    page.goto((book / "index.html").as_uri())
    page.locator(".md-search__input").click()
    for words, title in SOUGHT.items():
        page.locator(".md-search__input").fill("")
        page.keyboard.type(words)
        first = page.locator(".md-search-result__item").filter(has_text=title)
        first.first.wait_for()
        expect(first.count() > 0, f"the search for {words} finds {title}, without a server")


LIGHT = """one => {
  const canvas = document.createElement('canvas').getContext('2d');
  canvas.fillStyle = getComputedStyle(one).fill;
  canvas.fillRect(0, 0, 1, 1);
  return canvas.getImageData(0, 0, 1, 1).data.slice(0, 3).reduce((a, b) => a + b);
}"""


PROSE = ":is(article, main.whole) :is(h1, h2, h3, p, li, a:not(.headerlink), td, th, code, summary, strong, em, figcaption), .md-nav__link *"


def check_scheme(page):
    grounds = []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        for path in (book / "index.html", whole):
            page.goto(path.as_uri())
            grounds.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        for path in (book / "05_pipeline_parallel/index.html", book / "03_zero/zero.h.html", whole):
            page.goto(path.as_uri())
            expect_readable(page, PROSE, f"{path.relative_to(builds)}, {scheme}")
    expect(
        grounds[0] != grounds[2] and grounds[1] != grounds[3], f"pages follow the reader's scheme: {grounds}"
    )
    page.goto((book / "05_pipeline_parallel" / "index.html").as_uri())
    first, later = (
        page.locator(f"#picture-05-schedules .f.pass{which}").nth(5).evaluate(LIGHT)
        for which in (":not(.pale)", ".pale")
    )
    expect(first < later, f"a later chunk is paler on dark ground: {first} < {later}")
    page.emulate_media(color_scheme="light")


def check_refusals():
    """A figure that can't be drawn ends the build with one line."""
    script = "import sys; sys.path.insert(0, 'common/report'); import drawings\ntry: drawings.draw('note', drawings.FIGURE.match(sys.argv[1]))\nexcept drawings.Refused as e: print(e)"
    for what, text in (
        ("no such kind", "<!-- figure nothing name\nA sentence. -->\n"),
        ("no sentence", "<!-- figure lanes name\n-->\n```\na [ b ]\n```\n"),
        (
            "a program that refuses",
            "<!-- figure orders name\n$ build/cpu-fp32/05_pipeline_parallel --no-such-option\nA sentence. -->\n",
        ),
        ("no such program", "<!-- figure timeline name\n$ build/nothing\nA sentence. -->\n"),
    ):
        done = subprocess.run(
            [builds / "python-book/bin/python", "-c", script, text], capture_output=True, text=True
        )
        expect(
            done.stdout.count("\n") == 1 and "note: " in done.stdout and not done.stderr,
            f"{what}: {done.stdout.strip()[:120]}{done.stderr[-100:]}",
        )


def in_nav():
    """The pages of the notes, in the order of the book."""
    found = re.findall(r'<a href="([^"#]+)" class="md-nav__link', (book / "index.html").read_text())
    return [
        book / path
        for path in dict.fromkeys(
            ["index.html", *(path for path in found if not path.startswith(("http", "class")))]
        )
    ]


check_refusals()
check_links([*sorted(book.rglob("*.html")), whole])
notes = in_nav()
check_pictures(notes)
expect(len(notes) > 15, f"{len(notes)} pages in the table of contents")
titles = re.findall(
    r'md-nav__link[^>]*>\s*<span class="md-ellipsis">\s*(\d\d):', (book / "index.html").read_text()
)
expect(
    sorted(set(titles)) == [f"0{stage}" for stage in range(1, 8)], f"stages that it names: {' '.join(titles)}"
)
with sync_playwright() as playwright:
    browser = chromium(playwright)
    for width, phone in ((1280, False), (375, True)):
        page = watched_page(browser, width, 900, phone)
        page.set_default_timeout(120000)
        code = book / "03_zero" / "zero.h.html"
        figures, formulas = map(sum, zip(*(check_page(page, path, width) for path in [*notes, code])))
        good = figures >= LEAST_FIGURES and formulas >= LEAST_FORMULAS
        expect(good, f"{figures} figures and {formulas} formulas in the book, {width} pixels wide")
        check_front(page, width)
        in_one = check_page(page, whole, width)
        titles = page.locator("main > section").count()
        expect(
            in_one == (figures, formulas) and titles == len(notes),
            f"the single file has {in_one} figures and formulas, {titles} notes and sources",
        )
        if not phone:
            for check in (check_class, check_schedule, check_alive, check_code, check_search, check_scheme):
                try:
                    check(page)
                except Error as error:
                    expect(False, f"{check.__name__}: {str(error).splitlines()[0]}")
        page.close()
    browser.close()
finish()
