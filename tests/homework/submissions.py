"""What is handed in, and the grading of many. All bodies are grafted into the clean reference together. Where
that shows something wrong, those that may have it are judged alone. All runs are in a sandbox, with other sizes
and another seed than the visible ones."""

import csv
import hashlib
import io
import json
import os
import pathlib
import re
import time

import grade
import grading
import open_problems
import pages
import paper
import sources
from observe import MAY_CALL, BuildError, Machine, Observation, build, calls_of, objects_of, observe, text_of
from observe import costs_right, differences, hints_of, in_words, is_right
from sandbox import Sandbox, check_sandbox
from reference import in_workplaces, numbers_of
from sources import ROOT, UsageError, check_id, put, read_note

FORMAT, LARGEST = 1, 1 << 20  # of a file, in bytes
HUNT_POINTS = 5  # a mistake


def text_at(path):
    return path.read_text(errors="replace") if path.is_file() else ""


def submit(stage, identity, hunt=None, say=print):
    """make submit-03: packs bodies and answers into one file."""
    check_id(identity)
    content = {
        "pentatron": FORMAT,
        "stage": stage.number,
        "id": identity,
        "course": read_note().get("course", ""),
        "bodies": {n: sources.bodies_of(ROOT, e) for n, e in stage.to_write().items()},
        "answers": text_at(ROOT / f"answers-{stage.number}.txt"),
        "open": text_at(ROOT / f"open-{stage.number}.txt"),
        "hints": {n: level for n, level in grade.taken_hints().items() if n in stage.exercises},
    }
    if hunt:
        note = read_note(pathlib.Path(hunt))
        if note.get("kind") != "hunt" or note.get("stages") != [stage.number]:
            raise UsageError(
                f"HUNT: {hunt} is no hunt of stage {stage.number}; make hunt-{stage.number} writes one"
            )
        if note["id"] != identity:
            raise UsageError(f"HUNT: {hunt} is the hunt of {note['id']}; expected that of {identity}")
        content["hunt"] = {
            "id": note["id"],
            "found": text_at(pathlib.Path(hunt) / f"found-{stage.number}.txt"),
            "bodies": {n: sources.bodies_of(hunt, e) for n, e in stage.exercises.items()},
        }
    path = ROOT / f"submission-{stage.number}-{identity}.json"
    text = json.dumps(content, indent=1) + "\n"
    if len(text) > LARGEST:
        raise UsageError(f"submission: {len(text):,} bytes; expected at most {LARGEST:,}")
    put(path, text)
    written = sum(not sources.is_stub(b) for b in content["bodies"].values())
    say(
        f"{path.name}: {written} of {len(content['bodies'])} exercises, answers: {'yes' if content['answers'] else 'no'}, "
        f"open problem: {'yes' if content['open'] else 'no'}, hunt: {'yes' if hunt else 'no'}, "
        f"hints: {' '.join(f'{n}:{level}' for n, level in content['hints'].items()) or 'none'}"
    )


def read_submission(path, stages):
    """The content of a submission file; raises UsageError with one line if it is none."""

    def check(good, what):
        if not good:
            raise UsageError(what)

    none = "not a submission (make submit-03 writes one)"
    try:
        text = text_of(path, LARGEST + 1)
        check(len(text) <= LARGEST, f"more than {LARGEST:,} bytes")
        content = json.loads(text)
        json.dumps(content, ensure_ascii=False).encode()  # what is no text can't be graded, nor told
    except (OSError, ValueError, RecursionError):
        check(False, none)
    check(isinstance(content, dict) and content.get("pentatron") == FORMAT, none)
    stage = content.get("stage")
    check(
        isinstance(stage, str) and stage in stages,
        f"stage {str(stage)[:20]!r} is not one of {', '.join(stages)}",
    )
    exercises = stages[stage].exercises
    check(isinstance(content.get("id"), str), "no ID")
    check_id(content["id"][:65])

    def bodies_are_valid(bodies):
        return isinstance(bodies, dict) and all(
            n in exercises
            and isinstance(b, list)
            and len(b) == len(exercises[n].bodies)
            and all(isinstance(t, str) for t in b)
            for n, b in bodies.items()
        )

    check(bodies_are_valid(content.get("bodies")), "its bodies are not those of the exercises")
    check(
        all(isinstance(content.get(k, ""), str) for k in ("answers", "open", "course")),
        "answers must be text",
    )
    hints = content.get("hints", {})
    check(
        isinstance(hints, dict) and all(n in exercises and h in ("1", "2", "3") for n, h in hints.items()),
        "its hints are not levels of the exercises",
    )
    hunt = content.get("hunt")
    check(
        hunt is None
        or isinstance(hunt, dict)
        and isinstance(hunt.get("id"), str)
        and isinstance(hunt.get("found", ""), str)
        and bodies_are_valid(hunt.get("bodies")),
        "its hunt is not one",
    )
    return content


# ---- Grading


class Grader:
    """Grades submissions of one course. What has been judged is kept in `folder`, so an interrupted run goes
    on; the same bodies are judged once."""

    def __init__(self, stages, course, folder, check_words=True):
        self.stages, self.course, self.folder, self.check_words = stages, course, folder, check_words
        self.sources = hashlib.sha256(
            b"".join(
                (ROOT / n).read_bytes()
                for n in sources.files_of()
                if n.startswith(("0", "common/", "Makefile", "tests/homework/"))
            )
        ).hexdigest()
        self.references = {}

    def seed(self, stage):
        return int(hashlib.sha256(f"{self.course} {stage.number}".encode()).hexdigest(), 16) % 10**6 + 2

    def numbers(self, stage):
        """{run: facts} of the clean tree with the hidden sizes and seed."""
        if stage.number not in self.references:

            def run():
                build(Machine(ROOT), {r.program for r in stage.runs.values()})
                return numbers_of(Machine(ROOT), stage, self.seed(stage))

            self.references[stage.number] = self.kept(f"reference {stage.number}", run)
        return self.references[stage.number]

    def calls(self, stage, races):
        """{object file: what it calls} of the clean tree, where the stage's bodies are."""

        def work():
            names = objects_of(stage, stage.exercises, races)
            build(Machine(ROOT), names, races)
            return {name: calls_of(Machine(ROOT), name, races) for name in names}

        return self.kept(f"calls {stage.number} {races}", work)

    def foreign(self, sandbox, stage, bodies, races):
        """What these bodies call that no body needs. So they forge no result, whatever words they find: what
        ends the process, prints, or reaches a file or another's counters is called."""
        return [
            call
            for name in objects_of(stage, bodies, races)
            for call in calls_of(sandbox, name, races)
            if call not in self.calls(stage, races)[name] and not MAY_CALL.match(call)
        ]

    def kept(self, key, work):
        """work()'s result; what it was the last time, with the same sources and course."""
        name = hashlib.sha256(f"{self.sources} {self.course} {self.check_words} {key}".encode()).hexdigest()[
            :32
        ]
        path = self.folder / f"{name}.json"
        if not path.exists():
            result = work()
            part = path.with_suffix(f".{os.getpid()}.{id(result)}.part")
            put(part, json.dumps(result))
            part.rename(path)
        return json.loads(path.read_text())

    # -- One body, or several, in the clean reference

    def seen_with(self, machine, stage, bodies, runs, races):
        """What the runs show with these bodies, {number: [text]}, in place of the reference's: {name: (end,
        facts, races)}."""
        sandbox, seen = Sandbox(machine.tree), {}
        try:
            sources.put_bodies(sandbox, stage, bodies)
            programs = {stage.runs[name].program for name in runs}
            build(sandbox, programs.union(objects_of(stage, bodies, races)), races)
            if self.check_words and (calls := self.foreign(sandbox, stage, bodies, races)):
                return {n: [f"refused: {calls[0]} is not allowed in a body", {}, []] for n in runs}
            for name in runs:
                o = observe(sandbox, stage.runs[name], self.seed(stage), races)
                seen[name] = [o.end, o.facts, o.races]
                if o.end == "it hangs":  # the others would hang, too, for as long
                    return {n: ["it hangs", {}, []] for n in runs} | seen
            return seen
        except (BuildError, UsageError) as error:  # a body may have the beginning of a function, too
            return {name: [f"does not compile: {error}", {}, []] for name in runs}

    def observed(self, machine, stage, bodies, runs, races=False):
        key = json.dumps(["seen", stage.number, sorted(bodies.items()), list(runs), races])
        seen = self.kept(key, lambda: self.seen_with(machine, stage, bodies, runs, races))
        return {name: Observation(*values) for name, values in seen.items()}

    def refused(self, exercise, body):
        """Why a body is not run, in words, or None."""
        if not body:
            return "not handed in"
        if sources.is_stub(body):
            return "not written yet"
        complaints = [c for text in body if (c := sources.complaint(text))] if self.check_words else []
        return f"refused: {complaints[0]}" if complaints else None

    def verdicts(self, machine, stage, handed_in):
        """(verdicts, words about all together) of the bodies {number: [text]}."""
        numbers, verdicts, mine = self.numbers(stage), {}, {}
        for number, exercise in stage.to_write().items():
            body = handed_in.get(number)
            verdict = verdicts[number] = grade.Verdict(number, exercise.title, exercise.points)
            verdict.words = self.refused(exercise, body) or ""
            if not verdict.words and sources.same_tokens(body, sources.bodies_of(ROOT, exercise)):
                verdict.points, verdict.words = exercise.points, "equals the reference"
            elif not verdict.words:
                mine[number] = body
        if not mine:
            return list(verdicts.values()), ""
        runs = list(stage.runs)

        def give_all(numbers):
            for number in numbers:
                verdicts[number].points = verdicts[number].of

        if self.flawless(machine, stage, mine):
            give_all(mine)
            return list(verdicts.values()), "right"
        seen = self.observed(machine, stage, mine, runs)
        differs = {name: differences(o, numbers[name]) for name, o in seen.items()}
        broken = [name for name in runs if not is_right(differs[name])]
        together = (
            f"{broken[0]}: {in_words(differs[broken[0]], seen[broken[0]], numbers[broken[0]])}"
            if broken
            else "right"
        )
        suspects = [n for n, hint in self.hints(machine, stage, mine).items() if hint]

        def alone(number):
            names = dict.fromkeys([*stage.exercises[number].runs, *broken])
            verdicts[number] = self.judge(machine, stage, number, {number: mine[number]}, list(names))

        several, rest = len(suspects) > 1, {n: body for n, body in mine.items() if n not in suspects}
        for number in suspects if several else ():
            if self.hints(machine, stage, {number: mine[number]})[number]:
                alone(number)
            else:  # it looked wrong because of another one
                rest[number] = mine[number]
        if suspects and (not rest or self.right_runs(machine, stage, rest)):
            give_all(rest)
            if not several:  # whatever is wrong with all of them is its fault
                verdicts[suspects[0]] = self.judge(machine, stage, suspects[0], mine, runs)
        else:
            for number in rest if several else mine:
                alone(number)
        if broken and all(verdicts[n].points == verdicts[n].of for n in mine):
            name = broken[0]  # each is right alone; those do not fit without whom the others are right
            for number in mine:
                others = {n: body for n, body in mine.items() if n != number}
                if is_right(differences(self.observed(machine, stage, others, [name])[name], numbers[name])):
                    grade.lose(verdicts[number], f"right alone, and wrong with the others: {together}")
        return list(verdicts.values()), together

    def flawless(self, machine, stage, bodies):
        """Whether no probe, no run and no race shows anything of these bodies. Then each of them is right."""
        told = any(self.hints(machine, stage, bodies).values())
        return not told and self.right_runs(machine, stage, bodies)

    def right_runs(self, machine, stage, bodies):
        """Whether no run of the stage, and no race, shows anything of these bodies."""
        watched = self.observed(machine, stage, bodies, list(stage.runs), races=True)
        return all(
            o.end == "ok"
            and costs_right(differences(o, self.numbers(stage)[name]), o, self.numbers(stage)[name])
            for name, o in watched.items()
        )

    def hints(self, machine, stage, bodies):
        """{number: what its probe says} with these bodies in place of the reference's."""

        def ask():
            sandbox = Sandbox(machine.tree)
            try:
                sources.put_bodies(sandbox, stage, bodies)
            except UsageError as error:  # a body has the beginning of a function
                return {number: f"does not compile: {error}" for number in bodies}
            return hints_of(sandbox, stage, bodies)

        return self.kept(json.dumps(["hints", sorted(bodies.items())]), ask)

    def judge(self, machine, stage, number, bodies, names):
        """The verdict of an exercise with these bodies, of which its own alone may be wrong: of its own runs, and
        of these."""
        exercise, numbers, races = stage.exercises[number], self.numbers(stage), []
        spoiled = self.observed(machine, stage, bodies, names)
        seen = {name: spoiled.pop(name) for name in exercise.runs}
        some = any(is_right(differences(o, numbers[name])) for name, o in seen.items())
        if some and all(o.end == "ok" for o in seen.values()):
            watched = self.observed(machine, stage, bodies, exercise.runs, races=True)
            races = sorted({race for o in watched.values() for race in o.races})
            if not races and any(o.end != "ok" for o in watched.values()):
                seen = watched
        verdict = grade.judge(stage, exercise, grade.place_of(ROOT, exercise), seen, numbers, races)
        if not re.search(r"does not compile|refused: ", verdict.words):
            verdict = grade.told(verdict, self.hints(machine, stage, bodies)[number])
            verdict.words = re.sub(r"A hint: make hint-\S+", lambda _: f"Hint: {verdict.hint}", verdict.words)
        for name, o in spoiled.items():
            if not is_right(d := differences(o, numbers[name])):
                grade.lose(verdict, f"{name}: {in_words(d, o, numbers[name])}")
        return verdict

    def submission(self, machine, content):
        """All results of a submission, as CSV columns and lines."""
        stage = self.stages[content["stage"]]
        verdicts, together = self.verdicts(machine, stage, content["bodies"])
        hints = content.get("hints", {})
        lines = [v.line(hints) for v in verdicts]
        result = {
            "id": content["id"],
            "stage": stage.number,
            "write": sum(v.points for v in verdicts),
            "hunt": 0,
            "paper": 0,
            "of": stage.possible(),
            "open": 0,
            "together": together,
            "equal": " ".join(v.exercise for v in verdicts if v.words == "equals the reference"),
            "hints": " ".join(f"{n}:{level}" for n, level in sorted(hints.items())),
        }
        lines += [f"all together: {together}"] if together else []
        if content.get("hunt") and "hunt" in stage.asked:
            result["hunt"], words = self.hunted(machine, stage, content["hunt"], content["id"])
            lines += words + [
                line for line in content["hunt"].get("found", "").splitlines() if line[:1] not in ("#", "")
            ]
        if content.get("answers") and "paper" in stage.asked:
            try:
                of, answers = paper.read_answers(content["answers"])
                result["paper"] = (
                    paper.judge(Machine(ROOT), stage, of, answers, lines.append) if of == content["id"] else 0
                )
                if of != content["id"]:
                    lines.append(f"paper: the answers are those of ID {of}")
            except UsageError as error:
                lines.append(f"paper: {error}")
        if content.get("open") and stage.number in open_problems.PROBLEMS:
            try:
                result["open"], words = open_problems.judge(stage, content["open"])
                lines.append(f"open {result['open']}/{open_problems.POINTS}{words}")
            except UsageError as error:
                lines.append(f"open problem: {error}")
        result["total"] = result["write"] + result["hunt"] + result["paper"]
        return {**result, "exercises": {v.exercise: v.points for v in verdicts}, "lines": lines}

    def hunted(self, machine, stage, hunt, identity):
        from starter import planted  # only the reference has it

        points, lines = 0, []
        if hunt["id"] != identity:
            return 0, [f"hunt: it is that of {hunt['id'][:64]}"]
        for number, mutant in planted(stage, identity).items():
            exercise, body = stage.exercises[number], hunt["bodies"].get(number)
            good = not self.refused(exercise, body)
            if good and not sources.same_tokens(body, sources.bodies_of(ROOT, exercise)):
                seen = self.observed(machine, stage, {number: body}, exercise.runs)
                good = all(not differences(o, self.numbers(stage)[n]) for n, o in seen.items())
            points += HUNT_POINTS * good
            lines.append(f"hunt, {number}: {'mended' if good else 'not mended'} ({mutant.why})")
        return points, lines


# ---- Many

COLUMNS = "file id stage write hunt paper total of open exercises together equal hints comment".split()


def row_of(name, result):
    return {
        **{c: result.get(c, "") for c in COLUMNS},
        "file": name,
        "exercises": " ".join(f"{n}:{p}" for n, p in result.get("exercises", {}).items()),
    }


def grade_many(stages, source, target, course, roster=None, folder_of_pages=None, say=print):
    """make grade: grades all submissions of a folder into a CSV file, and into those that Canvas and Moodle
    import, for the logins in the file `roster`; with a folder of pages, each gets a page there. One that
    can't be judged costs only its own row."""
    roster = grading.read_roster(roster)
    source, target = pathlib.Path(source), pathlib.Path(target)
    files = [source] if source.is_file() else sorted([*source.glob("*.json"), *source.glob("*/*.json")])
    files = [path for path in files if not path.name.startswith(".")]
    if not files:
        raise UsageError(
            f"IN: {source} has no *.json; expected a folder of submissions, or of students' folders"
        )
    if target.exists() and not target.read_text(errors="replace").startswith("file,id,stage,"):
        raise UsageError(f"OUT: {target} exists and is no table of grades")
    if not target.parent.is_dir():
        raise UsageError(f"OUT: there is no folder {target.parent}")
    folder = ROOT / "build/homework/grades"
    folder.mkdir(parents=True, exist_ok=True)
    contents, rows, texts = {}, {}, {}
    names = [
        str(path.relative_to(source) if path != source else path.name)
        .encode(errors="backslashreplace")
        .decode()
        for path in files
    ]
    for name, path in zip(names, files):
        try:
            contents[name] = read_submission(path, stages)
        except Exception as error:  # whatever it is, it is this file's
            why = str(error) if isinstance(error, UsageError) else f"can't be read: {type(error).__name__}"
            rows[name], texts[name] = row_of(name, {"total": 0, "comment": why}), [why]
            say(f"{name}: {why}")
    grader, used = (
        Grader(stages, course, folder),
        [s for s in stages.values() if s.number in {c["stage"] for c in contents.values()}],
    )
    for stage in used:  # before several work at once
        grader.numbers(stage)
        for races in (False, True):
            grader.calls(stage, races)

    def work(machine, name):
        content = contents[name]
        stage = stages[content["stage"]]
        check_sandbox(ROOT, stage.program)  # built by now; a copy may hold programs of an older tree
        try:
            result = grader.kept(
                json.dumps(["submission", content, stage.asked], sort_keys=True),
                lambda: grader.submission(machine, content),
            )
        except Exception as error:  # whatever it is, it is this submission's; the others get their grades
            why = f"could not be judged: {type(error).__name__}: {str(error)[:200]}"
            result = {"id": content["id"], "stage": stage.number, "total": "", "comment": why, "lines": [why]}
        rows[name], texts[name] = row_of(name, result), result["lines"]
        why = []
        if roster is not None and content["id"] not in roster:
            why.append(f"{content['id']} is not in the roster.")
        of = grading.uploaders(name.rpartition("/")[0], roster)
        if of and content["id"] not in of:
            why.append(f"{' or '.join(of)} handed in what has the ID {content['id']}.")
            rows[name]["total"] = ""
        rows[name]["comment"] = " ".join([*why, rows[name]["comment"]]).strip()
        if folder_of_pages:
            written = {
                n: b for n, b in content["bodies"].items() if not grader.refused(stage.exercises[n], b)
            }
            try:
                pages.write(
                    Sandbox(machine.tree), stage, content["id"], written, result["lines"], folder_of_pages
                )
            except Exception as error:
                say(f"{name}: no page: {type(error).__name__}: {str(error)[:200]}")
        return (
            f"{name}: {result['lines'][0]}"
            if result["total"] == ""
            else f"{name}: {result['total']}/{result['of']}, write {result['write']}, hunt {result['hunt']}, paper {result['paper']}"
        )

    begin = time.time()
    if contents:
        in_workplaces(sorted(contents), used, work, sandboxed=True)
    out = io.StringIO()
    table = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    table.writeheader()
    table.writerows(rows[name] for name in names)
    put(target, out.getvalue())
    for name, table in grading.tables([rows[name] for name in names], roster).items():
        put(target.with_name(f"{target.stem}-{name}.csv"), table)
    put(
        target.with_suffix(".txt"),
        "".join(f"== {name}\n" + "".join(line + "\n" for line in texts[name]) + "\n" for name in names),
    )
    unknown = sorted({row["id"] for row in rows.values() if row["id"]} - set(roster or ()))
    if roster is None:
        say(
            "ROSTER is not given, so no ID was looked up; Moodle's import stops at a login that it does not know"
        )
    elif unknown:
        say(f"not in the roster, and not in the tables to import: {', '.join(unknown)}")
    say(
        f"{target}: {len(files)} submissions, {(time.time() - begin) / 60:.1f} min; what each was told: "
        f"{target.with_suffix('.txt')}"
    )
