"""Whether the homework keeps its promises: make homework-check [PART...]. Without a part, all of them;
"quick" is what every change must pass."""

import csv
import fnmatch
import io
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import types

import exam
import grade
import grading
import hours
import pages
import reference
import sources
import starter
import submissions
from observe import BuildError, Machine, Observation, build, differences, observe
from observe import hint_in, hints_of, host_waits, in_words, objects_of, progress_of
from reference import in_workplaces, workplace
from sandbox import check_sandbox, launcher_of
from sources import ROOT, UsageError, exercise_of, put, read_mutants

passed, failed = 0, 0


def expect(good, what):
    global passed, failed
    passed, failed = passed + bool(good), failed + (not good)
    print(("ok      " if good else "FAILED  ") + what, flush=True)
    return good


def data(stages):
    """The lists fit the sources, and each other; and make says to them what its command line says."""
    shell = {n: v for n, v in os.environ.items() if "MAKE" not in n} | {"COURSE": "xterm", "STAGES": "09"}
    made = subprocess.run(
        ["make", "-n", "homework", "TO=hw"], cwd=ROOT, env=shell, capture_output=True, text=True
    )
    expect(made.stdout.split()[2:] == ["homework", "TO='hw'"], f"make homework runs {made.stdout!r}")
    for stage in stages.values():
        expect(sum(e.points for e in stage.exercises.values()) == 70, f"{stage.number}: 70 points")
        for exercise in stage.exercises.values():
            wrong = [name for name in exercise.runs if name not in stage.runs]
            wrong += filter(None, map(sources.complaint, sources.bodies_of(ROOT, exercise)))
            what = f"{exercise.number}: its runs are there, and its own bodies are not refused {wrong or ''}"
            expect(not wrong, what)
    reads, writes = os.pipe()
    os.close(reads)
    hint = [sys.executable, sources.HERE / "homework.py", "hint", "02.4", "LEVEL=1"]
    gone = subprocess.run(hint, stdout=writes, stderr=subprocess.PIPE).stderr
    os.close(writes)
    expect(not gone, f"make hint-02.4 | head ends without a word {gone or ''}")
    with tempfile.TemporaryDirectory() as name:
        would = "".join(f"g++ -c {n}.cu -o {n}.o\n" for n in range(9))
        machine = types.SimpleNamespace(tree=pathlib.Path(name), call=lambda *_, **__: (0, would))
        first = progress_of(machine, ["make"])
        for n in range(6):
            put(machine.tree / f"{n}.o", "")
        expect(first and not progress_of(machine, ["make"]), "only a first build is said to take time")
    unknown = sorted(sources.seen_in_the_wild() - {m.name for m in read_mutants()})
    links = re.findall(r"\]\((http[^)]*)\)", (ROOT / "tests/wild.md").read_text())
    report = r"(issues|pull)/\d+|blob/[0-9a-f]{7,40}/[\w./-]+#L\d+"
    for link in links:
        if not re.fullmatch(rf"https://github\.com/[\w.-]+/[\w.-]+/({report})", link):
            unknown.append(link)
    what = f"tests/wild.md: {len(links)} links, each to a report, and its mutants are there {unknown or ''}"
    expect(not unknown and len(links) >= 20, what)
    begin = time.thread_time()
    complaints = [sources.complaint("{ " + what * 30_000) for what in ("/* ", "\"'", "1'", "a ")]
    expect(
        all(complaints) and time.thread_time() - begin < 6,
        f"a body of 90 kB is looked at in seconds {complaints}",
    )
    book = (ROOT / "common/report/book.py").read_text()
    pages = {
        path.name
        for glob in re.findall(r'"(tests/homework/[^"]*)"', re.search(r"SECTIONS = \{.*?\n\}", book, re.S)[0])
        for path in ROOT.glob(glob)
    }
    linked = [n for n in pages if re.search(r"\]\((teacher|exam)", (sources.HERE / n).read_text())]
    expect(
        pages == {"README.md", "course.md", "problems.md"} and not linked,
        f"the book has {pages}, links in {linked}",
    )
    papers = [exam.text(exam.drawn_from(course), answers=True) for course in ("a", "b", "a")]
    expect(papers[0] == papers[2] != papers[1], "an exam has numbers of its course")
    first = exam.text(lambda stage, name, values: values[0], answers=True)
    known = ("2.81 MiB", "0.00452 s", "0.0184 s", "11.25", "15.0 GB", "29.2 %", "9.7 %", "68 pairs", "pp 1")
    lacking = [number for number in known if number not in first]
    points = sum(int(p) for p in re.findall(r"^\((\d+)\) ", first, re.M))
    expect(not lacking and points == 100, f"the exam's answers, {points} points, lack {lacking}")
    teacher = (sources.HERE / "teacher.md").read_text()
    expect(
        all(f"## {e.number} " in teacher for s in stages.values() for e in s.exercises.values()),
        "teacher.md has a sketch of each exercise",
    )
    expect(not sources.complaint("{ __syncthreads(); }"), "a kernel's body may wait for its threads")
    expect(not sources.complaint('{ f("NUMBER"); }'), "a text may end with R, and is no raw text")
    for name, number, _, _, body in hostile_lines():
        text = (ROOT / stages[number[:2]].exercises[number].file).read_text()
        stale = [word for word in re.findall(r"\b[a-z]\w*_\b", body) if word not in text]
        expect(not stale, f"hostile.txt, {name}: its members are there {stale or ''}")
    path(stages)


def path(stages):
    """The core exercises: their texts, sizes and hours; and what classes say that they took."""
    core = {n: (s, e) for s in stages.values() for n, e in s.exercises.items() if e.core}
    expect(len(core) == 8, f"eight core exercises: {', '.join(core)}")
    plan = (sources.HERE / "course.md").read_text()
    for number, (stage, exercise) in core.items():
        words = {w: len(exercise.core.get(w, "").split()) for w in ("contract", "picture", "look", "ask")}
        long = all(80 <= n <= 160 or w == "picture" and n for w, n in words.items())
        expect(long and len(exercise.core) == 4, f"{number}: four texts, of 80 to 160 words: {words}")
        for file, heading in re.findall(r"\]\(([^)#]+)#?([^)]*)\)", exercise.core["picture"]):
            heads = re.findall(r"^#+ (.*)$", (ROOT / file).read_text(), re.M)
            there = {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in heads}
            expect(heading in {"", *there}, f"{number}: its picture is in {file}, {heading or 'at its head'}")
        same = [n for n in exercise.runs if not {"--d-model", "--seq-len"} <= {*stage.runs[n].hidden}]
        same += [n for n in exercise.runs if {*stage.runs[n].hidden} <= {*stage.runs[n].options}]
        ranks = starter.sizes_of(exercise)
        expect(
            len(ranks) > 1 and not same,
            f"{number}: two sizes, visible and hidden: {ranks} ranks {same or ''}",
        )
        notes = "".join(path.read_text() for path in ROOT.glob(f"{stage.number}_*/README.md"))
        expect(f"\n| {number} core |" in notes, f"{number}: the note marks it")
        row = f"| {number} | {hours.computed(exercise):g} h |"
        expect(row in plan, f"{number}: the plan says {row}")
    for number, stage in stages.items():
        of = [(e, hours.computed(e)) for e in stage.exercises.values()]
        some = f"{sum(h for e, h in of if e.core):g} h" if any(e.core for e, _ in of) else "–"
        row = f"| {some} | {sum(h for _, h in of):g} h |"
        said = re.search(rf"^\| {number}\b.* min \|.*$", plan, re.M)[0]
        expect(row in said, f"{number}: the plan says {row}")
    with tempfile.TemporaryDirectory() as name:
        said, rows = (
            [],
            ["exercise;read;write;hint;stuck", "02.4;20;40;0;a", "02.4;30;120;3;", "02.4;30;30;1;"],
        )
        bad = ["02.6;1;1;0;", "02.4;-1;1;0;", "02.4;1;an hour;0;", "02.4;1;1;4;", "02.4;1"]
        put(pathlib.Path(name, "hours.csv"), "\ufeff" + "\n".join([*rows, "", *bad]))
        status = hours.course_hours(stages, name, said.append)
        told = [line for line in said if line.startswith("hours.csv:")]
        expect(status == 2 and len(told) == len(bad), f"a bad row is a line, and the status 2: {told}")
        line = next(line for line in said if line.startswith("02.4"))
        expect("1.0 h  1.0 to 2.5 h" in line and line.endswith(" 3       1, 0, 1"), f"a class: {line}")
        put(pathlib.Path(name, "hours.csv"), "\n".join(rows))
        expect(hours.course_hours(stages, name, said.append) == 0, "without bad rows the status is 0")
        expect("expected a table" in refusal(hours.course_hours, stages, f"{name}/none"), "no table is told")


def reference_itself(stages):
    """The reference shows what reference.json says, no probe finds anything in it, and it gets all points."""
    machine, known = Machine(ROOT), reference.load()
    build(machine, {run.program for s in stages.values() for run in s.runs.values()})
    for number, stage in stages.items():
        seen = {name: observe(machine, run) for name, run in stage.runs.items()}
        differs = {name: d for name in seen if (d := differences(seen[name], known[number][name]))}
        expect(
            not differs and len(stage.runs) > 5,
            f"{number}: the reference shows the numbers of reference.json {differs or ''}"[:300],
        )
        if not sources.read_note():
            grade.note_races(stage, {n: [] for n in stage.exercises})
            expect(
                grade.grade(stage, lambda line: None, seen) == 70, f"{number}: the reference gets 70 points"
            )
            if number == "03":
                nobody_alone(stage, seen)
            (grade.STATE / f"races-{number}.json").unlink()


def nobody_alone(stage, seen):
    """In a learner's tree: where no probe tells whose mistake it is, none is blamed alone, and no points are
    lost."""

    def wrong(which):
        return {
            n: Observation(facts=o.facts | {"loss": [2 * x for x in o.facts["loss"]]})
            if n.startswith(which)
            else o
            for n, o in seen.items()
        }

    for which, names, left in (
        ("stage 3", "03.4 or 03.2 or 03.1", 45),
        ("stage", "03.1 or 03.2 or 03.3 or 03.4", 10),
    ):
        lines = []
        points = grade.grade(stage, lines.append, wrong(which))
        told = [line[:4] for line in lines if f" {names}: " in line]
        expect(
            points == left
            and told == sorted(names.split(" or "))
            and f"{70 - left} of these points are not lost" in lines[-1],
            f"{which} is wrong: {points} points, {lines}",
        )


def exercises_of(stages, only):
    """(stage, exercise) of each exercise, or of those in `only`."""
    return [(s, e) for s in stages.values() for e in s.exercises.values() if only is None or e.number in only]


def sandbox(stages):
    """A run finds in the sandbox what it needs, where there is one; also where PATH has a script for mpirun, as
    packages.sh writes it."""
    if not shutil.which("bwrap"):
        return
    path = os.environ["PATH"]
    with tempfile.TemporaryDirectory() as folder:
        script = pathlib.Path(folder, "mpirun")
        script.write_text(f"#!/bin/sh\nexec '{launcher_of(shutil.which('mpirun'))}' \"$@\"\n")
        script.chmod(0o755)
        for first in (path, f"{folder}:{path}"):
            os.environ["PATH"] = first
            said = refusal(check_sandbox, ROOT, stages["03"].program)
            expect(not said, f"a dry run of 03 with {shutil.which('mpirun')} ends well in the sandbox {said}")
    os.environ["PATH"] = path


def stubs(stages, only=None):
    """Each exercise alone as a stub: it gets no points, and the run says so."""
    tasks = exercises_of(stages, only)

    def work(machine, task):
        stage, exercise = task
        put(machine.tree / "common/device/not_written.h", (sources.HERE / "not_written.h").read_bytes())
        text = sources.stubbed((machine.tree / exercise.file).read_text(), [exercise])
        with sources.changed(machine.tree, {exercise.file: text}):
            build(machine, {run.program for run in stage.runs.values()})
            ends = {name: observe(machine, stage.runs[name]).end for name in exercise.runs}
        right = [
            end
            for end in ends.values()
            if end.startswith(f"{exercise.number} is not written yet ({exercise.file}:")
        ]
        expect(
            len(right) == len(ends),
            f"{exercise.number}: a stub ends every run of the exercise {set(ends.values()) if len(right) < len(ends) else ''}",
        )
        return exercise.number

    in_workplaces(tasks, list(stages.values()), work, races=False)


def order(stages, only=None):
    """The probe of an exercise judges it while those behind it are not written yet."""
    tasks = exercises_of(stages, only)

    def work(machine, task):
        stage, exercise = task
        put(machine.tree / "common/device/not_written.h", (sources.HERE / "not_written.h").read_bytes())
        put(machine.tree / ".homework", '{"kind": "write"}')
        texts = {}
        for later in (e for n, e in stage.exercises.items() if n > exercise.number):
            text = texts.get(later.file) or (machine.tree / later.file).read_text()
            texts[later.file] = sources.stubbed(text, [later])
        with sources.changed(machine.tree, texts):
            hint = hints_of(machine, stage, [exercise.number])[exercise.number]
        expect(not hint, f"{exercise.number}: its probe needs none of those behind it {hint}")
        return exercise.number

    in_workplaces(tasks, list(stages.values()), work, races=False)


def calls(stages):
    """What a body calls that no body needs is found, in whatever object file its machine code is."""
    ends = dict(zip("12345", ("_exit", "abort", "exit", "putchar", "puts")))
    words = {"putchar": "0", "puts": '""', "_exit": "0", "exit": "0"}

    def work(machine, stage):
        with tempfile.TemporaryDirectory() as folder:
            grader, planted = submissions.Grader(stages, "check", pathlib.Path(folder)), {}
            for number, exercise in stage.exercises.items():
                call = f"__builtin_{ends[number[-1]]}({words.get(ends[number[-1]], '')})"
                call = f"{{ if (volatile bool never = false; never) {call}; "
                planted[number] = [call + body[1:] for body in sources.bodies_of(ROOT, exercise)]
            sources.put_bodies(machine, stage, planted)
            build(machine, objects_of(stage, stage.exercises))
            found = {n: grader.foreign(machine, stage, [n], False) for n in planted}
        expect(
            all(ends[n[-1]] in names for n, names in found.items()),
            f"{stage.number}: forbidden calls {found}",
        )
        return stage.number

    in_workplaces(list(stages.values()), list(stages.values()), work, races=False)


def digits(stages):
    """Numbers that differ are told with digits that differ."""
    stage = stages["01"]
    body = ["{ return max_norm == 0 ? 1 : fmin(1.0, max_norm / sqrt(norm_squared)); }"]

    def work(machine, _):
        sources.put_bodies(machine, stage, {"01.1": body})
        hint = hints_of(machine, stage, ["01.1"])["01.1"]
        numbers = re.search(r"is (\S+), and should be (\S+):", hint)
        expect(numbers and numbers[1] != numbers[2], f"a factor that is a millionth off: {hint}")
        return "01.1"

    in_workplaces([0], [stage], work, workers=1, races=False)


def mistakes(stages, only=None):
    """Each mutant of a body loses points, and a probe or ThreadSanitizer tells it; or exercises.txt says why
    not."""
    unseen = sources.unseen()
    tasks = [
        (stage, m, e)
        for stage in stages.values()
        for m in read_mutants()
        if (e := exercise_of(stage, m)) and (only is None or any(fnmatch.fnmatch(m.name, p) for p in only))
    ]

    def work(machine, task):
        stage, mutant, exercise = task
        programs, races = {run.program for run in stage.runs.values()}, []
        try:
            with sources.changed(
                machine.tree, {mutant.file: mutant.applied((machine.tree / mutant.file).read_text())}
            ):
                build(machine, programs)
                seen = {name: observe(machine, stage.runs[name]) for name in exercise.runs}
                hint = hints_of(machine, stage, [exercise.number])[exercise.number]
                if mutant.is_race():
                    build(machine, programs, races=True)
                    races = sorted(
                        {r for n in exercise.runs for r in observe(machine, stage.runs[n], races=True).races}
                    )
        except BuildError as error:
            return f"{mutant.name}: " + str(expect(False, f"{mutant.name} compiles: {error}"))
        verdict = grade.judge(stage, exercise, "", seen, reference.load()[stage.number], races)
        shown = bool(verdict.words)  # by a run, or as a race
        verdict = grade.told(verdict, hint)
        lost = verdict.points < exercise.points
        expect(
            not shown and lost == bool(hint)
            if mutant.name in unseen
            else shown and lost and (hint or races or "modelled time" in verdict.words),
            f"{mutant.name}: {verdict.points}/{exercise.points}, {hint or verdict.words}"[:240],
        )
        return mutant.name

    in_workplaces(
        tasks,
        [stages[n] for n in sorted({t[0].number for t in tasks})],
        work,
        races=any(t[1].is_race() for t in tasks),
    )


ALONE = "# ---- In the reference alone"


def starters(stages, only=None):
    """A starter tree has no line of the solution, builds, and says what is not written."""
    for number, stage in stages.items():
        if only and number not in only:
            continue
        with tempfile.TemporaryDirectory() as folder:
            to = pathlib.Path(folder) / "hw"
            starter.starter([stage], "check", to)
            elsewhere = {
                line.strip()
                for name in sources.files_of()
                if name not in starter.LEFT_OUT
                and "corpus" not in name
                and name.endswith((".h", ".cu", ".cc", ".md", ".sh", ".py"))
                for line in without_bodies(stage, name).splitlines()
            }
            lines = starter.solution_lines([stage]) - elsewhere
            left = [
                f"{path.relative_to(to)}: {line.strip()}"
                for path in to.rglob("*")
                if path.is_file() and ".git" not in path.parts
                for line in path.read_text(errors="replace").splitlines()
                if line.strip() in lines
            ]
            expect(
                not left and len(lines) > 10,
                f"{number}: none of {len(lines)} solution lines is left {left[:2] or ''}",
            )
            tour = subprocess.run(["tests/tour.sh"], cwd=to, stdin=subprocess.DEVNULL, capture_output=True)
            end = tour.stdout.decode().splitlines()[-1]
            expect(tour.returncode == 0 and "passed" in end, f"{number}: the tour works there: {end}")
            offered = subprocess.run(["make", "help"], cwd=to, capture_output=True, text=True).stdout
            offered = set(re.findall(r"make ([a-z-]+)", offered)) & set(
                re.findall(r"^([a-z-]+)[%:]", (ROOT / "tests/tests.mk").read_text().partition(ALONE)[2], re.M)
            )
            expect(not offered, f"{number}: what works in the reference alone is not offered {offered or ''}")
            log = subprocess.run(
                ["git", "log", "--oneline"], cwd=to, capture_output=True, text=True, check=True
            ).stdout
            expect(log.count("\n") == 1, f"{number}: a history of one commit")
            expect(
                "exists" in refusal(starter.starter, [stage], "check", to),
                f"{number}: an existing folder is refused",
            )
            again = pathlib.Path(folder) / "hunt"
            starter.hunt(stage, "check", again, lambda line: None)
            expect(
                all((tree / "AGENTS.md").is_file() for tree in (to, again)),
                f"{number}: an assistant is told what it may do",
            )
            for exercise in (e for e in stage.exercises.values() if e.core):
                hints_in(to, exercise)
            planted = starter.planted(stage, "check")
            differ = [
                n
                for n, e in stage.exercises.items()
                if not sources.same_tokens(sources.bodies_of(again, e), sources.bodies_of(ROOT, e))
            ]
            expect(differ == sorted(planted), f"{number}: a hunt has three mistakes, in {', '.join(planted)}")


def hints_in(tree, exercise):
    """A learner's tree says the first two levels of a hint, and notes which was taken."""

    def make(*words):
        made = subprocess.run(["make", "-s", *words], cwd=tree, capture_output=True, text=True)
        return made.stdout + made.stderr

    number, levels = exercise.number, ([], [], ["LEVEL=1"], ["LEVEL=4"])
    said = [make(f"hint-{number}", *level) for level in levels]
    expect(exercise.core["look"] in said[0] and exercise.core["ask"] in said[1], f"{number}: the next hint")
    expect(exercise.core["look"] in said[2], f"{number}: a hint again")
    expect("expected 1, 2, 3" in said[3], f"{number}: no other level")
    expect(f"{number} 2\n" in (tree / grade.HINTS).read_text(), f"{number}: the highest level is noted")
    made = make(f"submit-{number[:2]}", "ID=ada")
    content = json.loads((tree / f"submission-{number[:2]}-ada.json").read_text())
    expect(content["hints"][number] == "2" and f"{number}:2" in made, f"{number}: and handed in: {made}")
    note = (tree / "HOMEWORK.md").read_text()
    expect(exercise.core["contract"] in note and "(core)" in note, f"{number}: HOMEWORK.md has its contract")


def parts_of_a_stage(stages):
    """Only what is asked is to be written, is judged, and counts; each exercise by its probe, where its runs
    need one that is not written or wrong."""
    stage = stages["06"]
    expect("is not valid" in refusal(sources.ask, stages, ["06.9"]), "an unknown exercise is refused")
    sources.ask(stages, ["06.1", "06.2", "paper"])
    with tempfile.TemporaryDirectory() as name:
        to = pathlib.Path(name) / "hw"
        starter.starter([stage], "check", to)
        stubs = [n for n, e in stage.exercises.items() if sources.is_stub(sources.bodies_of(to, e))]
        expect(stubs == ["06.1", "06.2"], f"EXERCISES leaves the others written: {stubs}")
        note = (to / "HOMEWORK.md").read_text()
        expect("| 06.2 |" in note and "06.3" not in note and "hint-06.1" in note, "HOMEWORK.md names these")
        grader = submissions.Grader(stages, "check", pathlib.Path(name))
        grader.references["06"] = {}
        bodies = {n: sources.bodies_of(ROOT, e) for n, e in stage.exercises.items()}
        bodies["06.2"] = sources.stub(stage.exercises["06.2"])
        content = {"stage": "06", "id": "ada", "bodies": bodies, "hints": {"06.1": "2"}}
        result = grader.submission(None, content)
        expect((result["total"], result["of"]) == (15, 40), f"one of two exercises: {result}")
        told = [line for line in result["lines"] if "hint 2 taken; equals the reference" in line]
        expect(result["hints"] == "06.1:2" and len(told) == 1, "the table says which hint was taken")
    sources.ask(stages, [])
    expect(stage.possible() == 100, "without EXERCISES all is asked")


def judges(stages):
    """Points of a body whose runs need another one, and of one against which several judges speak."""
    stage = stages["01"]
    seen = {name: Observation("01.3 is not written yet (matmul.cu:1)") for name in stage.runs}
    verdict = grade.judge(stage, stage.exercises["01.1"], "", seen, reference.load()["01"], None)
    expect((verdict.points, verdict.because) == (0, "01.3"), f"a run that ends at a stub: {verdict.line()}")
    grade.believe_probe(grade.told(verdict, ""), "01.3")
    expect(verdict.points == 10, f"its probe alone judges it: {verdict.line()}")
    facts = {name: Observation(facts=facts) for name, facts in reference.load()["01"].items()}
    points = [
        grade.told(
            grade.judge(stage, stage.exercises["01.3"], "", facts, reference.load()["01"], races), hint
        ).points
        for races, hint in (([], ""), (["a race"], ""), ([], "wrong"), (["a race"], "wrong"))
    ]
    expect(points == [15, 12, 8, 8], f"two judges against a body cost no less than one: {points}")
    right = reference.load()["02"]["overlap on 2 ranks"]
    for more, words in ((["seconds", "compute"], "has more to do"), (["seconds"], "waits too early")):
        seen = Observation(facts=right | {name: [1.1 * right[name][0]] for name in more})
        said = in_words(differences(seen, right), seen, right)
        expect(words in said and "is 1.1 of" in said, f"what takes longer, {more}: {said}")
    said = [host_waits([body]) for body in ("{ cudaFree(0); // cudaMemcpy(", "{ cudaDeviceSynchronize(); }")]
    expect(said[0] == "" and "the host waits" in said[1], f"a body in which the host waits: {said}")
    said = [hint_in(0, "doing: a step\n7\n1 passed, 0 failed\n", number) for number in "78"]
    expect(said == ["", "a step: it ends the process"], f"a probe's end has the grader's number: {said}")
    finish = "after finish_gradient_sync() compute does not wait"
    guilty = [n for n in ("02.4", "02.5") if not grade.names_another(stages["02"], n, finish)]
    expect(guilty == ["02.5"], f"who wrote finish_gradient_sync() is guilty of it: {guilty}")
    for hints, wrong, blamed in (
        (["", "no", "", "other"], 1, [2]),
        (["", "no", "", "other"], 0, [1, 2, 3]),  # the probes alone see it
        (["", "a", "a", "b"], 1, [2, 3]),
        ([""] * 4, 1, []),  # one of them is
    ):
        verdicts = [
            grade.Verdict(f"03.{n}", "", 10, 0, "wrong", hint, wrong=wrong) for n, hint in enumerate(hints, 1)
        ]
        verdicts.append(grade.Verdict("03.5", "", 10, 10))
        grade.blame(stages["03"], verdicts)
        found = [int(v.exercise[3:]) for v in verdicts if not v.because]
        right = [v.points == 10 for v in verdicts]
        expect(
            found == [*blamed, 5]
            and right == [*(bool(wrong and any(hints) and not hint) for hint in hints), True],
            f"with the hints {hints} 03.{blamed} is to blame: {[v.line() for v in verdicts]}",
        )


def together(stages):
    """A body that makes runs of other exercises wrong loses points; so do two that do not fit each other."""
    stage, numbers = stages["03"], reference.load()["03"]
    other = {
        n: [body.replace("{", "{ (void)0;", 1) for body in sources.bodies_of(ROOT, e)]
        for n, e in stage.exercises.items()
    }
    copies = [name for name in stage.runs if "copies" in name]
    with tempfile.TemporaryDirectory() as name:
        grader = submissions.Grader(stages, "check", pathlib.Path(name))
        grader.references["03"] = numbers
        one, both = {"03.3"}, {"03.1", "03.2"}
        # told: of whom a probe tells, if all bodies are there, and if one is there alone.
        for guilty, wrong, told, left, judged_alone in (
            (one, copies, (set(), set()), [10, 10, 10, 20, 10], set(other)),
            (one, copies, (one, one), [10, 10, 10, 20, 10], set()),
            (one, copies, ({"03.3", "03.4"}, one), [10, 10, 10, 20, 10], one),
            (both, ["stage 1 on 2 ranks"], (set(), set()), [5, 5, 20, 20, 10], set(other)),
            (both, ["stage 1 on 2 ranks"], (one, one), [10, 10, 10, 20, 10], set(other)),
        ):
            alone = set()

            def observed(machine, stage, bodies, runs, races=False):
                alone.update(bodies if len(bodies) == 1 else ())
                spoiled = wrong if guilty <= set(bodies) else []
                return {
                    n: Observation(facts=numbers[n] | {"loss": [0]} if n in spoiled else numbers[n])
                    for n in runs
                }

            grader.observed = observed
            grader.hints = lambda machine, stage, bodies: {
                n: "no" * (n in told[len(bodies) == 1]) for n in bodies
            }
            verdicts, words = grader.verdicts(None, stage, other)
            points = [v.points for v in verdicts]
            expect(points == left and wrong[0] in words, f"{guilty} make {wrong} wrong: {points}, {words}")
            expect(alone == judged_alone, f"judged alone, where probes tell {told}: {alone}")


def without_bodies(stage, file):
    text = (ROOT / file).read_text()
    for exercise in stage.exercises.values():
        if exercise.file == file:
            text = sources.graft(text, exercise, [""] * len(exercise.bodies))
    return text


def refusal(call, *arguments):
    """The line with which a call is refused; empty if it is not."""
    try:
        call(*arguments)
    except UsageError as error:
        return str(error)
    return ""


def with_mistake(stage):
    """(a mutant of 03.3, its bodies with it)."""
    mutant = next(m for m in read_mutants() if m.name == "03-only-last-micro-batch")
    return mutant, sources.bodies_in(
        mutant.applied((ROOT / mutant.file).read_text()), stage.exercises["03.3"]
    )


def hostile_lines():
    """[name, exercise, points, words, body]"""
    lines = (sources.HERE / "hostile.txt").read_text().splitlines()
    return [[p.strip() for p in line.split("|", 4)] for line in lines if line and not line.startswith("#")]


def hostile(stages):
    """Bodies that want points for nothing, or to do harm (hostile.txt)."""
    lines = hostile_lines()
    in_workplaces(
        [0],
        [stages[n] for n in sorted({line[1][:2] for line in lines})],
        lambda m, t: "workplace",
        workers=1,
        sandboxed=True,
    )
    machine, marker = workplace(0, sandboxed=True), ROOT / "build/homework/marker"
    put(marker, "still here")
    with tempfile.TemporaryDirectory() as folder:
        graders = {
            check: submissions.Grader(stages, "check", pathlib.Path(folder), check) for check in (True, False)
        }
        graders[False].references = graders[True].references
        for line in lines:
            hand_in(machine, stages, graders, marker, *line)
    left = [p for p in pathlib.Path("/proc").glob("[0-9]*/cmdline") if bytes(machine.tree) in bytes_at(p)]
    expect(not left, f"no process is left over {left[:3] or ''}")


def hand_in(machine, stages, graders, marker, name, number, points, words, body):
    """One line of hostile.txt."""
    stage, begin = stages[number[:2]], time.time()
    body = body.replace("\\n", "\n").replace("\\\n", "\\n")
    bodies = [body] + sources.bodies_of(ROOT, stage.exercises[number])[1:]
    verdicts, _ = graders[not name.startswith("!")].verdicts(machine, stage, {number: bodies})
    verdict = next(v for v in verdicts if v.exercise == number)
    compiles = "does not compile" in words or "does not compile" not in verdict.words
    expect(
        verdict.points == int(points)
        and words in verdict.words
        and compiles
        and marker.read_text() == "still here",
        f"{name}: {verdict.points} points, {verdict.words[:110]!r}, {time.time() - begin:.0f} s",
    )


def bytes_at(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""


def files(stages):
    """What is no submission costs a line, whatever lies there in its place."""
    good = {"pentatron": 1, "stage": "03", "id": "ada", "bodies": {}}
    with tempfile.TemporaryDirectory() as name:
        folder, said = pathlib.Path(name), []
        (folder / "in/folder.json").mkdir(parents=True)
        for kind, stage in (("list", []), ("object", {}), ("number", 3)):
            put(folder / f"in/{kind}.json", json.dumps(good | {"stage": stage}))
        put(folder / "in/large.json", json.dumps(good | {"open": "1" * submissions.LARGEST}))
        put(folder / "in/hints.json", json.dumps(good | {"hints": {"03.1": [4]}}))
        put(folder / "in/deep.json", "[" * 100_000)
        put(folder / os.fsdecode(b"in/\xff.json"), "")
        os.mkfifo(folder / "in/pipe.json")
        for link, to in (("nothing", "none"), ("endless", "/dev/zero"), ("foreign", "/etc/passwd")):
            (folder / f"in/{link}.json").symlink_to(to)
        submissions.grade_many(stages, folder / "in", folder / "out.csv", "check", say=said.append)
        rows = list(csv.DictReader(io.StringIO((folder / "out.csv").read_text())))
        told = (folder / "out.txt").read_text().count("== ")
    expect(
        len(rows) == told == 12 and all(row["total"] == "0" and row["comment"] for row in rows),
        f"12 files that are no submissions have a line each: {[row['file'] for row in rows]}",
    )


def submitted(stages):
    """A submission that is graded twice gets the same table to the byte; wrong files cost a line."""
    stage = stages["03"]
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "in").mkdir()
        bodies = {n: sources.bodies_of(ROOT, e) for n, e in stage.exercises.items()}
        mutant, bodies["03.3"] = with_mistake(stage)
        bodies["03.4"] = sources.stub(stage.exercises["03.4"])
        content = {"pentatron": 1, "stage": "03", "id": "check", "bodies": bodies}
        put(folder / "in/a.json", json.dumps(content))
        put(folder / "in/b.json", "")
        put(folder / "in/c.json", '{"pentatron": 1, "stage": "09"}')
        put(
            folder / "in/d.json",
            '{"pentatron": 1, "stage": "03", "id": "d", "bodies": {}, "open": "\\ud800"}',
        )
        put(
            folder / "in/e.json",
            json.dumps(content | {"id": "breaks", "bodies": {}, "hunt": {"id": "check", "bodies": {}}}),
        )
        put(
            folder / "in/f.json",
            json.dumps(content | {"id": "bob", "bodies": {}, "hunt": {"id": "check", "bodies": bodies}}),
        )
        other = {
            n: [b.replace("{", "{ (void)0;", 1) for b in sources.bodies_of(ROOT, e)]
            for n, e in stage.exercises.items()
        }
        put(folder / "in/g.json", json.dumps(content | {"id": "right", "bodies": other}))
        put(
            folder / "in/Ada Lovelace_7_assignsubmission_file/h.json",
            json.dumps(content | {"bodies": {"03.1": bodies["03.1"]}}),
        )
        put(folder / "roster", "check\nada,Ada Lovelace\n")
        tables, said, whole = [], [], submissions.Grader.submission
        submissions.Grader.submission = lambda self, machine, content: (
            {}["lr"] if content["id"] == "breaks" else whole(self, machine, content)
        )
        for turn in range(2):
            shutil.rmtree(ROOT / "build/homework/grades", ignore_errors=True)
            submissions.grade_many(
                stages, folder / "in", folder / f"{turn}.csv", "check", folder / "roster", say=said.append
            )
            tables.append((folder / f"{turn}.csv").read_bytes() + (folder / f"{turn}.txt").read_bytes())
        expect(tables[0] == tables[1], "graded twice, the tables are the same to the byte")
        submissions.Grader.submission = whole
        table, moodle = tables[0].decode(), (folder / "0-moodle-03.csv").read_text()
        expect(
            "e.json,breaks,03,,,,,,,,,,,breaks is not in the roster. could not be judged: KeyError: 'lr'"
            in table,
            "what the grader can't judge has no total, and the others get theirs",
        )
        expect(
            re.search(
                r"^Ada Lovelace_7\S+h.json,check,03,10,0,0,,.*ada handed in what has the ID check",
                table,
                re.M,
            ),
            "what another one has uploaded gets no total",
        )
        expect(
            "hunt: it is that of check" in table and "\nf.json,bob,03,0,0,0,0,100," in table,
            "a hunt belongs to an ID",
        )
        expect(
            moodle.count("\n") == 2
            and "\ncheck," in moodle
            and "not in the tables to import: bob, breaks, right" in "".join(said),
            f"only who is in the roster is in the tables to import: {moodle!r}",
        )
        expect(
            all(f"{n}.json,,,,,,0" in table for n in "bcd"),
            "an empty and a foreign submission, and one that is no text, get a line each",
        )
        expect(
            "\ng.json,right,03,70,0,0,70,100,0,03.1:10 03.2:10 03.3:20 03.4:20 03.5:10,right,," in table,
            "right bodies get all points",
        )
        expect(
            re.search(r"^a.json,.*03.1:10 03.2:10 03.3:(?!20)\d+ 03.4:0 03.5:10", table, re.M)
            and "every rank's non-zero micro-batch 1 never" in table,
            "each body is graded alone, and the mistake is told",
        )


def grades(stages):
    """The tables as Canvas and Moodle read them: who is not in the roster or could not be judged has no
    row."""

    def row(identity, stage, total, more=0, of=100):
        return {"id": identity, "stage": stage, "total": total, "open": more, "of": of}

    rows = [
        row("ada", "01", 90),
        row("ada", "02", 0),
        row("bob", "02", 95, 10),
        row("bob", "02", 40),
        row("eve", "01", 100),
        row("cid", "01", "", of=""),
        row("ada", "06", 30, of=40),
        row("", "", 0, ""),
    ]
    with tempfile.TemporaryDirectory() as name:
        roster = pathlib.Path(name, "roster")
        people = {"ada": "Ada Lovelace", "bob": "", "cid": "Cid Díaz"}
        for text in (
            "ada, Ada Lovelace\n\n bob\r\ncid,Cid Díaz\n",
            "\ufeffUsername;First name;Surname\nada;Ada;Lovelace\nbob;;\ncid;Cid;Díaz\n",
            "Student,ID,SIS Login ID\nPoints Possible,,\nAda Lovelace,7,ada\n,8,bob\nCid Díaz,9,cid\n",
        ):
            roster.write_text(text)
            read = grading.read_roster(roster)
            expect(read == people, f"a roster with a head, or none: {read}")
        for folder, of in (
            ("Ada Lovelace_12_assignsubmission_file", ["ada"]),
            ("group 1-Cid Díaz_3_assignsubmission_file_", ["cid"]),
            ("Participant_4_assignsubmission_file_", []),
            ("bob", ["bob"]),
            ("", []),
        ):
            found = grading.uploaders(folder, people)
            expect(found == of, f"who uploaded into {folder!r}: {found}")
        found = grading.tables(rows, grading.read_roster(roster))
        expect("expected one" in refusal(grading.read_roster, name), "a roster that is none is refused")
    head = "Student,ID,SIS Login ID,Section,Pentatron 0{}\n    Points Possible,,,,{}\n"
    expect(
        found
        == {
            "canvas-01": head.format(1, 100) + "ada,,ada,,90\n",
            "moodle-01": "username,Pentatron 01 (%)\nada,90\n",
            "canvas-02": head.format(2, 100) + "ada,,ada,,0\nbob,,bob,,100\n",
            "moodle-02": "username,Pentatron 02 (%)\nada,0\nbob,100\n",
            "canvas-06": head.format(6, 40) + "ada,,ada,,30\n",
            "moodle-06": "username,Pentatron 06 (%)\nada,75\n",
        },
        f"the tables of those in the roster, without an empty cell {found}",
    )
    expect("eve,100" in grading.tables(rows)["moodle-01"], "without a roster all are in the tables")


def pages_of_learners(stages):
    """A page has what a learner was told, and both timelines."""
    stage = stages["03"]
    mutant, broken = with_mistake(stage)

    def work(machine, _):
        with tempfile.TemporaryDirectory() as name:
            nan = [
                "{ CUDA_CHECK(cudaMemsetAsync(group_.weights(0), 255, sizeof(real), compute_)); }"
            ] + sources.bodies_of(ROOT, stage.exercises["03.2"])[1:]
            page = pages.write(
                machine, stage, "nan", {"03.2": nan}, ["03.2  0/15"], pages.folder_of_pages(name)
            ).read_text()
            expect("03.2  0/15" in page, "a run that ends with NaN has a page, too")
            told = "03.3 12/20  stage 2 on 2 ranks: <b>wrong</b>"
            page = pages.write(
                machine, stage, "ada", {"03.3": broken}, [told], pages.folder_of_pages(name)
            ).read_text()
        data = json.loads(re.search(r"^const figures = (.*);$", page, re.M)[1])
        rows = [bar for name in data if name.startswith("timeline") for bar in data[name]["datasets"]["rows"]]
        runs = {run: {bar["stream"] for bar in rows if bar["run"] == run} for run in ("ada", "the reference")}
        expect(
            all(streams == {"compute", "data", "shard"} for streams in runs.values()),
            f"a learner's page has both timelines {runs}",
        )
        losses = {
            row["run"]
            for row in data["losses"]["datasets"]["rows"]
            if row["difference"] and row["difference"] > 1e-6
        }
        expect(losses == {"ada"}, f"it shows whose losses differ: {losses}")
        expect("on 2 ranks: &lt;b&gt;wrong&lt;/b&gt;" in page, "it says what the learner was told, as text")
        return "page"

    in_workplaces([0], [stage], work, workers=1, races=False)


PARTS = {
    "data": data,
    "files": files,
    "grades": grades,
    "pages": pages_of_learners,
    "reference": reference_itself,
    "sandbox": sandbox,
    "stubs": stubs,
    "order": order,
    "digits": digits,
    "calls": calls,
    "starters": starters,
    "parts": parts_of_a_stage,
    "judges": judges,
    "together": together,
    "submitted": submitted,
    "hostile": hostile,
    "mistakes": mistakes,
}


def check(stages, parts):
    begin = time.time()
    if parts == ["quick"]:
        data(stages)
        files(stages)
        grades(stages)
        reference_itself(stages)
        sandbox(stages)
        parts_of_a_stage(stages)
        judges(stages)
        together(stages)
        starters(stages, ["03"])
        stubs(stages, ["03.3"])
        mistakes(stages, ["03-only-last-micro-batch"])
    else:
        unknown = [p for p in parts if p not in PARTS]
        if unknown:
            raise UsageError(f"PART: {unknown[0]!r} is not valid; expected quick, {', '.join(PARTS)}")
        for name, part in PARTS.items():
            if not parts or name in parts:
                print(f"== {name}, {(time.time() - begin) / 60:.0f} min so far", flush=True)
                part(stages)
    print(f"{(time.time() - begin) / 60:.1f} min\n{passed} passed, {failed} failed")
    return int(failed > 0)
