#!/usr/bin/env bash
# run.sh '' FOLDER...: runs the tests of each build folder and adds up what they say. run.sh '[01]' FOLDER...:
# those with this tag, of the programs that make test-01 has built. Four parts run at once: while all ranks of
# one wait, others compute. What a part says appears when it ends. Every test binary ends with "N passed, N
# failed"; one that crashes, hangs or is missing counts as one failure. At the end stand the time of each part
# and the slowest tests (--slow N before the rest: so many, 10 unless given); the last line is the sum.
set -uo pipefail

slow=10
if [ "$1" = --slow ]; then
  slow=$2
  shift 2
fi
filter=$1 folders=("${@:2}")
of_tag=${filter:+-${filter//[][]/}} # behind a program's name
limit=${TEST_TIMEOUT:-900}          # seconds for one binary
notes=$(mktemp -d)                  # sums: passed and failed of each binary; failures: what failed in it; parts, cases: seconds
touch "$notes"/{sums,failures,parts,cases}
trap 'kill $(jobs -p) 2> /dev/null; rm -rf "$notes"' EXIT

# start NAME COMMAND...: runs it in the background, as soon as fewer than four others do.
start() {
  while [ "$(jobs -rp | wc -l)" -ge 4 ]; do wait -n; done
  run "$@" &
}

# What tells a failure: Catch2, scripts, mutants.sh, notes.sh, and what run adds.
failures='^failed on rank|: FAILED:$|^FAILED: |^(invalid|SURVIVED) |: [0-9]+ (columns|words)|: no file '
failures+='|^(exit|not finished|ended)'

# run NAME COMMAND...: runs a test binary and notes what it says.
run() {
  local begin=$SECONDS output="$notes/of $BASHPID" last passed=0 failed=1 status
  TEST_TIMES="$output.times" timeout --kill-after=10 "$limit" "${@:2}" > "$output" 2>&1 &
  trap 'kill $! 2> /dev/null; exit' TERM # who interrupts this script ends the tests, too
  wait $!
  status=$?
  printf '%6d s  %s\n' $((SECONDS - begin)) "$1" >> "$notes/parts"
  if [ -e "$output.times" ]; then
    awk -F '\t' -v part="$1" '{ printf "%8.1f s  %s  (%s)\n", $1, $2, part }' "$output.times" >> "$notes/cases"
  fi
  last=$(grep -E '^[0-9]+ passed, [0-9]+ failed$' "$output" | tail -n 1)
  if [[ $last =~ ^([0-9]+)\ passed,\ ([0-9]+)\ failed$ ]]; then
    passed=${BASH_REMATCH[1]} failed=${BASH_REMATCH[2]}
    # Status 3: no test of this name here.
    if [ "$status" -ne 0 ] && [ "$status" -ne 3 ] && [ "$failed" -eq 0 ]; then
      failed=1
      echo "exit status $status" >> "$output"
    fi
  elif [ "$status" -eq 3 ] && [ -n "$not_run" ]; then
    failed=0 # a learner's tree leaves all of these tests out
  elif [ "$status" -eq 124 ] || [ "$status" -eq 137 ]; then
    echo "not finished after $limit seconds" >> "$output"
  else
    echo "ended with status $status: $(tail -n 1 "$output")" >> "$output"
  fi
  echo "$passed $failed" >> "$notes/sums"
  [ "$failed" -eq 0 ] || grep -E "$failures" "$output" | tail -n 20 | sed "s|^|$1: |" >> "$notes/failures"
  {
    flock 9
    echo "== $1"
    cat "$output"
    echo "($((SECONDS - begin)) s)"
  } 9> "$notes/says" # one after the other
}

start_alone() {
  local folder only program
  for folder in "${folders[@]}"; do
    program=tests$of_tag only="$filter$not_run~[faults]~[.]" # without a tag to choose, hidden tests would run, too
    # All else is the same with threads in a block, and slow.
    case $folder in *-block*) program=tests-kernels only="${filter}[kernels]$not_run" ;; esac
    start "$folder" "$folder/$program" "$only$(not_on_gpus "$folder" 4)"
  done
}

start_faults() {
  local folder
  for folder in "${folders[@]}"; do
    case $folder in *-block*) continue ;; esac
    [[ $("$folder/tests$of_tag" --list-tags 2> /dev/null) == *"[faults]"* ]] || continue
    has_gpus "$folder" 4 || continue
    start "$folder, faults" "$folder/tests$of_tag" "${filter}[faults]$not_run"
  done
}

# has_gpus FOLDER RANKS: with NCCL a GPU has one rank.
gpus=$(nvidia-smi -L 2> /dev/null | wc -l)
has_gpus() {
  case $(basename "$1") in cuda-*-mpi*) ;; cuda-*)
    [ "$2" -le "$gpus" ] || {
      echo "left out: $1 on $2 ranks; GPUs: $gpus" >&2
      return 1
    }
    ;;
  esac
}

# not_on_gpus FOLDER RANKS: what this build leaves out: on GPUs the tests of the stand-ins, and those that
# start so many ranks where there are fewer GPUs.
not_on_gpus() {
  case $(basename "$1") in cuda-*)
    echo -n "~[standin]~[.]"
    has_gpus "$@" || echo -n "~[mpirun]"
    ;;
  esac
}

# start_ranks PRECISION RANKS...: fp64 shows what depends on the number of ranks: 8 have three dimensions, and
# a few tests of each technique and of experts; 16 have five. The others show what depends on the elements.
start_ranks() {
  local folder ranks only not
  for folder in "${folders[@]}"; do
    [[ $folder == *-$1* && $folder != *-block* ]] || continue
    [ -e "$folder/mpi_tests$of_tag" ] || [ -z "$filter" ] || continue # no such test needs several ranks
    for ranks in "${@:2}"; do
      has_gpus "$folder" "$ranks" || continue
      not=$not_run$(not_on_gpus "$folder" "$ranks")
      case $ranks in
        16) only="${filter}[16]$not" ;;
        8) only="${filter}[07]~[experts]$not,${filter}[8]$not" ;;
        *) only=$filter$not ;;
      esac
      # After an abort messages are left over, at which UCX wonders.
      start "$folder on $ranks ranks" env UCX_LOG_LEVEL=error mpirun -n "$ranks" "$folder/mpi_tests$of_tag" ${only:+"$only"}
    done
  done
}

# What a shell has set for a run of its own is not what the tests expect.
unset CUDA_LAUNCH_BLOCKING CUDA_DEVICE_MAX_CONNECTIONS CUDA_CPU_DEVICES CUDA_CPU_MEMORY CUDA_CPU_SHARED_KIB NCCL_CPU_LINK \
  NCCL_CPU_RANKS_PER_NODE NCCL_CPU_SERIAL_LAUNCHES CUDA_CPU_UUID

export LSAN_OPTIONS="suppressions=$PWD/tests/leaks.txt:print_suppressions=0"
# UCX, below MPI, must not replace functions that ThreadSanitizer has replaced.
case ${folders[*]} in *-thread*) export UCX_MEM_EVENTS=n ;; esac

not_run='' # in a learner's tree: the tests of what is to be written
whole=''   # the folders, where scripts, lessons and notes are tested, too
if [ -e tests/homework/not_run.txt ]; then
  [ -n "$filter" ] || not_run=$(< tests/homework/not_run.txt)
elif [ -z "$filter" ]; then
  whole=" ${folders[*]} "
fi
in_whole() { [[ $whole == *" build/cpu-$1 "* ]]; }
[ -n "$filter" ] || {
  start "rooms" tests/rooms.sh
  start "notes" tests/notes.sh
}
[ -z "$whole" ] || {
  start "size" tests/size.sh
  start "mutants" tests/mutants.sh --check
  start "tour" tests/tour.sh --check
}
# The longest first.
if in_whole fp64; then start "homework" python3 tests/homework/homework.py check quick; fi
start_faults
if in_whole bf16 && in_whole fp8; then
  start "lessons" python3 common/report/lessons.py tests/lessons.txt build/cpu-bf16 build/cpu-bf16/lessons
fi
start_ranks fp64 8 4 2
start_alone
start_ranks fp64 3
start_ranks fp8 4
start_ranks bf16 4
if in_whole bf16; then
  start "folds" python3 tests/fold.py build/cpu-bf16 3 4 6 8
  start "published" python3 common/report/published.py common/report/published.txt build --check common/cpu/README.md
fi
start_ranks fp64 1 16
start_ranks fp32 2
start_ranks fp16 4
wait

echo "== time of each part"
sort -rn "$notes/parts"
echo "== slowest tests"
sort -rn "$notes/cases" | head -n "$slow"
cat "$notes/failures" # once more, where a log is cut
awk '{ passed += $1; failed += $2 } END { print passed + 0 " passed, " failed + 0 " failed"; exit failed > 0 || passed == 0 }' "$notes/sums"
