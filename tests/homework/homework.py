"""The homework's commands, as the Makefile calls them: homework.py COMMAND [NAME=VALUE...] [ARGUMENT...]"""

import pathlib
import re
import signal
import sys

import grade
import open_problems
import pages
import paper
import reference
import sources
import submissions
from observe import BuildError
from sources import ROOT, UsageError


def grade_stage(stage, hunt):
    """Everything of a stage that this tree has, and the sum."""
    in_hunt, extra = sources.read_note().get("kind") == "hunt", []
    points = 0 if in_hunt else grade.grade(stage)

    def part(name, of, work):
        try:
            found, words = work()
        except UsageError as error:
            found, words = 0, f" ({error})"
        extra.append(f"{name} {found}/{of}{words}")
        return found

    if (hunt or in_hunt) and "hunt" in stage.asked:
        found = grade.grade_hunt(stage, pathlib.Path(hunt or ROOT))
        points += part("hunt", sources.PARTS["hunt"], lambda: found)
    if (ROOT / f"answers-{stage.number}.txt").exists() and "paper" in stage.asked:
        points += part(
            "paper", sources.PARTS["paper"], lambda: (paper.paper(stage, None, lambda line: None), "")
        )
    answer = ROOT / f"open-{stage.number}.txt"
    if stage.number in open_problems.PROBLEMS and answer.exists():
        part("open", 10, lambda: open_problems.judge(stage, answer.read_text()))
    if extra:
        print("   ".join(extra))
    print(f"{stage.number}: {points}/{stage.possible()}")


def main(command, *arguments):
    stages = sources.read_stages()
    words = [a for a in arguments if "=" not in a]
    given = {name: value for name, _, value in (a.partition("=") for a in arguments if "=" in a) if value}

    def needed(name, example):
        if name not in given:
            raise UsageError(f"{name}: not given; expected for example {name}={example}")
        return given[name]

    exercises = re.findall(r"[^\s,]+", given.get("EXERCISES", ""))
    stages_asked = sources.ask(stages, exercises) if exercises else []

    def one():
        return sources.stage_of(stages, words[0] if words else "")

    commands = {
        "grade-stage": lambda: grade_stage(one(), given.get("HUNT")),
        "races": lambda: grade.look_for_races(one()),
        "hint": lambda: grade.hint(stages, words[0], given.get("LEVEL")),
        "paper": lambda: paper.paper(one(), given.get("ID")),
        "submit": lambda: submissions.submit(one(), needed("ID", "you"), given.get("HUNT")),
        "grade": lambda: submissions.grade_many(
            stages,
            needed("IN", "submissions/"),
            needed("OUT", "grades.csv"),
            needed("COURSE", "2027s"),
            given.get("ROSTER"),
            pages.folder_of_pages(given["PAGES"]) if "PAGES" in given else None,
        ),
        "reference": lambda: reference.make(stages),
    }
    if (sources.HERE / "starter.py").exists():
        import check
        import exam
        import hours
        import starter

        commands |= {
            "homework": lambda: starter.starter(
                stages_asked
                or [sources.stage_of(stages, n) for n in re.findall(r"[^\s,]+", needed("STAGES", "03"))],
                needed("COURSE", "2027s"),
                pathlib.Path(needed("TO", "../hw03")),
            ),
            "hunt": lambda: starter.hunt(one(), sources.check_id(needed("ID", "you")), given.get("TO")),
            "exam": lambda: print(exam.text(exam.drawn_from(needed("COURSE", "2027s")))),
            "exam-answers": lambda: print(exam.text(exam.drawn_from(needed("COURSE", "2027s")), True)),
            "course-hours": lambda: hours.course_hours(stages, given.get("IN")),
            "check": lambda: check.check(stages, words),
        }
    if command not in commands:
        raise UsageError(f"make {command} works in the reference; this is a learner's tree")
    status = commands[command]()
    return status if command in ("check", "course-hours") else 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # make hint-03.3 | head -1 ends without a word
    try:
        sys.exit(main(*sys.argv[1:]))
    except UsageError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except BuildError as error:
        print(f"does not compile: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
