#!/usr/bin/env bash
# fuzz.sh TESTS N SEED RANKS...: N random cases of 07, in turn on each of these numbers of ranks, and at last
# what was drawn. The cases are numbered from SEED; the same number on the same ranks is the same case.
set -uo pipefail

tests=$1 n=$2 seed=$3
ranks=("${@:4}")
log=$(mktemp)
trap 'rm -f "$log"' EXIT
export FUZZ_SHOW=1 UCX_LOG_LEVEL=error OMP_NUM_THREADS=1
case $tests in *-thread/*) export UCX_MEM_EVENTS=n ;; esac

failed=0
for turn in "${!ranks[@]}"; do
  cases=$(((n - turn + ${#ranks[@]} - 1) / ${#ranks[@]}))
  [ "$cases" -gt 0 ] || continue
  FUZZ_CASES=$cases FUZZ_SEED=$seed TEST_CASE_TIMEOUT=3000 mpirun -n "${ranks[$turn]}" "$tests" '[fuzz]' 2>&1 | tee -a "$log"
  [ "${PIPESTATUS[0]}" -eq 0 ] || failed=1
  seed=$((seed + cases))
done

# How many cases have each axis above 1, and how many axes at once.
awk '/^[0-9]+: mpirun/ {
    axes = 0
    for (i = 1; i < NF; ++i)
      if ($i ~ /^--(tp|cp|dp|pp|ep)$/ && $(i + 1) > 1) { ++with[$i]; if ($i != "--ep") ++axes }
      else if ($i ~ /^--(zero-stage|pp-schedule|recompute|cp-layout|cp-exchange|attention|balance)$/) ++with[$i " " $(i + 1)]
    ++at_once[axes]; ++all
    if (/--sequence-parallel/) ++with["--sequence-parallel"]
    if (/--experts/) ++with["--experts"]
  }
  END {
    print all " cases"
    for (i = 0; i <= 4; ++i) print at_once[i] + 0 " with " i " of tp, cp, dp, pp above 1"
    for (option in with) print with[option] " with " option | "sort -k3"
  }' "$log"
[ "$failed" -eq 0 ] && echo "all agree" || {
  echo "some differ"
  exit 1
}
