#!/usr/bin/env bash
# sanitize.sh SANITIZERS PRECISIONS: every test, built for each of these sanitizers (address, which has UBSan,
# too; thread) and precisions, one after the other. A report of any process, also of a program that a test has
# started, is a file in build/sanitize, and is counted. The last lines are "N passed, N failed" of all, and "N
# reports".
set -uo pipefail
cd "$(dirname "$0")/.." || exit
reports=$PWD/build/sanitize passed=0 failed=0
rm -rf "$reports"
mkdir -p "$reports"
echo "All of it takes two cores some hours. What is built stays for the next time."
for sanitizer in $1; do
  for precision in $2; do
    options=log_path=$reports/$sanitizer-$precision
    ASAN_OPTIONS=$options TSAN_OPTIONS=$options UBSAN_OPTIONS=$options:print_stacktrace=1 TEST_TIMEOUT=${TEST_TIMEOUT:-7200} \
      make --no-print-directory test BACKEND=cpu SANITIZE="$sanitizer" TEST_PRECISIONS="$precision" 2>&1 | tee "$reports/output"
    if [[ $(tail -n 1 "$reports/output") =~ ^([0-9]+)\ passed,\ ([0-9]+)\ failed$ ]]; then
      passed=$((passed + BASH_REMATCH[1])) failed=$((failed + BASH_REMATCH[2]))
    else
      failed=$((failed + 1)) # it could not be built
    fi
  done
done
rm "$reports/output"
# A test of the stand-ins lets child processes write where nothing is, and expects that AddressSanitizer ends
# them.
for report in "$reports"/address-*; do
  grep -m 1 '#0' "$report" 2> /dev/null | grep -q 'tests/cpu/test_cuda_standin.cc:' && rm "$report"
done
found=$(cat /dev/null "$reports"/* 2> /dev/null | grep -cE 'ERROR: (Address|Leak)Sanitizer|: runtime error: |WARNING: ThreadSanitizer')
echo "$passed passed, $failed failed"
[ "$found" -eq 0 ] || echo "The reports are in build/sanitize."
echo "$found reports"
[ "$failed" -eq 0 ] && [ "$found" -eq 0 ]
