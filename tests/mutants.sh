#!/usr/bin/env bash
# mutants.sh [NAME...]: breaks the code on purpose, as tests/mutants.txt says, and runs the test that has to
# notice. A mutant that no test notices survives, and the exit status is 1. A pattern such as '03-*' is a
# name, too, and so is variation-03.2, the mistake of that variation. mutants.sh --check: breaks and runs
# nothing, but looks whether each still has its text to find and its test.
#
# It works in a copy of the sources under build/mutants, which keeps its object files: a mutant compiles
# only what it touches. Before a test may judge, it has to pass with the code as it is.
set -uo pipefail
cd "$(dirname "$0")/.."
list=$PWD/tests/mutants.txt
tree=$PWD/build/mutants/tree
log=$PWD/build/mutants/log
# Seconds; a test that hangs has noticed, and one that takes ten times as long as usual.
limit=${TEST_TIMEOUT:-300}
export TSAN_OPTIONS=halt_on_error=1:exitcode=66 OMP_NUM_THREADS=1 UCX_LOG_LEVEL=error

# The copy is made what the sources are now; what has not changed keeps its time, and its object files.
copy_sources() {
  mkdir -p "$tree"
  git ls-files -co --exclude-standard | while read -r file; do
    [ -e "$file" ] || continue
    cmp -s "$file" "$tree/$file" || {
      mkdir -p "$tree/$(dirname "$file")"
      cp "$file" "$tree/$file"
    }
  done
  (cd "$tree" && find . -path ./build -prune -o -type f -print) | while read -r file; do
    [ -e "$file" ] || rm "$tree/$file"
  done
}

# file_of TEST: where this test is.
file_of() {
  grep -lF -e "TEST_CASE(\"$1\"" -e "lesson $1" -e "run $1 " tests/lessons.txt common/report/published.txt \
    tests/test_*.c[cu] tests/*/test_*.c[cu] | head -n 1
}

# run "KIND RANKS" TEST: builds what a test needs and runs it. Status 0: passed, 1: failed, 2: does not
# compile, 3: failed, but ThreadSanitizer, which was to report a race, said nothing.
run() {
  local kind ranks build targets=() tag # of files: only that of the test is compiled
  read -r kind ranks <<< "$1"
  tag=$(basename "$(file_of "$2")" | sed 's/\..*//')
  build=build/cpu-fp64
  case $kind in
    tests) ;;
    host) build=build/cpu-fp32 ;;
    faults) build=build/cpu-fp32 targets=(programs build/cpu-fp32/mpi_tests-test_faults) ;;
    programs) targets=(programs) ;;
    ranks) ;;
    nccl) build=build/cpu-fp32 ;;
    blocks) build=build/cpu-fp32-block4 ;;
    fp8) build=build/cpu-fp8 ;;
    bf16) build=build/cpu-bf16 ;;
    threads) build=build/cpu-fp64-thread ;;
    lesson | published) build=build/cpu-bf16 ;;
    *)
      echo "unknown kind of test: $kind" >&2
      exit 2
      ;;
  esac
  local program=$build/${ranks:+mpi_}tests${tag:+-$tag}
  case $kind in lesson | published) program=build/cpu-bf16/07_combined_5d ;; esac
  case $kind-$2 in lesson-*fp8*) targets=(build/cpu-fp8/07_combined_5d) ;; esac
  make -C "$tree" --no-print-directory BACKEND=cpu PRECISION="${build:10:4}" "$program" "${targets[@]}" > "$log" 2>&1 || return 2
  local command=("$tree/$program" "${2//,/\\,}")
  if [ -n "$ranks" ]; then command=(env UCX_MEM_EVENTS=n mpirun -n "$ranks" "${command[@]}"); fi
  if [ "$kind" = lesson ]; then command=(make -C "$tree" --no-print-directory lessons "W=$2"); fi
  if [ "$kind" = published ]; then
    command=(python3 "$tree/common/report/published.py" "$tree/common/report/published.txt" "$tree/build" --check "$tree/common/cpu/README.md" "$2")
  fi
  local begin=$SECONDS
  timeout --kill-after=10 "${3:-$limit}" "${command[@]}" > "$log" 2>&1 || {
    [ "$kind" != threads ] || grep -q 'ThreadSanitizer: data race' "$log" || return 3
    return 1
  }
  seconds=$((SECONDS - begin))
  grep -q '^[1-9][0-9]* passed, 0 failed$' "$log" # a filter that fits no test notices nothing
}

# found_once TEXT: `find`, whose line ends are spelled \n, is in there once.
found_once() {
  find=${find//\\n/$'\n'}
  local without=${1//"$find"/}
  [ $((${#1} - ${#without})) -eq ${#find} ] && return
  echo "invalid   $name: the text to find is not exactly once in $file"
  survived+=("$name")
  return 1
}

check() {
  found_once "$(cat "$file")" || return
  [ -n "$(file_of "$test_name")" ] && return
  echo "invalid   $name: there is no test $test_name"
  survived+=("$name")
}

killed=0 survived=()
declare -A trusted usual
judge() {
  local key="$test_kind|$test_name" status begin=$SECONDS
  printf '%3d of %d, %d min so far: ' "$tried" "$all" $((SECONDS / 60))
  if [ -z "${trusted[$key]:-}" ]; then
    run "$test_kind" "$test_name"
    trusted[$key]=$? usual[$key]=$((${seconds:-0} + 2))
    [ "${trusted[$key]}" -eq 0 ] || tail -n 20 "$log"
  fi
  if [ "${trusted[$key]}" -ne 0 ]; then
    echo "useless   $name: its test fails without it ($test_kind, $test_name)"
    survived+=("$name")
    return
  fi
  local original broken
  original=$(cat "$tree/$file" && echo x)
  found_once "$original" || return
  replace=${replace//\\n/$'\n'}
  broken=${original/"$find"/"$replace"}
  printf '%s' "${broken%x}" > "$tree/$file"
  run "$test_kind" "$test_name" $((10 * usual[$key] < limit ? 10 * usual[$key] : limit))
  status=$?
  printf '%s' "${original%x}" > "$tree/$file"
  case $status in
    0)
      echo "SURVIVED  $name ($test_kind: $test_name)"
      survived+=("$name")
      ;;
    2)
      echo "invalid   $name: does not compile"
      tail -n 10 "$log"
      survived+=("$name")
      ;;
    3)
      echo "SURVIVED  $name: its test fails, but not with a data race"
      tail -n 10 "$log"
      survived+=("$name")
      ;;
    *)
      echo "killed    $name ($test_kind: $test_name), $((SECONDS - begin)) s"
      killed=$((killed + 1))
      ;;
  esac
}

wanted() {
  local pattern
  [ $# -eq 1 ] && return 0
  for pattern in "${@:2}"; do
    # shellcheck disable=SC2053
    [[ $1 == $pattern || ${variation:+variation-$variation} == $pattern ]] && return 0
  done
  return 1
}

# each ACTION NAME...: for each test of these mutants.
each() {
  local line word rest name variation find replace file test_kind test_name
  tried=0
  while IFS= read -r line || [ -n "$line" ]; do
    word=${line%% *} rest=${line#* }
    rest=${rest#"${rest%%[! ]*}"}
    case $word in
      '#'* | '') ;;
      mutant) name=$rest variation='' find='' replace='' ;;
      variation) variation=$rest ;;
      why) ;;
      file) file=$rest ;;
      find) find=$rest ;;
      replace)
        replace=$rest
        [ "$line" = replace ] && replace=''
        ;;
      test)
        test_kind=${rest%%:*} test_name=${rest#*: }
        if wanted "$name" "${@:2}"; then
          tried=$((tried + 1))
          $1 < /dev/null
        fi
        ;;
      *)
        echo "tests/mutants.txt: not understood: $line" >&2
        exit 2
        ;;
    esac
  done < "$list"
}

action=judge
if [ "${1:-}" = --check ]; then
  action=check
  shift
else
  copy_sources
  each true "$@"
  all=$tried
fi
each $action "$@"

if [ $action = check ]; then
  echo "$((tried - ${#survived[@]})) passed, ${#survived[@]} failed"
  exit $((${#survived[@]} > 0))
fi
[ "$tried" -gt 0 ] || {
  echo "no such mutant: $*" >&2
  exit 2
}
echo "$killed killed, ${#survived[@]} survived${survived:+: ${survived[*]}}"
[ ${#survived[@]} -eq 0 ]
