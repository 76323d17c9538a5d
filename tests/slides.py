"""Opens the decks of make slides in a browser without a window:  slides.py FOLDER.  Each slide must be there with a title, a
sentence and a figure that has marks or words; all of it must lie on the slide. The console must stay empty, and nothing may
come from elsewhere. The last line is "N passed, N failed"."""

import pathlib
import sys

from playwright.sync_api import sync_playwright

from browser import chromium, counts, expect, finish, watched_page

# What is wrong with each slide, in words.
JUDGE = """() => [...document.querySelectorAll('.slide')].map(slide => {
  const title = slide.querySelector('h1'), figure = slide.querySelector('pre, svg');
  if (!title || !slide.querySelector('p') || !figure) return 'no title, sentence or figure';
  const text = figure.innerText || figure.querySelector('text') && figure.ariaLabel;
  if (!text) return title.innerText + ': an empty figure';
  const paper = slide.getBoundingClientRect(), below = slide.querySelector('p').getBoundingClientRect();
  if (title.getBoundingClientRect().bottom > below.top + 5) return title.innerText + ': the title lies on the sentence';
  const beyond = [...slide.querySelectorAll('h1, p, pre, svg')].filter(e => {
    const place = e.getBoundingClientRect();
    return place.right > paper.right + 1 || place.bottom > paper.bottom + 1 || e.scrollWidth > e.clientWidth + 1;
  });
  return beyond.length ? title.innerText + ': does not fit (' + beyond.map(e => e.tagName) + ')' : '';
})"""


with sync_playwright() as playwright:
    browser = chromium(playwright)
    for deck in sorted(pathlib.Path(sys.argv[1]).resolve().glob("*.html")):
        page = watched_page(browser, 1280, 800)
        page.goto(deck.as_uri())
        verdicts = page.evaluate(JUDGE)
        for number, wrong in enumerate(verdicts, 1):
            expect(not wrong, f"{deck.stem}, slide {number} {wrong}")
        expected = deck.with_suffix(".md").read_text().count("\n---\n") + 1
        expect(len(verdicts) == expected, f"{deck.stem}: {len(verdicts)} slides of {expected}")
        page.close()
    browser.close()
expect(counts[True] > 0, "there are slides")
finish()
