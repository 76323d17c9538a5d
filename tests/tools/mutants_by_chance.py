#!/usr/bin/env python3
"""mutants_by_chance.py N SEED: N mistakes that nobody chose. Does a test notice each?

A line of product code is drawn by chance, then a kind of mistake that it can have: a comparison, a sign, a
constant, a call left out, a term left out. The mistake is made in a copy below build/by_chance. There the
tests of the file's stage run, those that are built and run soonest first, until one notices. Those of common/
have all tests of fp64 on 1 and 2 ranks. What does not compile is counted, and another mistake is drawn. The
end lists survivors: a gap, or code that means the same."""

import filecmp
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import time

TREE = pathlib.Path("build/by_chance/tree").resolve()
BUILD = "build/cpu-fp64"
SEEN = re.compile(r": FAILED:$|^\[rank \d+\] \S+:\d+: ")  # a check that failed, in one process or in several
LIMIT = os.environ.get("TEST_TIMEOUT", "900")  # seconds of a set: what hangs is noticed
# What these tests do not run is not broken: stand-ins, tensor cores (bf16), the main() of the planner (make
# test-plan) and of the table of collectives.
LEFT_OUT = r"common/(cpu|tensor_cores)/|07_combined_5d/plan/plan\.cu|02_data_parallel/collectives\.cu"
COMPARISONS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "&&": "||", "||": "&&"}
SIGNS = {"+": "-", "-": "+", "+=": "-=", "-=": "+=", "*": "/", "/": "*"}
TERM = r"[\w.:>-]*\w(?:\([^()]*\))?(?:\[[^][]*\])?"


def code_of(text):
    """The text with its comments, strings and preprocessor's lines blank. All else stays at its place."""
    blank = lambda found: re.sub(r"[^\n]", " ", found[0])
    return re.sub(
        r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\])\'|^ *#(?:[^\n]*\\\n)*[^\n]*',
        blank,
        text,
        flags=re.S | re.M,
    )


def mistakes(code):
    """By kind: (begin, end, replacement) of each mistake that this line can have."""
    swap = lambda words: [
        (m.start(1), m.end(1), words[m[1]]) for m in re.finditer(r" (\S+) ", code) if m[1] in words
    ]
    other = {"true": "false", "false": "true"}
    constants = [
        (*m.span(), other.get(m[0]) or str(eval(m[0]) + 1))
        for m in re.finditer(r"(?<![\w.'])(?:true|false|0|[1-9]\d*(?:\.\d+)?|0\.\d+)(?![\w.'])", code)
    ]
    minus = [(*m.span(), "") for m in re.finditer(r"(?<=[(,=?:] |.[(\[])-(?=\w)|(?<=return )-", code)]
    calls = [
        (m.start(1), m.end(1), ";")
        for m in [re.fullmatch(r"\s*([\w.:>\[\]-]+\(.*\);)\s*", code)]
        if m and code.count("(") == code.count(")")
    ]
    terms = [(*m.span(), "") for m in re.finditer(rf" (?:[-+*]|&&|\|\|) {TERM}(?=[ ;,)\]])", code)]
    kinds = {
        "comparison": swap(COMPARISONS),
        "sign": swap(SIGNS) + minus,
        "constant": constants,
        "call": calls,
        "term": terms,
    }
    return {kind: found for kind, found in kinds.items() if found}


def draw(rng, lines):
    """(file, number of its line, kind, what the line becomes)."""
    while True:
        file, number, line, code = rng.choice(lines)
        kinds = mistakes(code)
        if kinds:
            kind = rng.choice(sorted(kinds))
            begin, end, new = rng.choice(kinds[kind])
            return file, number, kind, line[:begin] + new + line[end:]


def sets_of(file):
    """(targets, ranks, filter) of each set of tests, the quickest first. Ranks 0: the tests of one
    process."""
    stage = re.match(r"0[1-7]", file)
    tag = f"[{stage[0]}]" if stage else ""
    program = [f"{BUILD}/01_single_gpu"] + [f"{BUILD}/{file.split('/')[0]}"] * bool(stage)
    program += [f"{BUILD}/experts"] * file.startswith("07")
    some = tag or "[01]"
    without = "~[faults]~[standin]~[.]"
    all_fp32 = (["programs", "PRECISION=fp32", "build/cpu-fp32/tests"], 0, tag + without)
    kernels = [
        (["build/cpu-fp32-block4/tests-kernels"], 0, "[kernels]"),
        ([f"{BUILD}/tests"], 0, "[kernels]"),
    ]
    first = kernels if "common/kernels/" in file else [all_fp32] if file.endswith(".cc") else []
    return [
        *first,
        (program, 0, some + "[program]"),
        ([f"{BUILD}/tests"], 0, some + "~[program]" + without),
        *(([f"{BUILD}/mpi_tests"], ranks, tag + "~[.]") for ranks in ([2, 4, 3] if stage else [2, 1])),
        (["programs", "PRECISION=fp64", f"{BUILD}/tests"], 0, tag + without),
        all_fp32,
        # Ranks that are killed, stopped or cut off: the slowest, so only for what nothing else notices.
        (["build/cpu-fp32/mpi_tests", *all_fp32[0]], 0, tag + "[faults]"),
    ]


def make(*targets):
    return subprocess.run(["make", "-C", TREE, "BACKEND=cpu", *targets], capture_output=True).returncode == 0


def notices(targets, ranks, only):
    """Whether one of these tests fails. It ends at the first check that does, or after the limit."""
    # Programs are started by the tests as they were before the mistake: these need no compiling.
    tests = targets[-1] if "tests" in targets[-1] else f"{BUILD}/unbroken_tests"
    command = (["mpirun", "-n", str(ranks)] if ranks else []) + [str(TREE / tests), only]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "UCX_MEM_EVENTS": "n", "UCX_LOG_LEVEL": "error"}
    run = subprocess.Popen(
        ["timeout", "--kill-after=10", str(LIMIT), *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
        start_new_session=True,
    )
    seen = any(SEEN.search(line) for line in run.stdout)
    if seen:
        os.killpg(run.pid, signal.SIGTERM)
    run.stdout.close()
    return run.wait() not in (0, 3) or seen  # 3: no test is called so


def verdict(file, broken, unbroken, trusted):
    """Which set notices; "" if none does; None if the file does not compile."""
    for targets, ranks, only in sets_of(file):
        (TREE / file).write_text(broken)
        if not make(*targets):
            return None
        if not notices(targets, ranks, only):
            continue
        if (*targets, ranks, only) not in trusted:  # the first time it has to pass with the code as it is
            (TREE / file).write_text(unbroken)
            if not make(*targets) or notices(targets, ranks, only):
                sys.exit(f"{only} of {targets[-1]}, {ranks} ranks: these tests fail without a mistake")
            trusted.add((*targets, ranks, only))
        return only + (f" on {ranks} ranks" if ranks else "")
    return ""


def copy_sources():
    """The copy is what the sources are now. What has not changed keeps its time, and its object files."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], capture_output=True, text=True, check=True
    )
    for name in listed.stdout.split("\n"):
        if os.path.isfile(name) and not (
            (TREE / name).exists() and filecmp.cmp(name, TREE / name, shallow=False)
        ):
            (TREE / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(name, TREE / name)
    return sorted(
        name
        for name in listed.stdout.split("\n")
        if re.match(r"(common|0[1-7]_\w+)/.*\.(cu|cc|h)$", name) and not re.match(LEFT_OUT, name)
    )


def main(wanted, seed):
    lines = []
    for file in copy_sources():
        text = pathlib.Path(file).read_text()
        lines += [
            (file, number, line, code)
            for number, (line, code) in enumerate(zip(text.split("\n"), code_of(text).split("\n")))
            if code.strip()
        ]
    print(f"one of {len(lines)} lines of code, and {wanted} times so", flush=True)
    make(f"{BUILD}/tests", "build/cpu-fp32/mpi_tests")  # which another test starts
    shutil.copy(TREE / BUILD / "tests", TREE / BUILD / "unbroken_tests")
    rng, trusted, noticed, survivors, invalid, begin = random.Random(seed), set(), 0, [], 0, time.monotonic()
    while noticed + len(survivors) < wanted:
        file, number, kind, new = draw(rng, lines)
        unbroken = (TREE / file).read_text()
        broken = unbroken.split("\n")
        change = f"{file}:{number + 1}: {kind}\n  - {broken[number].strip()}\n  + {new.strip()}"
        broken[number] = new
        by = verdict(file, "\n".join(broken), unbroken, trusted)
        (TREE / file).write_text(unbroken)
        invalid, noticed = invalid + (by is None), noticed + bool(by)
        if by == "":
            survivors.append(change)
        says = "does not compile" if by is None else "noticed by " + by if by else "SURVIVED"
        minutes = (time.monotonic() - begin) / 60
        print(f"{noticed + len(survivors)} of {wanted}, {minutes:.0f} min: {change}\n  {says}", flush=True)
    print("\n".join(["", "Survivors:", *survivors] if survivors else []))
    print(f"{noticed} of {wanted} noticed, {100 * noticed / wanted:.0f} %; {invalid} more did not compile")


main(int(sys.argv[1]), int(sys.argv[2]))
