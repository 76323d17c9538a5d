#!/usr/bin/env bash
# check.sh NAME [RANKS]: builds what the tests need whose names contain NAME, as the notes print them, and
# runs these tests. Shows the first failure in three lines, and how many there are.
set -uo pipefail
cd "$(dirname "$0")/.."
name=$1 ranks=${2:-}
[ -n "$name" ] || {
  echo "T: which test? expected a name or its beginning, as in  make test T='05: deadlocks'" >&2
  exit 2
}

# File, precision (-: any) and name of each test, by tabs. A name may be cut into several strings.
tests() {
  awk '
    FNR == 1 { depth = 0; open = 0 }
    /^ *#if/ { depth += 1; precision[depth] = match($0, /PRECISION == [0-9]+/) ? substr($0, RSTART + 13, 2) : precision[depth - 1] }
    /^ *#endif/ { depth -= 1 }
    /^TEST_CASE\(/ { open = 1; name = "" }
    open {
      line = $0
      while (match(line, /"[^"]*"/)) {
        name = name substr(line, RSTART + 1, RLENGTH - 2); line = substr(line, RSTART + RLENGTH)
        if (line ~ /^ *,/) { print FILENAME "\t" (precision[depth] ? precision[depth] : "-") "\t" name; open = 0; break }
      }
    }' tests/*.c[cu] tests/cpu/test_*.cc tests/mpi/*.c[cu]
}

found=$(tests | awk -F '\t' -v name="$name" 'index(tolower($3), tolower(name))')
if [ -z "$found" ]; then
  nearest=$(tests | awk -F '\t' -v name="$name" '{
      common = 0; n = split(tolower(name), words, /[^a-z0-9-]+/)
      for (i = 1; i <= n; ++i) if (words[i] != "" && index(tolower($3), words[i])) common += length(words[i])
      if (common > 0) print common "\t  " $3 }' | sort -rn | head -n 5 | cut -f 2-)
  echo "T: no test is called $name${nearest:+; the nearest:
$nearest}" >&2
  exit 2
fi

output=$(mktemp)
trap 'rm -f "$output"' EXIT
status=0
while IFS=$'\t' read -r file precision test; do
  # A file says in which precisions it runs; the first will do.
  build=$(sed -n 's|^// precisions: \([^ ]*\).*|\1|p' "$file")
  case $precision in 64) build=fp64 ;; 16) build=bf16 ;; *) build=${build:-fp32} ;; esac
  of_file=$(basename "${file%.*}") program=tests launcher=()
  case $file in
    tests/mpi/*) program=mpi_tests launcher=(env UCX_LOG_LEVEL=error mpirun -n "${ranks:-4}") ;;
  esac
  folder=build/cpu-$build program+=-$of_file goals=()
  # Some start programs.
  case $file in
    *programs.cu | *bad_input.cc | *primer.cc) goals=(programs) ;;
    *faults.cc) goals=(programs "$folder/mpi_tests-$of_file") ;;
    *thread_sanitizer.cc) goals=(build/cpu-fp32-thread/{,nccl_}tsan_cases build/cpu-fp32-block4-thread/tsan_cases) ;;
  esac
  make --no-print-directory BACKEND=cpu PRECISION="$build" "${goals[@]}" "$folder/$program" || exit 1
  echo "$test  ($build${launcher:+, ${ranks:-4} ranks})"
  escaped=${test//\\/\\\\} escaped=${escaped//,/\\,} escaped=${escaped//[/\\[}
  if "${launcher[@]}" "$folder/$program" "$escaped" > "$output" 2>&1; then
    grep -E '^skipped (on|in) ' "$output" || echo "  passed"
  else
    status=1
    grep -nE ': FAILED:$|^\[rank [0-9]+\] ' "$output" | head -n 1 | cut -d: -f1 | {
      read -r line && sed -n "$line,$((line + 2))p" "$output" || tail -n 3 "$output"
    } | cut -c1-160 | sed 's/^/  /'
    echo "  FAILED: $(grep -cE ': FAILED:$|^\[rank [0-9]+\] [^ ]*:[0-9]+: ' "$output") checks"
  fi
done <<< "$found"
exit "$status"
