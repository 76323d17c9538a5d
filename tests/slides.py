"""Opens the decks of make slides in a browser without a window:  slides.py FOLDER.  Each slide must be there with a title, a
sentence and a figure that has marks or words; all of it must lie on the slide. The console must stay empty, and nothing may
come from elsewhere. The last line is "N passed, N failed", of slides."""

import pathlib
import shutil
import sys

from playwright.sync_api import sync_playwright

# What is wrong with each slide, in words.
JUDGE = """() => [...document.querySelectorAll('.slide')].map(slide => {
  const title = slide.querySelector('h1'), figure = slide.querySelector('pre, img');
  if (!title || !slide.querySelector('p') || !figure) return 'no title, sentence or figure';
  const text = figure.innerText || figure.alt;
  if (!text || figure.tagName == 'IMG' && !figure.naturalWidth) return title.innerText + ': an empty figure';
  const paper = slide.getBoundingClientRect();
  const beyond = [...slide.querySelectorAll('h1, p, pre, img')].filter(e => {
    const place = e.getBoundingClientRect();
    return place.right > paper.right + 1 || place.bottom > paper.bottom + 1 || e.scrollWidth > e.clientWidth + 1;
  });
  return beyond.length ? title.innerText + ': does not fit (' + beyond.map(e => e.tagName) + ')' : '';
})"""


def main(folder):
    passed = failed = 0
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for deck in sorted(pathlib.Path(folder).resolve().glob("*.html")):
            page, said = browser.new_page(viewport={"width": 1280, "height": 800}), []
            page.on("console", lambda message: said.append(message.text))
            page.on("pageerror", lambda error: said.append(str(error)))
            page.on("request", lambda request: request.url.startswith(("file:", "data:")) or said.append(f"asks for {request.url}"))
            page.goto(deck.as_uri())
            verdicts = page.evaluate(JUDGE)
            expected = (deck.with_suffix(".md")).read_text().count("\n---\n") + 1
            wrong = [v for v in verdicts if v] + said
            wrong += [f"{len(verdicts)} slides, and not {expected}"] * (len(verdicts) != expected)
            for what in wrong:
                print(f"FAILED: {deck.name}: {what}")
            passed, failed = passed + len(verdicts) - min(len(wrong), len(verdicts)), failed + len(wrong)
            page.close()
        browser.close()
    print(f"{passed} passed, {failed} failed")
    return failed > 0 or passed == 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
