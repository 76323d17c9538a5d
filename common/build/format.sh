#!/usr/bin/env bash
# format.sh [--check]: formats C++ and CUDA (clang-format, as .clang-format says), Python (ruff) and shell
# (shfmt); with --check it changes nothing, and shows what it would change. The last line is "N passed, N
# failed", or "skipped".
set -uo pipefail
cd "$(dirname "$0")/../.." || exit
common/build/venv.sh format || {
  echo "skipped: the formatters can not be installed here"
  exit 0
}
in_place=(-i) python=() shell=(-w)
[ "${1:-}" != --check ] || in_place=(--dry-run -Werror) python=(--diff) shell=(-d)

passed=0 failed=0
# format COMMAND GLOB...: of the files that git knows.
format() {
  if git ls-files "${@:2}" | xargs build/python-format/bin/$1; then
    passed=$((passed + 1))
  else
    failed=$((failed + 1))
  fi
}
format "clang-format ${in_place[*]}" '*.cu' '*.h' '*.cc'
format "ruff format -q --line-length 110 ${python[*]}" '*.py'
format "shfmt -i 2 -ci -sr ${shell[*]}" '*.sh' .ci/run
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
