"""Slides of a stage:  slides.py FOLDER LANDSLIDE DECK...  (make slides)

A deck (slides/NN.md) is Markdown: slides stand between lines of dashes, and each has a title, a sentence, and one of

  <!-- figure NAME -->     the figure of a note that has this name, as the book draws it (common/report/drawings.py)
  <!-- run COMMAND -->     what the command prints, below it

FOLDER gets NN.html, which needs no network, and NN.md, of which Landslide made it. A command that fails, a figure that is not
there, or a slide of another form ends it with one line and status 2."""

import html
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "common" / "report"))
import drawings
from runs import Refused, end_in_one_line

WIDTH = 820  # of what a command prints, in pixels; a character is 0.61 of its size wide
STYLE = """div.slide { background: #fff; }
div.slide * { text-shadow: none; }
div.slide pre { line-height: 1.3; color: #111; }
div.slide svg { width: 100%; max-height: 480px; min-width: 0 !important; }
"""


def printed(command):
    environment = {**os.environ, "UCX_LOG_LEVEL": "error", "OMP_NUM_THREADS": "1", "LC_ALL": "C.UTF-8"}
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], cwd=ROOT, env=environment, text=True, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode not in (0, 141) or not done.stdout.strip():  # 141: head has seen enough
        raise Refused(f"{command}: status {done.returncode}: {(done.stdout.strip() or 'it prints nothing').splitlines()[-1]}")
    text = f"$ {command}\n{done.stdout.rstrip()}"
    size = min(18, WIDTH / 0.61 / max(map(len, text.splitlines())))  # the longest line fits
    return f'<pre style="font-size: {size:.1f}px">{html.escape(text)}</pre>'


def figure(name):
    for note in sorted(ROOT.glob("0*/*.md")):
        for found in drawings.FIGURE.finditer(note.read_text()):
            if found[2] == name:
                return f'<div class="drawing">{drawings.draw(note.relative_to(ROOT), found)[1]}</div>'
    raise Refused(f"figure {name} is not there; expected one of a note")


def pages_of(deck):
    """Its slides in Markdown, with what they show."""
    for number, text in enumerate(re.split(r"^---+\n", deck.read_text(), flags=re.M), 1):
        form = re.fullmatch(r"(# [^\n]+\n\n(.+?)\n\n)<!-- (run|figure) (.*?) -->", text.strip(), re.S)
        if not form or "\n\n" in form[2]:
            raise Refused(f"{deck}: slide {number} is not a title, a sentence and a figure")
        try:
            yield form[1] + (printed if form[3] == "run" else figure)(form[4]) + "\n"
        except Refused as error:
            raise Refused(f"{deck}: {error}") from None


def main(folder, landslide, *decks):
    folder = pathlib.Path(folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "style.css").write_text((ROOT / "common/report/book/style.css").read_text() + STYLE)
    for deck in map(pathlib.Path, decks):
        pages = list(pages_of(deck))
        (folder / deck.name).write_text("\n---\n\n".join(pages))
        (folder / "landslide.cfg").write_text(f"[landslide]\nsource = {deck.name}\ndestination = {deck.stem}.html\n"
                                              "css = style.css\nembed = True\nlinenos = no\n")
        subprocess.run([pathlib.Path(landslide).absolute(), "-q", "landslide.cfg"], cwd=folder,
                       check=True, stdout=subprocess.DEVNULL)
        print(f"{folder}/{deck.stem}.html: {len(pages)} slides", flush=True)


if __name__ == "__main__":
    end_in_one_line(main, *sys.argv[1:])
