#!/usr/bin/env bash
# size.sh [FOLDER]: how many lines there are to read, and how many there may be. `closure` is what a reader of
# a stage has to read (closure.py), `path` the part of it that trains: main.cu, model, kernels, device. The
# product is all C++ and CUDA of common and the stages but the stand-ins. Names each size above its ceiling;
# the last line is "N passed, N failed". Who raises a ceiling says in the commit what a reader gains.
set -uo pipefail

ceilings='
closure-01 7409
closure-01-path 4380
closure-02 8387
closure-03 8569
closure-04 8534
closure-05 9290
closure-06 9285
closure-07 12487
product 18030
stand-ins 5763
other-C++ 21082
'

tests=$(realpath "$(dirname "$0")")
cd "${1:-$tests/..}" || exit
# count PATTERN [BUT]: lines of the C++ and CUDA whose paths have the pattern.
count() {
  find . -name build -prune -o -name '*.cc' -print -o -name '*.cu' -print -o -name '*.h' -print | grep -E "^./$1" |
    grep -vE "^./(${2:-nothing})" | xargs -r cat | wc -l
}
sizes=$(
  python3 "$tests/closure.py" | sed 's/^/closure-/'
  echo "product $(count '(common|0[1-7]_[^/]*)/' common/cpu/)"
  echo "stand-ins $(count common/cpu/)"
  echo "other-C++ $(count '' '(common|0[1-7]_[^/]*)/')"
)

passed=0 failed=0
printf '%-16s %8s %8s %16s\n' '' lines ceiling 'by definitions'
while read -r name ceiling; do
  read -r lines by_definitions < <(sed -n "s/^$name //p" <<< "$sizes")
  printf '%-16s %8s %8s %16s\n' "$name" "${lines:-none}" "$ceiling" "${by_definitions:-}"
  if [ "${lines:-$((ceiling + 1))}" -le "$ceiling" ]; then
    passed=$((passed + 1))
  else
    failed=$((failed + 1))
    echo "FAILED: $name is above its ceiling"
  fi
done < <(grep . <<< "$ceilings")
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
