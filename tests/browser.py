"""What the tests share that open pages in a browser without a window (report.py, book.py)."""

import shutil
import sys

messages = []  # of all consoles, and what pages ask a network for
counts = {True: 0, False: 0}


def expect(good, what):
    counts[bool(good)] += 1
    print(("ok      " if good else "FAILED  ") + what, flush=True)


def chromium(playwright):
    return playwright.chromium.launch(
        executable_path=shutil.which("chromium") or shutil.which("chromium-browser")
    )


def watched_page(browser, width, height, phone=False):
    """A page without a network, which notes messages."""
    page = browser.new_page(viewport={"width": width, "height": height}, is_mobile=phone, offline=True)
    local = ("file:", "data:", "blob:", "about:")
    page.on("console", lambda message: messages.append(f"{page.url}: {message.text}"))
    page.on("pageerror", lambda error: messages.append(f"{page.url}: {error}"))
    page.on("request", lambda request: request.url.startswith(local) or messages.append(request.url))
    return page


# Of each text that these places have themselves its colour and the colour under it: of the bar or the tile that it is on,
# else of what it stands in, one over the other.
TEXTS = """places => {
  const parse = color => { const [r, g, b, a = 1] = color.match(/[\\d.]+/g).map(Number); return [r, g, b, a]; };
  const over = (top, below) => [0, 1, 2].map(i => top[3] * top[i] + (1 - top[3]) * below[i]);
  const under = one => {
    const layers = [];
    for (; one; one = one.parentElement) layers.unshift(parse(getComputedStyle(one).backgroundColor));
    return layers.reduce((below, top) => over(top, below), [255, 255, 255]);
  };
  const bars = [...document.querySelectorAll('svg .mark-rect.role-mark path')].map(bar => [bar, bar.getBoundingClientRect()]);
  const found = {};
  for (const text of document.querySelectorAll(places)) {
    if (![...text.childNodes].some(node => node.nodeType === 3 && node.data.trim()) || !text.checkVisibility()) continue;
    const box = text.getBoundingClientRect(), x = (box.left + box.right) / 2, y = (box.top + box.bottom) / 2;
    const bar = text.closest('.role-mark') &&
      bars.find(([, at]) => at.left <= x && x <= at.right && at.top <= y && y <= at.bottom);
    const style = getComputedStyle(text), ground = bar ? parse(getComputedStyle(bar[0]).fill).slice(0, 3) : under(text);
    const ink = over(parse(text.closest('svg') ? style.fill : style.color), ground);
    found[[ink, ground]] = [ink, ground, text.textContent.slice(0, 20)];
  }
  return Object.values(found);
}"""


def expect_readable(page, places, what):
    """Each text has 4.5 times the luminance of what is under it, or the inverse (WCAG 2, AA)."""

    def luminance(color):
        parts = [(c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4) for c in color]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2] + 0.05

    texts = []
    for ink, ground, text in page.evaluate(TEXTS, places):
        bright, dark = sorted((luminance(ink), luminance(ground)), reverse=True)
        texts.append((bright / dark, ink, ground, text))
    good = len(texts) > 2 and min(texts)[0] >= 4.5
    expect(good, f"{what}: of {len(texts)} pairs of colours the closest is {min(texts, default=None)}")


def finish():
    expect(not messages, f"no message, and nothing asked of a network {messages[:3]}")
    print(f"{counts[True]} passed, {counts[False]} failed")
    sys.exit(counts[False] > 0)
