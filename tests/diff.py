"""diff.py 03: what a stage adds to 01. The lines of main.cu; what its headers put in place of the defaults of
a seam, with the functions of the stage that it calls; where the rest lies, as the stage's note says.
diff.py 02 experts: the lines of main.cu alone, of two programs."""

import os
import pathlib
import re
import signal
import subprocess
import sys

SEAMS = pathlib.Path("common/model/seams.h")
MAINS = {
    path.parts[0][:2] if path.stem == "main" else path.stem: path
    for path in sorted(pathlib.Path().glob("0*/*.cu"))
    if "int main(" in path.read_text(encoding="utf-8")
}
CLASS = re.compile(r"^class (\w+)(?: : public (\w+))? \{$", re.M)
# As clang-format leaves it: the last line of a body begins in the column of the function's first line.
FUNCTION = re.compile(
    r"^(  )?\w[\w:<>,&* ]*[ &*](\w+)(\((?:[^;{}]|\{\})*?\)[^;{}()]*)(?:;|\{.*\}|\{\n(?:.*\n)*?\1?\})$", re.M
)


class Function:
    def __init__(self, path, text, match):
        self.path, self.line, self.text, self.name = (
            path,
            text.count("\n", 0, match.start()) + 1,
            match[0],
            match[2],
        )
        self.is_override = "override" in match[3]
        self.owner = ([found[1] for found in CLASS.finditer(text, 0, match.start())] or [None])[-1]
        self.may_call = {
            path.name,
            *re.findall(r'^#include "(.*)"$', text, re.M),
        }  # the files with what it calls

    def show(self, role):
        print(
            f"  {role} {self.path}:{self.line}", *("    " + line for line in self.text.splitlines()), sep="\n"
        )


def functions_of(paths):
    return [
        Function(path, text, match)
        for path in paths
        for text in [path.read_text()]
        for match in FUNCTION.finditer(text)
    ]


def show_main(old, new):
    def diff(*options):
        return subprocess.run(
            ["git", "diff", "--no-index", *options, old, new], stdout=subprocess.PIPE, text=True
        ).stdout

    more, fewer = diff("--numstat").split()[:2]
    print(f"== {new}, against {old}: {more} lines more, {fewer} fewer")
    print(
        *diff(
            "--unified=2",
            f"--color={'always' if sys.stdout.isatty() and not os.environ.get('NO_COLOR') else 'never'}",
        ).splitlines()[4:],
        sep="\n",
    )


def show_seam(headers):
    own, defaults = functions_of(headers), {(f.owner, f.name): f for f in functions_of([SEAMS])}
    bases = dict(pair for header in headers for pair in CLASS.findall(header.read_text()))
    shown = []

    def show_called(caller):
        for name in re.findall(r"(\w+)\(", caller.text):
            for f in own:
                if f.name == name and f.path.name in caller.may_call and not f.is_override and f not in shown:
                    shown.append(f)
                    f.show("calls")
                    show_called(f)

    for f in own:
        if not f.is_override:
            continue
        seam = f.owner
        while (seam, f.name) not in defaults:
            seam = bases[seam]
        print(f"\n== {f.owner}::{f.name}")
        defaults[seam, f.name].show("in place of")
        f.show("stands")
        show_called(f)


def main(*names):
    expected = sorted(MAINS) if len(names) > 1 else [f"0{stage}" for stage in range(2, 8)]
    for name in names or [""]:
        if name not in expected:
            print(
                f"diff: {name or 'nothing'} is not valid; expected one of {' '.join(expected)}",
                file=sys.stderr,
            )
            return 2
    new = MAINS[names[-1]]
    show_main(MAINS[names[0] if len(names) > 1 else "01"], new)
    if len(names) == 1:
        stage = new.parent
        show_seam(sorted(path for path in stage.glob("*.h") if path.name != "options.h"))
        where = re.search(r"^## Where it is\n((?:(?!## ).*\n)*)", (stage / "README.md").read_text(), re.M)[1]
        print(
            f"\n== The rest ({stage}/README.md)\n"
            + re.sub(r"\[`?([^]`]*)`?\]\([^)]*\)", r"\1", where.rstrip())
        )
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # head and less may stop reading
    sys.exit(main(*sys.argv[1:]))
