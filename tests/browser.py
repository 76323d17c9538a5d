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


def finish():
    expect(not messages, f"no message, and nothing asked of a network {messages[:3]}")
    print(f"{counts[True]} passed, {counts[False]} failed")
    sys.exit(counts[False] > 0)
