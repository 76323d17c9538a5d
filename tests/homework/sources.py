"""The exercises (exercises.txt), the known mistakes (mutants.txt), and function bodies in C++ text: where a
body begins and ends, what replaces it, and what a submitted body may not contain."""

import contextlib
import json
import os
import pathlib
import re
import subprocess
import textwrap
import time
from dataclasses import dataclass, field

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent


class UsageError(Exception):
    """A request that can't be met. Its one line is printed, and the exit status is 2."""


def check_id(identity):
    if not re.fullmatch(r"[\w.@-]{1,64}", identity or ""):
        raise UsageError(
            f"ID: {identity or 'not given'} is not valid; expected letters, digits, or any of . @ - _"
        )
    return identity


@dataclass
class Run:
    name: str
    ranks: int
    options: list
    program: str
    hidden: list  # options of a teacher's run beside them


@dataclass
class Exercise:
    number: str
    title: str = ""
    stars: int = 1
    points: int = 0
    file: str = ""
    bodies: list = field(default_factory=list)  # the beginnings of functions
    runs: list = field(default_factory=list)  # names
    read: str = ""
    core: dict = field(default_factory=dict)  # of a core exercise its texts (core.txt), otherwise empty


@dataclass
class Stage:
    number: str
    program: str
    runs: dict = field(default_factory=dict)  # name: Run
    exercises: dict = field(default_factory=dict)  # number: Exercise
    tests: str = ""
    asked: list = field(default_factory=list)  # numbers of exercises, and of PARTS

    def to_write(self):
        """The exercises that are asked; of the others the tree has the bodies."""
        return {n: e for n, e in self.exercises.items() if n in self.asked}

    def possible(self):
        """Points that there are for what is asked."""
        return sum(self.exercises[a].points if a in self.exercises else PARTS[a] for a in self.asked)


PARTS = {"hunt": 15, "paper": 15}  # points


def ask(stages, words):
    """EXERCISES: of each stage of which `words` name an exercise only these are asked, with hunt and paper if
    they are among them; "core" names all core exercises. Of the other stages everything is asked."""
    core = [n for stage in stages.values() for n, e in stage.exercises.items() if e.core]
    words = [n for word in words for n in (core if word == "core" else [word])]
    known = {*PARTS, *(n for stage in stages.values() for n in stage.exercises)}
    if unknown := [word for word in words if word not in known]:
        raise UsageError(f"EXERCISES: {unknown[0]!r} is not valid; expected core, {', '.join(sorted(known))}")
    for stage in stages.values():
        everything = [*stage.exercises, *PARTS]
        some = any(word in stage.exercises for word in words)
        stage.asked = [a for a in everything if a in words] if some else everything
    return [stage for stage in stages.values() if any(word in stage.exercises for word in words)]


def entries(name):
    """[(word, rest)] of a text of ours. A line that begins with # is for its readers; one with blanks goes on."""
    text = re.sub(r"^#.*\n", "", (HERE / name).read_text(), flags=re.M)
    return [" ".join(e.split()).partition(" ")[::2] for e in re.split(r"\n+(?=\w)", text.strip())]


def read_stages():
    """{number: Stage}, of which is asked what the tree was made for."""
    stages, common, hidden, stage, exercise = {}, [], [], None, None
    for line in (HERE / "exercises.txt").read_text().splitlines():
        word, _, rest = line.partition(" ")
        rest = rest.strip()
        if not word or word.startswith("#") or word == "unseen":
            continue
        if word == "stage":
            stage = Stage(*rest.split())
            stages[stage.number] = stage
        elif word == "common":
            common = rest.split()
        elif word == "hidden":
            hidden = rest.split()
        elif word == "run":
            name, ranks, options, program = ([part.strip() for part in rest.split("|")] + [stage.program])[:4]
            main = program == stage.program
            stage.runs[name] = Run(
                name, int(ranks), (common if main else []) + options.split(), program, hidden if main else []
            )
        elif word == "exercise":
            exercise = stage.exercises[rest] = Exercise(rest)
        elif word == "body":
            exercise.bodies.append(rest)
        elif word == "runs":
            exercise.runs = rest.split("; ")
        elif word in ("stars", "points"):
            setattr(exercise, word, int(rest))
        elif word in ("tests", "title", "file", "read"):
            setattr(stage if word == "tests" else exercise, word, rest)
        else:
            raise UsageError(f"exercises.txt: {line!r} is not valid; expected a word of the list at its head")
    for number, texts in read_core().items():
        if number[:2] in stages:
            exercise = stages[number[:2]].exercises[number]
            exercise.core, exercise.title = texts, f"{exercise.title} (core)"
    ask(stages, read_note().get("asked", []))
    return stages


def read_core():
    """{number: {word: text}} of core.txt; a text keeps its lines."""
    core, text = {}, re.sub(r"^#.*\n", "", (HERE / "core.txt").read_text(), flags=re.M)
    for word, rest in re.findall(r"^(\w+)(.*\n(?:(?: .*)?\n)*)", text, re.M):
        if word == "exercise":
            texts = core[rest.strip()] = {}
        else:
            texts[word] = textwrap.dedent(rest).strip()
    return core


def read_note(tree=ROOT):
    """What .homework says of a learner's tree: its kind, "write" or "hunt", stages, what is asked of them,
    course or ID. Empty: the reference."""
    path = pathlib.Path(tree) / ".homework"
    return json.loads(path.read_text()) if path.exists() else {}


def stage_of(stages, number):
    if number not in stages:
        raise UsageError(f"stage: {number!r} is not valid; expected {', '.join(stages)}")
    return stages[number]


@dataclass
class Mutant:
    name: str
    why: str
    file: str
    find: str
    replace: str
    kinds: list  # of its tests: "ranks 2", "threads 2", ...

    def is_race(self):
        """Whether ThreadSanitizer sees it, and numbers do by luck only."""
        return any(kind.startswith("threads") for kind in self.kinds)

    def applied(self, text):
        """The text of its file, or of a part of it, with the mistake."""
        assert text.count(self.find) == 1, self.name
        return text.replace(self.find, self.replace)


def read_mutants():
    """[Mutant], those of mutants.txt in its order."""
    mutants = []
    for line in (HERE.parent / "mutants.txt").read_text().splitlines():
        word, _, rest = line.partition(" ")
        rest = rest.strip()
        if word == "mutant":
            mutants.append(Mutant(rest, "", "", "", "", []))
        elif word == "test":
            mutants[-1].kinds.append(rest.partition(":")[0])
        elif word in ("find", "replace"):
            setattr(mutants[-1], word, rest.replace("\\n", "\n"))
        elif word in ("why", "file"):
            setattr(mutants[-1], word, rest)
    return mutants


def unseen():
    """The names of mutants that no run of their stage shows."""
    return {
        line.split()[1]
        for line in (HERE / "exercises.txt").read_text().splitlines()
        if line.startswith("unseen ")
    }


def seen_in_the_wild():
    """The names of mutants in wild.md: mistakes that somebody has really made."""
    return set(re.findall(r"`(0\d-[a-z0-9-]+)`", (HERE.parent / "wild.md").read_text()))


# ---- Bodies

TOKEN = re.compile(
    r"""(?P<blank>\s+|//[^\n]*|/\*.*?\*/)|(?P<endless>/\*.*)"""  # a comment without an end is looked at once
    r"""|(?P<text>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])+')|(?P<number>\.?\d(?:[eEpP][+-]|'?[\w.])*)"""
    r"""|(?P<word>[A-Za-z_]\w*)|(?P<other>.)""",
    re.S,
)


def tokens(text):
    """Of each token of a C++ text, without blanks and comments: (token, place)."""
    return ((m.group(), m.start()) for m in TOKEN.finditer(text) if m.group("blank") is None)


def find_body(text, signature, where):
    """The places of a function's braces: text[begin:end] is its body. `signature` occurs once. `where`: for
    an error."""
    if text.count(signature) != 1:
        raise UsageError(f"{where}: expected once: {signature}")
    at = text.index(signature)
    parentheses = braces = begin = 0
    for token, place in tokens(text[at:]):
        parentheses += (token == "(") - (token == ")")
        if parentheses == 0 and token == ";" and braces == 0:
            break
        if token == "{" and parentheses == 0 or token == "{" and braces:
            braces += 1
            begin = begin if braces > 1 else at + place
        if token == "}" and braces:
            braces -= 1
            if braces == 0:
                return begin, at + place + 1
    raise UsageError(f"{where}: no body behind: {signature}")


def bodies_in(text, exercise):
    """The bodies of an exercise in the text of its file."""
    return [text[slice(*find_body(text, signature, exercise.file))] for signature in exercise.bodies]


def bodies_of(tree, exercise):
    """The bodies of an exercise as they are in a tree."""
    return bodies_in((pathlib.Path(tree) / exercise.file).read_text(), exercise)


def graft(text, exercise, bodies):
    """The text of exercise.file with other bodies."""
    for signature, body in zip(exercise.bodies, bodies):
        begin, end = find_body(text, signature, exercise.file)
        text = text[:begin] + body + text[end:]
    return text


def stub(exercise):
    return [f'{{ not_written("{exercise.number}", __FILE__, __LINE__); }}' for _ in exercise.bodies]


def is_stub(bodies):
    return any(re.search(r"\bnot_written\b", body) for body in bodies)


def stubbed(text, exercises):
    """The text of a file with the bodies of these exercises, which are in it, to be written."""
    for exercise in exercises:
        text = graft(text, exercise, stub(exercise))
    first = text.index("#include")
    return text[:first] + '#include "device/not_written.h"\n' + text[first:]


def same_tokens(bodies, others):
    return [[t for t, _ in tokens(a)] for a in bodies] == [[t for t, _ in tokens(b)] for b in others]


def exercise_of(stage, mutant):
    """The exercise in whose bodies a mutant lies, or None."""
    for exercise in stage.exercises.values():
        if exercise.file == mutant.file:
            if any(signature in mutant.find for signature in exercise.bodies) or any(
                mutant.find in body for body in bodies_of(ROOT, exercise)
            ):
                return exercise
    return None


# What a body may call is a closed list (observe.MAY_CALL). It does not know these words: what is no call, what
# the primer of 02 calls itself, what makes it forget its traffic, and what ends a program with a text. Words
# that begin with __ are the compiler's.
FORBIDDEN = set(
    "asm _Pragma extern import module main printf fflush stdout reset_traffic HelpRequest CommandLine".split()
)
CHECK_SECONDS = 2


def complaint(body):
    """Why a submitted body is refused, in words, or None."""
    depth, end, begin = 0, None, time.thread_time()
    # The compiler joins lines, and reads raw texts and trigraphs, before it sees tokens. These would not be
    # its tokens.
    if found := re.search(r"\\\s*\n|\b(u8|[uUL])?R\"|\?\?[=/]", body):
        return (
            "a line ends with a backslash"
            if found.group().endswith("\n")
            else f"{found.group()} is not allowed in a body"
        )
    for token, place in tokens(body):
        if time.thread_time() - begin > CHECK_SECONDS:
            return f"to look at its words takes more than {CHECK_SECONDS} s"
        if end is not None:
            return "text behind the end of the body"
        if token in FORBIDDEN or token.startswith(("__", "MPI_")) and token != "__syncthreads":
            return f"{token} is not allowed in a body"
        if token in ("#", "\\") or body[place : place + 2] in ("%:", "<%", "%>"):
            return f"no preprocessor in a body: {body[place : place + 12].splitlines()[0]}"
        if token in "\"'":
            return "a text without an end"
        if token.startswith("/*"):
            return "a comment without an end"
        if depth == 0 and token != "{":
            return "a body begins with {"
        depth += (token == "{") - (token == "}")
        if depth == 0:
            end = place
    return None if end is not None else "a body ends with }"


# ---- Trees


def files_of():
    """The project's files: what git tracks, and what it does not ignore; in an archive without git, all."""
    if not (ROOT / ".git").exists():
        return sorted(
            str(path.relative_to(ROOT))
            for path in ROOT.rglob("*")
            if path.is_file() and not {"build", "__pycache__"} & set(path.relative_to(ROOT).parts)
        )
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\0")
    return sorted({name for name in listed if name and (ROOT / name).is_file()})


@contextlib.contextmanager
def changed(tree, texts):
    """In a tree these files, {name: text}, have another text for a while."""
    originals = {name: (tree / name).read_bytes() for name in texts}
    try:
        for name, text in texts.items():
            put(tree / name, text)
        yield
    finally:
        for name, text in originals.items():
            put(tree / name, text)


def put_bodies(machine, stage, bodies):
    """In the machine's tree these bodies, {number: [text]}, are in place of the reference's, until others are.
    So what has the same ones is not compiled again."""
    texts = {
        e.file: (ROOT / e.file).read_text() for s in read_stages().values() for e in s.exercises.values()
    }
    for number, text in bodies.items():
        exercise = stage.exercises[number]
        texts[exercise.file] = graft(texts[exercise.file], exercise, text)
    for name, text in texts.items():
        put(machine.tree / name, text)
    machine.own(machine.tree)


def copy_tree(target):
    """Makes target's sources those of this tree. What has not changed keeps its time, and so its object
    file."""
    files = files_of()
    for name in files:
        put(target / name, (ROOT / name).read_bytes(), (ROOT / name).stat())
    for path in target.rglob("*"):
        name = path.relative_to(target)
        if path.is_file() and name.parts[0] not in ("build", ".git") and str(name) not in files:
            path.unlink()


def put(path, content, status=None):
    """Writes a file, unless it has this content. `status`: the mode and the time it gets."""
    content = content.encode() if isinstance(content, str) else content
    if path.is_file() and path.read_bytes() == content:
        return
    new = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    if status is not None and new:  # what replaces other text is newer than the object file of that
        path.chmod(status.st_mode & 0o777)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
