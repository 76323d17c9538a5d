"""The homework's commands, as the Makefile calls them: homework.py COMMAND [ARGUMENT...]"""

import sys

import fingerprints
import grade
import sources
from observe import BuildError


def main(command, *arguments):
    stages = sources.read_stages()
    if command == "grade-stage":
        points = grade.grade(sources.stage_of(stages, arguments[0]))
        print(f"{arguments[0]}: {points}/70")
    elif command == "races":
        grade.look_for_races(sources.stage_of(stages, arguments[0]))
    elif command == "hint":
        grade.hint(stages, arguments[0])
    elif command == "fingerprints":
        fingerprints.make(stages, arguments)
    else:
        raise sources.UsageError(f"command: {command!r} is not valid")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except sources.UsageError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except BuildError as error:
        print(f"does not compile: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
