"""Slides of a stage:  slides.py FOLDER LANDSLIDE DECK...  (make slides)

A deck (slides/NN.md) is Markdown: slides stand between lines of dashes, and each has a title, a sentence, and a figure that is
made now:

  <!-- run COMMAND -->             what the command prints, below it
  <!-- svg COMMAND -->             the picture that it writes into the file {}
  <!-- note FILE: HEADING -->      the first block of code below this heading of a note;  HEADING, 2: the second

FOLDER gets NN.md, plain Markdown beside its figures, and NN.html, which needs no network. A command that fails, a heading that is
not there, or a slide of another form ends it with one line and status 2."""

import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
WIDTH = 820  # of a figure, in pixels; a character is 0.61 of its size wide
STYLE = """div.slide { background: #fff; }
div.slide * { text-shadow: none; }
div.slide pre, div.slide pre * { font-size: inherit; line-height: 1.3; color: #111; }
div.slide img { width: 100%; max-height: 480px; }
"""


class Refused(Exception):
    """One line."""


def printed(command, where):
    environment = {**os.environ, "UCX_LOG_LEVEL": "error", "OMP_NUM_THREADS": "1", "LC_ALL": "C.UTF-8"}
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], cwd=ROOT, env=environment, text=True, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode not in (0, 141) or not done.stdout.strip():  # 141: head has seen enough
        raise Refused(f"{where}: status {done.returncode}: {(done.stdout.strip() or 'it prints nothing').splitlines()[-1]}")
    return done.stdout.rstrip()


def block(text):
    return "\n".join("    " + line.rstrip() for line in text.splitlines())


def figure(kind, text, sentence, where, picture):
    if kind == "run":
        return block(f"$ {text}\n{printed(text, f'{where}: {text}')}")
    if kind == "svg":
        printed(text.replace("{}", str(picture)), f"{where}: {text}")
        drawn = picture.read_text()  # with a viewBox it fits any width
        picture.write_text(re.sub(r"width='(\d+)' height='(\d+)'", r"viewBox='0 0 \1 \2'", drawn, count=1))
        return f"![{sentence}]({picture.name})"
    file, heading, number = re.fullmatch(r"(.+?): (.+?)(?:, (\d))?", text).groups()
    section = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#+ |\Z)", (ROOT / file).read_text(), re.M | re.S)
    blocks = re.findall(r"^```\n(.*?)^```", section[1] if section else "", re.M | re.S)
    if len(blocks) < int(number or 1):
        raise Refused(f"{where}: {file} has no such block of code below {heading}")
    return block(blocks[int(number or 1) - 1])


def slides_of(deck):
    """[(title, sentence, kind of figure, its text)]"""
    slides = []
    for number, text in enumerate(re.split(r"^---+\n", deck.read_text(), flags=re.M), 1):
        form = re.fullmatch(r"# ([^\n]+)\n\n(.+?)\n\n<!-- (run|svg|note) (.*?) -->", text.strip(), re.S)
        if not form or "\n\n" in form[2]:
            raise Refused(f"{deck}: slide {number} is not a title, a sentence and a figure")
        slides.append((form[1], " ".join(form[2].split()), form[3], form[4]))
    return slides


def main(folder, landslide, *decks):
    folder = pathlib.Path(folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for deck in map(pathlib.Path, decks):
        pages = [f"# {title}\n\n{sentence}\n\n{figure(kind, text, sentence, deck, folder / f'{deck.stem}-{number}.svg')}\n"
                 for number, (title, sentence, kind, text) in enumerate(slides_of(deck), 1)]
        (folder / deck.name).write_text("\n---\n\n".join(pages))
        sizes = [min(18, WIDTH / 0.61 / max(map(len, page.splitlines()[4:]))) for page in pages]  # the longest line fits
        (folder / "style.css").write_text(STYLE + "".join(
            f"div.slide-wrapper:nth-child({n}) pre {{ font-size: {size:.1f}px; }}\n" for n, size in enumerate(sizes, 1)))
        (folder / "landslide.cfg").write_text(f"[landslide]\nsource = {deck.name}\ndestination = {deck.stem}.html\n"
                                              "css = style.css\nembed = True\nlinenos = no\n")
        subprocess.run([pathlib.Path(landslide).absolute(), "-q", "landslide.cfg"], cwd=folder,
                       check=True, stdout=subprocess.DEVNULL)
        print(f"{folder}/{deck.stem}.html: {len(pages)} slides", flush=True)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except Refused as error:
        print(error, file=sys.stderr)
        sys.exit(2)
