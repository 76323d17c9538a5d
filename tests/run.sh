#!/usr/bin/env bash
# run.sh '' FOLDER...: runs the tests of each build folder and adds up what they say. run.sh '[01]' FOLDER...: those with
# this tag, of the programs that make test-01 has built. Three lanes run side by side: tests of several ranks; those of one
# process; and dry runs, fp16 and fp8 on several ranks, and faults, where most wait for a watchdog. What the last two say
# appears when the first is through.
# Every test binary ends with "N passed, N failed"; one that crashes, hangs or is missing counts as one failure. At the
# end stand the time of each part and the slowest tests (--slow N before the rest: so many, 10 unless given); the last
# line is the sum.
set -uo pipefail

slow=10
if [ "$1" = --slow ]; then slow=$2; shift 2; fi
filter=$1 folders=("${@:2}")
of_tag=${filter:+-${filter//[][]/}}  # behind a program's name
limit=${TEST_TIMEOUT:-900}  # seconds for one binary
notes=$(mktemp -d)          # sums: passed and failed of each binary; failures: what failed in it; parts, cases: seconds
touch "$notes"/{sums,failures,parts,cases}
trap 'kill $(jobs -p) 2> /dev/null; rm -rf "$notes"' EXIT

# run NAME COMMAND...: runs a test binary and notes what it says.
run() {
  local begin=$SECONDS output="$notes/of $BASHPID" last passed=0 failed=1
  echo "== $1"
  TEST_TIMES="$output.times" timeout --kill-after=10 "$limit" "${@:2}" 2>&1 | tee "$output"
  local status=${PIPESTATUS[0]}
  echo "($((SECONDS - begin)) s)"
  printf '%6d s  %s\n' $((SECONDS - begin)) "$1" >> "$notes/parts"
  [ ! -e "$output.times" ] || awk -F '\t' -v part="$1" '{ printf "%8.1f s  %s  (%s)\n", $1, $2, part }' "$output.times" >> "$notes/cases"
  rm -f "$output.times"
  last=$(grep -E '^[0-9]+ passed, [0-9]+ failed$' "$output" | tail -n 1)
  if [[ $last =~ ^([0-9]+)\ passed,\ ([0-9]+)\ failed$ ]]; then
    passed=${BASH_REMATCH[1]} failed=${BASH_REMATCH[2]}
    # Status 3: no test of this name here.
    if [ "$status" -ne 0 ] && [ "$status" -ne 3 ] && [ "$failed" -eq 0 ]; then
      failed=1; echo "exit status $status" | tee -a "$output"
    fi
  elif [ "$status" -eq 3 ] && [ -n "$not_run" ]; then
    failed=0  # a learner's tree leaves all of these tests out
  elif [ "$status" -eq 124 ] || [ "$status" -eq 137 ]; then
    echo "not finished after $limit seconds" | tee -a "$output"
  else
    echo "ended with status $status: $(tail -n 1 "$output")" | tee -a "$output"
  fi
  echo "$passed $failed" >> "$notes/sums"
  [ "$failed" -eq 0 ] || grep -E '^failed on rank|: FAILED:$|^FAILED: |^(invalid|SURVIVED) |: [0-9]+ (columns|words)|: no file |^(exit|not finished|ended)' "$output" |
    tail -n 20 | sed "s|^|$1: |" >> "$notes/failures"
}

run_alone() {
  [ -z "$homework" ] || run "homework" $homework
  for folder in "${folders[@]}"; do
    local only="$filter$not_run~[faults]~[.]"  # without a tag to choose, hidden tests would run, too
    case $folder in *-block*) only="${filter}[kernels]$not_run" ;; esac  # all else is the same with threads in a block, and slow
    run "$folder" "$folder/tests$of_tag" "$only$(not_on_gpus "$folder" 4)"
  done
}

run_faults() {
  [ -z "$lessons" ] || run "lessons" $lessons
  [ -z "$folds" ] || run "folds" $folds
  [ -z "$published" ] || run "published" $published
  run_ranks fp16 fp8
  for folder in "${folders[@]}"; do
    case $folder in *-block*) continue ;; esac
    [[ $("$folder/tests$of_tag" --list-tags 2> /dev/null) == *"[faults]"* ]] || continue
    has_gpus "$folder" 4 || continue
    run "$folder, faults" "$folder/tests$of_tag" "${filter}[faults]$not_run"
  done
}

# has_gpus FOLDER RANKS: with NCCL a GPU has one rank.
gpus=$(nvidia-smi -L 2> /dev/null | wc -l)
has_gpus() {
  case $(basename "$1") in cuda-*-mpi*) ;; cuda-*)
    [ "$2" -le "$gpus" ] || { echo "left out: $1 on $2 ranks; GPUs: $gpus" >&2; return 1; } ;;
  esac
}

# not_on_gpus FOLDER RANKS: what this build leaves out: on GPUs the tests of the stand-ins, and those that start so many
# ranks where there are fewer GPUs.
not_on_gpus() {
  case $(basename "$1") in cuda-*) echo -n "~[standin]~[.]"; has_gpus "$@" || echo -n "~[mpirun]" ;; esac
}

run_on_ranks() {
  local folder=$1 ranks=$2 only=$3 not
  has_gpus "$folder" "$ranks" || return
  not=$(not_on_gpus "$folder" "$ranks")
  only=${only//,/$not,}$not
  # After an abort messages are left over, at which UCX wonders.
  run "$folder on $ranks ranks" env UCX_LOG_LEVEL=error mpirun -n "$ranks" "$folder/mpi_tests$of_tag" ${only:+"$only"}
}

# run_ranks PRECISION...: fp64 shows what depends on the number of ranks: 8 ranks have three dimensions, and a few tests of
# each technique and of experts; 16 ranks have five. bf16, fp16 and fp8 show what depends on the elements.
run_ranks() {
  local precision folder ranks
  for folder in "${folders[@]}"; do
    [[ $folder =~ -(fp64|fp32|bf16|fp16|fp8) && $folder != *-block* ]] || continue
    precision=${BASH_REMATCH[1]}
    [[ " $* " == *" $precision "* ]] || continue
    [ -e "$folder/mpi_tests$of_tag" ] || [ -z "$filter" ] || continue  # no such test needs several ranks
    case $precision in
      fp32) run_on_ranks "$folder" 2 "$filter$not_run" ;;
      fp64)
        run_on_ranks "$folder" 16 "${filter}[16]$not_run"
        run_on_ranks "$folder" 8 "${filter}[07]~[experts]$not_run,${filter}[8]$not_run"
        for ranks in 1 2 3 4; do run_on_ranks "$folder" $ranks "$filter$not_run"; done ;;
      *) run_on_ranks "$folder" 4 "$filter$not_run" ;;
    esac
  done
}

# What a shell has set for a run of its own is not what the tests expect.
unset CUDA_LAUNCH_BLOCKING CUDA_DEVICE_MAX_CONNECTIONS CUDA_CPU_DEVICES CUDA_CPU_MEMORY NCCL_CPU_LINK \
  NCCL_CPU_LINK_BETWEEN_NODES NCCL_CPU_RANKS_PER_NODE NCCL_CPU_SERIAL_LAUNCHES CUDA_CPU_UUID

export LSAN_OPTIONS="suppressions=$PWD/tests/leaks.txt:print_suppressions=0"
# UCX, below MPI, must not replace functions that ThreadSanitizer has replaced.
case ${folders[*]} in *-thread*) export UCX_MEM_EVENTS=n ;; esac

[ -n "$filter" ] || { run "rooms" tests/rooms.sh; run "notes" tests/notes.sh; }
homework='' lessons='' folds='' published=''
not_run=''  # in a learner's tree: the tests of what is to be written
if [ -e tests/homework/not_run.txt ]; then
  [ -n "$filter" ] || not_run=$(< tests/homework/not_run.txt)
elif [ -z "$filter" ]; then
  run "mutants" tests/mutants.sh --check
  run "tour" tests/tour.sh --check
  case " ${folders[*]} " in *"/cpu-fp64 "*) homework="python3 tests/homework/homework.py check quick" ;; esac
  case " ${folders[*]} " in *"/cpu-bf16 "*)
    case " ${folders[*]} " in *"/cpu-fp8 "*)
      lessons="python3 common/report/lessons.py tests/lessons.txt build/cpu-bf16 build/cpu-bf16/lessons" ;; esac
    folds="python3 tests/fold.py build/cpu-bf16 3 4 6 8"
    published="python3 common/report/published.py common/report/published.txt build --check common/cpu/README.md" ;; esac
fi
run_alone > "$notes/alone" 2>&1 &
run_faults > "$notes/faults" 2>&1 &
run_ranks fp32 fp64 bf16
wait
cat "$notes/faults" "$notes/alone"

echo "== time of each part"
sort -rn "$notes/parts"
echo "== slowest tests"
sort -rn "$notes/cases" | head -n "$slow"
cat "$notes/failures"  # once more, where a log is cut
awk '{ passed += $1; failed += $2 } END { print passed + 0 " passed, " failed + 0 " failed"; exit failed > 0 || passed == 0 }' "$notes/sums"
