#!/usr/bin/env python3
"""How much a reader of a stage has to read to know all that it does: its closure. These are main.cu, the
files of the project that it includes, directly or not, and their sources; without the stand-ins (common/cpu).
A header's sources have its name: log.h has log.cc and log_*.cu. By definitions they are also those of other
names, which include the header, directly or not, and define what it declares.

    python3 tests/closure.py       what size.sh shows: name, lines, lines by definitions
    python3 tests/closure.py 01    the lines of each file of 01; + marks those that only definitions find
"""

import glob
import os
import re
import sys
from functools import cache

SOURCES = sorted(
    path
    for end in ("cu", "cc")
    for path in glob.glob(f"*/**/*.{end}", recursive=True)
    if re.match("common/(?!cpu/)|0", path)
)


@cache
def read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def lines(path):
    return read(path).count("\n")


@cache
def included(path):
    """The files of the project that this file names."""
    found = []
    for name in re.findall(r'^[ \t]*#include "([^"]+)"', read(path), re.M):
        places = [
            os.path.normpath(os.path.join(folder, name)) for folder in (os.path.dirname(path), "common", ".")
        ]
        found += [place for place in places if os.path.isfile(place)][:1]
    return found


@cache
def functions(path):
    """Names of the functions outside of classes, each with what follows its arguments: { or ;. Of a class's
    function it is the name of the class."""
    text, found = re.sub(r"//.*", "", read(path)), []
    for start in re.finditer(r"^[A-Za-z][^;{}()=#]*?([\w:]+)\(", text, re.M):
        end, depth = start.end(), 1
        while depth > 0 and end < len(text):
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        found += [(start[1].split("::")[0], follows) for follows in re.findall("[;{]", text[end:])[:1]]
    return found


@cache
def defined(path):
    return {name for name, follows in functions(path) if follows == "{"}


@cache
def declared(header):
    classes = re.findall(r"^(?:class|struct) (\w+)[^;{]*\{", read(header), re.M)
    return {name for name, follows in functions(header) if follows == ";"} | set(classes)


@cache
def all_included(path):
    return closure(path, lambda _: [])


@cache
def definitions_of(header):
    """Sources that define what a header declares."""
    return [
        source
        for source in SOURCES
        if declared(header) & defined(source)
        and "main" not in defined(source)
        and header in all_included(source)
    ]


def sources_of(header):
    stem = re.escape(os.path.splitext(header)[0])
    return [path for path in SOURCES if re.fullmatch(stem + r"(_\w+)?\.c[uc]", path)]


def closure(main, find_sources):
    seen, to_read = set(), [main]
    while to_read:
        path = to_read.pop()
        if path in seen or path.startswith("common/cpu/"):
            continue
        seen.add(path)
        to_read += included(path)
        if path.endswith(".h"):
            to_read += find_sources(path)
    return seen


def both_closures(main):
    by_name = closure(main, sources_of)
    # A program of one rank is not linked with what needs a communicator.
    alone = "common/ranks/comm.h" not in by_name

    def sources(header):
        return sources_of(header) + [
            path for path in definitions_of(header) if not (alone and "common/ranks/comm.h" in included(path))
        ]

    return by_name, by_name | closure(main, sources)


def show(name, *closures):
    print(name, *(sum(map(lines, files)) for files in closures))


stages = sorted(glob.glob("0[1-7]_*/main.cu"))
if len(sys.argv) > 1:
    for main in (main for main in stages if main.startswith(sys.argv[1])):
        by_name, by_definitions = both_closures(main)
        for path in sorted(by_definitions):
            print(f"{lines(path):6} {' ' if path in by_name else '+'} {path}")
else:
    for main in stages:
        closures = both_closures(main)
        show(main[:2], *closures)
        if main.startswith("01"):
            on_path = ("01", "common/model/", "common/kernels/", "common/device/")
            show("01-path", *([path for path in files if path.startswith(on_path)] for files in closures))
