"""What the book adds to MkDocs (book.yml), as hooks: the notes are its pages, where they are; so are the
sources, line by line. Names of files and functions lead there. A figure replaces the block behind its comment
(drawings.py). A picture that stands alone becomes a figure, too, so it follows the page's scheme (pictures.py
draws them). MathJax sets the formulas while the book is built: a reader's browser gets pictures. Beside the
book's folder, book.html is all of it in one file, to print or mail."""

import base64
import functools
import html
import pathlib
import posixpath
import re

import altair
import pygments
import pygments.formatters
import pygments.lexers
import vl_convert
from latex.converter import latex_to_svg
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, InclusionLevel

import drawings

ROOT = pathlib.Path(__file__).parents[2]
SECTIONS = {  # without what is for teachers, and the form that homework.py fills in
    "The stages": ["0*/README.md", "0*/*.md", "0*/*/*.md"],
    "Below the stages": ["common/*.md", "common/kernels/*.md", "common/cpu/README.md", "common/cpu/*/*.md"],
    "Homework and tests": ["tests/homework/README.md", "tests/homework/[cp]*.md", "tests/*.md"],
}
COURSE = "tests/homework/course.md"  # a learner's tree has none
ENDS = (
    ".h",
    ".cu",
    ".cc",
    ".py",
    ".sh",
    ".json",
    ".html",
    ".js",
)  # of sources; others that notes link to come with them
FENCED = re.compile(r"^( *```[^`]*```$|    [^\n]*|#[^\n]*)", re.MULTILINE)
CODE = re.compile(r"(?<!\[)`((?:\w+::)*[\w./]+?)(?:\(\))?(?::(\d+))?`(?!\])")
PICTURE = re.compile(r"^!\[([^\]]+)\]\((\S*?([\w-]+)\.svg)\)$", re.MULTILINE)
IN_LINE = re.compile(r"""(?<=[("])(?!https?:)[^\s()"]+\.svg(?=[)"])""")  # elsewhere, as in a table
INLINE, OPTION = (
    re.compile(r"(?<!<pre>)<code>[^<]*</code>"),
    re.compile(r"(?<=[ >\n])--?[\w-]+"),
)  # stays on one line
QUANTITY = re.compile(
    r"(?<=\d) (?=(?:[mµu]?s|min|%|[KMG]i?B)(?:[<,;:)]| \())"
)  # so does a number with its unit
FORMULA = re.compile(
    r'<(span|div) class="arithmatex">\\[([](.*?)\\[])]</\1>', re.DOTALL
)  # as Markdown leaves it
# A definition: a class; or a function, whose type is no word that begins a statement.
DEFINED = re.compile(
    r" *(?:(?:class|struct|enum class|enum) (\w+)\b[^;]*\{|(?!return |else |throw |delete |case )(?:[\w:<>,&*\[\]]+ )+[*&]?"
    r"(?:\w+::)*(\w+)\((?:[^;]*(?:[{,(]|const|override|= 0;)|.*\)[\w ]*\{.*\})$)"
)


class Book:
    """What one build knows."""

    def __init__(self):
        def find(globs):
            return list(
                dict.fromkeys(
                    p.relative_to(ROOT).as_posix() for glob in globs for p in sorted(ROOT.glob(glob))
                )
            )

        self.chapters = {name: find(globs) for name, globs in SECTIONS.items()}
        self.notes = ["README.md", *(note for notes in self.chapters.values() for note in notes)]
        sources = find(f"{top}/**/*{end}" for top in ("0*", "common", "tests") for end in ENDS)
        self.sources = [
            path for path in sources if not path.startswith(("tests/golden", "tests/homework/reference.json"))
        ]
        self.read = {path: (ROOT / path).read_text() for path in [*self.notes, *self.sources]}
        text = re.sub(r"^\[!\[.*\n", "", self.read["README.md"], flags=re.MULTILINE)  # GitHub's badges
        picture = r'^<img src="(\S+)" align="right" .*alt="(.*)">$'  # it stands beside the text there, and alone here
        text = re.sub(picture, r"![\2](\1)", text, flags=re.MULTILINE)
        self.read["README.md"] = re.sub(
            r"(!\[.*\n\n)(```(?:.|\n)*?```\n\n)", r"\2\1", text, count=1
        )  # commands first
        self.definitions = {}  # name: [(file, line)]
        for path in self.sources:
            if path.endswith((".h", ".cu", ".cc")) and not path.startswith("tests"):
                for number, line in enumerate(self.read[path].split("\n"), 1):
                    if found := DEFINED.match(line):
                        self.definitions.setdefault(found[1] or found[2], []).append((path, number))
        self.used_by = {}  # source: the notes that name it
        self.figures = {}  # name: HTML
        self.articles = {}  # note: its HTML, and its headings, for the single file
        version = ".".join(altair.SCHEMA_VERSION.lstrip("v").split(".")[:2])
        self.vega = vl_convert.javascript_bundle(vl_version=version)

    def source_of(self, note, name, line):
        """Where `name` or `name:line` in a note leads; None if it is not one place."""
        if "." in name:
            beside = posixpath.normpath(posixpath.join(posixpath.dirname(note), name))
            found = [path for path in self.sources if path == beside] or [
                path for path in self.sources if path == name or path.endswith("/" + name)
            ]
            return (found[0], line) if len(found) == 1 else None
        *scope, last = name.split("::")
        if "_" not in last.strip("_") and not re.search("[a-z][A-Z]", last) and not scope:
            return None
        found = self.definitions.get(last, [])
        if scope and len(classes := self.definitions.get(scope[-1], [])) == 1:
            found = [
                place
                for place in found
                if posixpath.splitext(place[0])[0] == posixpath.splitext(classes[0][0])[0]
            ]
        stage = note.split("/")[0] + "/"
        found = [place for place in found if place[0].startswith(stage)] or found
        if len({posixpath.splitext(path)[0] for path, _ in found}) == 1:
            found = [
                place for place in found if not place[0].endswith(".h")
            ] or found  # the body, not its declaration
        return found[0] if len(found) == 1 else None

    def link(self, note, path, line=None):
        """To a page of this source, or to the folder in the list of all. Throws PluginError if there is
        none."""
        if (ROOT / path).is_dir():
            listed = any(source.startswith(path + "/") for source in self.sources)
            target = f"code.md#{name_of(path if listed else '')}"
        elif (ROOT / path).is_file():
            if path not in self.read:
                self.sources.append(path)
                self.read[path] = (ROOT / path).read_text()
            self.used_by.setdefault(path, {})[note] = True
            target = page_of(path) + (f"#line-{line}" if line else "")
        else:
            raise PluginError(f"{note}: no file {path}")
        return posixpath.relpath(target, posixpath.dirname(note) or ".")

    def linked(self, note, text):
        """The text of the note, with links to sources: those that it has, and names in code."""

        def picture(path):
            try:
                return (ROOT / posixpath.dirname(note) / path).read_text()
            except OSError:
                raise PluginError(f"{note}: no picture {path}; expected one of make pictures") from None

        def alone(found):
            sentence, path, name = " ".join(found[1].split()), found[2], found[3]
            drawing = re.sub("<style>.*?</style>\n", "", picture(path), flags=re.DOTALL)
            drawing = drawing.replace("<svg ", f'<svg role="img" aria-label="{html.escape(sentence)}" ', 1)
            return self.figure(note, "picture-" + name, drawing, sentence)

        def in_line(found):
            return "data:image/svg+xml;base64," + base64.b64encode(picture(found[0]).encode()).decode()

        def in_text(found):
            target = posixpath.normpath(posixpath.join(posixpath.dirname(note), found[1].split("#")[0]))
            if found[1].startswith(("http", "#", "data:")) or target in self.notes:
                return found[0]
            line = re.search(r"#L(\d+)$", found[1])
            return f"]({self.link(note, target, line and line[1])})"

        def in_code(found):
            place = self.source_of(note, found[1], found[2])
            return f"[{found[0]}]({self.link(note, *place)})" if place else found[0]

        parts = FENCED.split(IN_LINE.sub(in_line, PICTURE.sub(alone, text)))
        for i in range(0, len(parts), 2):
            parts[i] = CODE.sub(in_code, re.sub(r"\]\(([^)\s]+)\)", in_text, parts[i]))
        return "".join(parts)

    def drawn(self, note, found):
        """Draws the figure of this comment."""
        try:
            kind, drawing, sentence = drawings.draw(note, found)
        except drawings.Refused as error:
            raise PluginError(str(error)) from None
        return self.figure(
            note, "figure-" + found[2], drawing, sentence, ' data-alive="steps"' if kind == "ring" else ""
        )

    def figure(self, note, name, drawing, sentence, attributes=""):
        """Keeps a figure. Returns what stands for it in the text, as HTML would be taken apart."""
        if name in self.figures:
            raise PluginError(f"{note}: there is another {name}")
        self.figures[name] = (
            f'<figure class="figure" id="{name}"{attributes}><div class="drawing" tabindex="0">{drawing}</div>'
            f"<figcaption>{html.escape(sentence)}</figcaption></figure>"
        )
        return f"\n%%{name}%%\n\n"


book = None


def on_config(config):
    global book
    book = Book()
    config.nav = [
        "README.md",
        *({name: notes} for name, notes in book.chapters.items()),
        {"The code": "code.md"},
        *([{"In class": "class.md"}] if COURSE in book.notes else []),
    ]
    return config


def on_files(files, config):
    markdown = {note: book.linked(note, book.read[note]) for note in book.notes}
    for note, text in markdown.items():
        text = markdown[note] = drawings.FIGURE.sub(lambda found: book.drawn(note, found), text)
        if "<!-- figure" in text:
            raise PluginError(
                f"{note}: {text[text.index('<!-- figure') :].splitlines()[0]} is not valid; expected its form"
            )
        text = re.sub(r"<details([^>]*)>", r'<details markdown="1" class="question"\1>', text)
        files.append(File.generated(config, note, content=text))
    if COURSE in book.notes:
        files.append(File.generated(config, "class.md", content=in_class(markdown)))
    for path in book.sources:
        notes = ", ".join(
            f"[{title_of(book.read[note])}]({posixpath.relpath(note, posixpath.dirname(page_of(path)) or '.')})"
            for note in book.used_by.get(path, ())
        )
        text = (
            f"---\nsearch: {{exclude: true}}\nhide: [toc]\ntitle: {posixpath.basename(path)}\n---\n# {path}\n"
        )
        text += f"\nNotes that name it: {notes}\n" if notes else ""
        files.append(File.generated(config, page_of(path), content=text, inclusion=InclusionLevel.NOT_IN_NAV))
    files.append(File.generated(config, "code.md", content=list_of_code()))
    files.append(File.generated(config, "vega.js", content=book.vega))
    return files


@functools.cache
def drawn_by_mathjax(tex, is_block):
    return latex_to_svg(tex, is_block).replace('role="img" focusable="false"', 'aria-hidden="true"')


def formula(page, tag, tex):
    """A screen reader says it as the note has it."""
    tex = html.unescape(tex).strip()
    drawing = drawn_by_mathjax(tex, tag == "div")
    if not drawing.startswith("<svg") or 'fill="red"' in drawing:
        raise PluginError(f"{page.file.src_uri}: MathJax can't set {tex!r}")
    scrolls = ' tabindex="0"' if tag == "div" else ""
    return f'<{tag} class="formula" role="math" aria-label="{html.escape(tex)}"{scrolls}>{drawing}</{tag}>'


def page_of(path):
    """Of a source. GitHub Pages leaves out hidden folders, so .github has no dot there."""
    return path.lstrip(".") + ".md"


def name_of(path):
    return re.sub(r"\W", "-", path) or "all"


def title_of(text):
    return re.search("^# (.*)", text, re.MULTILINE)[1]


def list_of_code():
    """A page with all sources, by folder."""
    folders = {"": None}
    for path in sorted(book.sources):
        folders.update(
            {
                str(parent): None
                for parent in reversed(pathlib.PurePosixPath(path).parents)
                if str(parent) != "."
            }
        )
    text = "---\nsearch: {exclude: true}\n---\n# The code\n"
    for folder in folders:
        text += f"\n## {folder or 'At the top'} {{ #{name_of(folder)} }}\n\n"
        inside = (path for path in sorted(book.sources) if posixpath.dirname(path) == folder)
        text += "".join(f"- [`{posixpath.basename(path)}`]({page_of(path)})\n" for path in inside)
    return text


def in_class(markdown):
    """For a lecture: of each week in the plan of a course the figures of its notes, one a screen, each with the next question
    of its note, or of its stage if the note has none."""
    text, shown = "---\nsearch: {exclude: true}\nhide: [navigation, toc]\n---\n# In class\n\n", set()
    text += f"For each week of [the course]({COURSE}): its figures, in order, and what to ask. Answers are in the notes.\n"
    weeks = r"^\| (\d+) \| (.*?) \| (.*?) \|"
    plan = re.search("^## Ten weeks$(.*?)^## ", book.read[COURSE], re.MULTILINE | re.DOTALL)[1]
    for week, before, taught in re.findall(weeks, plan, re.MULTILINE):
        until = re.search(r", to \*(.*?)\*", before)
        for note in book.notes:
            stage, _, name = note.partition("/")
            if (
                stage[:2] not in re.findall(r"\b0\d\b", f"{before} {taught}")
                or name != "README.md"
                and name not in before
            ):
                continue
            found, rest = (
                list(re.finditer(r"%%([\w-]+)%%|<summary>(.*?)</summary>", markdown[of], re.DOTALL))
                for of in (note, f"{stage}/README.md")
            )
            end = markdown[note].index(f"\n## {until[1]}") if until else len(markdown[note])
            for i, one in enumerate(found):
                if one[1] and one[1] not in shown and one.start() < end:
                    asked = [q[2] for q in [*found[i:], *found, *rest] if q[2] and q[2] not in shown][0]
                    shown |= {one[1], asked}
                    text += f'\n<section class="screen" markdown="1">\n\n## Week {week}: [{title_of(book.read[note])}]({note})\n'
                    text += f'\n%%{one[1]}%%\n\n<p class="asked">{asked}</p>\n\n</section>\n'
    return text


def on_page_content(content, page, config, files):
    if page.file.src_uri in (*book.notes, "class.md"):
        content = FORMULA.sub(lambda found: formula(page, *found.groups()), content)
        content = INLINE.sub(
            lambda found: OPTION.sub(r'<span class="option">\g<0></span>', found[0]), content
        )
        content = re.sub("<td.*?</td>", lambda found: QUANTITY.sub("&#160;", found[0]), content)
        content = re.sub(r"<p>%%([\w-]+)%%</p>", lambda found: book.figures[found[1]], content)
        if page.file.src_uri in book.notes:
            book.articles[page.file.src_uri] = content, page
        content = content.replace(
            "%%vega%%", posixpath.relpath("vega.js", posixpath.dirname(page.url) or ".")
        )
    elif path := {page_of(path): path for path in book.sources}.get(page.file.src_uri):
        content += highlighted(path)
    return content


def highlighted(path):
    """The file, each of whose lines has an anchor."""
    try:
        lexer = pygments.lexers.get_lexer_for_filename(path.replace(".cu", ".cc"), stripnl=False)
    except pygments.util.ClassNotFound:
        lexer = pygments.lexers.TextLexer(stripnl=False)
    options = {
        "cssclass": "highlight source",
        "linenos": "inline",
        "linespans": "line",
        "anchorlinenos": True,
        "lineanchors": "at",
    }
    text = pygments.highlight(book.read[path], lexer, pygments.formatters.HtmlFormatter(**options))
    return re.sub(
        r'<a href="#at-(\d+)">',
        r'<a href="#line-\1">',
        re.sub(r'<a id="at-\d+" name="at-\d+"></a>', "", text),
    )


# ---- The single file --------------------------------------------------------------------------------------------------


def on_post_build(config):
    """Writes book.html: the notes one after the other, then the sources that they name. Each anchor begins
    with its page."""
    lines = {}  # source: the lines that a link leads to
    by_url = {page.url: name_of(note) for note, (_, page) in book.articles.items()}
    sources = {page_of(path): path for path in book.used_by}

    def alone(note, content, page):
        def link(found):
            target, _, anchor = found[1].partition("#")
            if re.match(r"\w+:", target):
                return found[0]
            url = (
                posixpath.normpath(posixpath.join(posixpath.dirname(page.url), target))
                if target
                else page.url
            )
            if url in by_url:
                return f'href="#{by_url[url]}{"--" if anchor else ""}{anchor}"'
            path = sources.get(url.removesuffix(".html") + ".md")
            if not path:
                return 'href="#the-sources"'
            lines.setdefault(path, set()).update({int(anchor[5:])} if anchor else ())
            return f'href="#{name_of(path)}{"--" if anchor else ""}{anchor}"'

        content = re.sub(r'(?<= )id="([^"]+)"', rf'id="{name_of(note)}--\1"', content)
        return re.sub(r'href="([^"]*)"', link, content).replace('<script src="%%vega%%"></script>', "")

    def source(path):
        text = html.escape(book.read[path]).split("\n")
        for number in lines.get(path, ()):
            text[number - 1] = f'<span id="{name_of(path)}--line-{number}">{text[number - 1]}</span>'
        return f'<details id="{name_of(path)}"><summary><code>{path}</code></summary><pre>{chr(10).join(text)}</pre></details>'

    order = [(note, *book.articles[note]) for note in book.notes]
    sections = "".join(
        f'<section id="{name_of(note)}">{alone(note, content, page)}</section>'
        for note, content, page in order
    )
    contents = "".join(
        f'<li><a href="#{name_of(note)}">{html.escape(title_of(book.read[note]))}</a><ul>'
        + "".join(
            f'<li><a href="#{name_of(note)}--{item.id}">{item.title}</a></li>'
            for top in page.toc
            for item in top.children
        )
        + "</ul></li>"
        for note, _, page in order
    )
    site = pathlib.Path(config.site_dir)
    styles = "".join(
        re.sub(r"@charset[^;]*;|/\*#.*?\*/", "", path.read_text())
        for path in [
            *sorted(site.glob("assets/stylesheets/*.css")),
            site / "drawings.css",
            site / "style.css",
        ]
    )
    text = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f'<title>Pentatron</title><link rel="icon" href="data:,"><style>{styles}</style></head>'
        f'<body dir="ltr" data-md-color-scheme="default" data-md-color-primary="indigo"><script>const dark = matchMedia("screen and (prefers-color-scheme: dark)"), '
        f'paint = () => document.body.dataset.mdColorScheme = dark.matches ? "slate" : "default"; dark.onchange = paint; paint();</script>'
        f'<main class="whole md-typeset"><nav aria-label="Contents"><h1>Pentatron</h1><ul>{contents}</ul></nav>{sections}'
        f'<section id="the-sources"><h1>The sources that the notes name</h1>{"".join(map(source, sorted(book.used_by)))}</section></main>'
        f"<script>{book.vega}</script><script>{(site / 'figures.js').read_text()}</script></body></html>"
    )
    site.with_suffix(".html").write_text(text)
