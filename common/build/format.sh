#!/usr/bin/env bash
# format.sh OPTIONS: clang-format over all C++ and CUDA, as .clang-format says; -i changes the files, and
# --dry-run -Werror names those that it would change. The last line is "N passed, N failed", or "skipped".
set -uo pipefail
cd "$(dirname "$0")/../.." || exit
common/build/venv.sh format || {
  echo "skipped: clang-format can not be installed here"
  exit 0
}
git ls-files '*.cu' '*.h' '*.cc' | xargs build/python-format/bin/clang-format "$@" && echo "1 passed, 0 failed"
