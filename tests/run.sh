#!/usr/bin/env bash
# run.sh FILTER FOLDER...: runs the tests of each build folder and adds up what they say. Every test binary ends with
# "N passed, N failed"; one that crashes, hangs or is missing counts as one failure. The last line is the sum.
set -uo pipefail

filter=$1
limit=${TEST_TIMEOUT:-900}  # seconds for one binary
passed=0 failed=0
output=$(mktemp)
trap 'rm -f "$output"' EXIT

for folder in "${@:2}"; do
  echo "== $folder"
  only=$filter
  case $folder in *-block*) only="$filter[kernels]" ;; esac  # all else is the same with threads in a block, and slow
  timeout --kill-after=10 "$limit" "$folder/tests" ${only:+"$only"} 2>&1 | tee "$output"
  status=${PIPESTATUS[0]}
  last=$(tail -n 1 "$output")
  if [[ $last =~ ^([0-9]+)\ passed,\ ([0-9]+)\ failed$ ]]; then
    passed=$((passed + BASH_REMATCH[1])) failed=$((failed + BASH_REMATCH[2]))
    [ "$status" -eq 0 ] || [ "${BASH_REMATCH[2]}" -gt 0 ] || { echo "$folder: exit status $status"; failed=$((failed + 1)); }
  else
    [ "$status" -eq 124 ] || [ "$status" -eq 137 ] && echo "$folder: not finished after $limit seconds" || echo "$folder: ended with status $status"
    failed=$((failed + 1))
  fi
done

echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
