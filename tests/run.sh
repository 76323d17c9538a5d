#!/usr/bin/env bash
# run.sh FILTER FOLDER...: runs the tests of each build folder, and those for several ranks under mpirun, and adds up
# what they say. Every test binary ends with "N passed, N failed"; one that crashes, hangs or is missing counts as one
# failure. The last line is the sum.
set -uo pipefail

filter=$1
limit=${TEST_TIMEOUT:-900}  # seconds for one binary
passed=0 failed=0 failures=''
output=$(mktemp)
trap 'rm -f "$output"' EXIT

# run NAME COMMAND...: runs a test binary and adds up.
run() {
  local begin=$SECONDS
  timeout --kill-after=10 "$limit" "${@:2}" 2>&1 | tee "$output"
  local status=${PIPESTATUS[0]} last
  echo "($((SECONDS - begin)) s)"
  failures+=$(grep -E '^failed on rank|: FAILED:$|^(invalid|SURVIVED) ' "$output" | tail -n 20 | sed "s|^|\n$1: |")
  last=$(grep -E '^[0-9]+ passed, [0-9]+ failed$' "$output" | tail -n 1)
  if [[ $last =~ ^([0-9]+)\ passed,\ ([0-9]+)\ failed$ ]]; then
    passed=$((passed + BASH_REMATCH[1])) failed=$((failed + BASH_REMATCH[2]))
    [ "$status" -eq 0 ] || [ "${BASH_REMATCH[2]}" -gt 0 ] || { echo "$1: exit status $status"; failed=$((failed + 1)); }
  else
    [ "$status" -eq 124 ] || [ "$status" -eq 137 ] && echo "$1: not finished after $limit seconds" || echo "$1: ended with status $status"
    failed=$((failed + 1))
  fi
}

[ -n "$filter" ] || { run "rooms" tests/rooms.sh; run "mutants" tests/mutants.sh --check; }
for folder in "${@:2}"; do
  echo "== $folder"
  only=$filter
  case $folder in *-block*) only="$filter[kernels]" ;; esac  # all else is the same with threads in a block, and slow
  case $folder in *-thread | *-address) only="$only~[.]" ;; esac  # their times mean nothing
  # UCX, below MPI, must not replace functions that ThreadSanitizer has replaced.
  case $folder in *-thread) export UCX_MEM_EVENTS=n ;; esac
  run "$folder" "$folder/tests" ${only:+"$only"}
  case $folder in *-block*) continue ;; esac
  # MPI leaks at its end; and after an abort messages are left over, at which UCX wonders.
  # What depends on the number of ranks alone, fp32 and fp64 have shown.
  all_ranks="1 2 3 4 8"
  case $folder in *-bf16*) all_ranks="2 8" ;; esac
  for ranks in ${TEST_RANKS:-$all_ranks}; do
    echo "== $folder on $ranks ranks"
    run "$folder on $ranks ranks" env UCX_LOG_LEVEL=error ASAN_OPTIONS=detect_leaks=0 \
      mpirun -n "$ranks" "$folder/mpi_tests" ${only:+"$only"}
  done
  # Five dimensions at once, which 8 ranks have not.
  case $folder in *-fp64*)
    echo "== $folder on 16 ranks"
    run "$folder on 16 ranks" env UCX_LOG_LEVEL=error ASAN_OPTIONS=detect_leaks=0 mpirun -n 16 "$folder/mpi_tests" "$only[16]"
  esac
done

[ -z "$failures" ] || echo "$failures"  # once more, where a log is cut
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
