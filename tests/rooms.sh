#!/usr/bin/env bash
# rooms.sh: what a file may know. Prints each violation; the last line is "N passed, N failed", of files and
# options.
#
#   common/ROOM   includes its own room and rooms below, and how device refuses: errors.h, mapped_file.h
#   0N_stage      includes common and earlier stages, and names no later stage's technique
#   common        names no technique; only seams.h says who overrides its four seams, and that a model may have
#                 experts is in its config, in the log, and in their kernels
#   tests         of one kind are compiled as one file, as make test or make test-07 chooses them, so no two have the
#                 same name outside of functions
#   options       each is named in a test and in a note
#   kernels       say the shape of all they get: each pointer to numbers has it beside it, or "all [size]" is behind the last
set -uo pipefail
cd "${1:-$(dirname "$0")/..}"
rooms=(clock device kernels tensor_cores model ranks watchdog options checkpoint run) # from the bottom up
# What only this stage and later ones speak of.
words=([3]='(?-i:ZeRO)|zero_stage|reshard' [4]='tensor.(parallel|ranks)|sequence.parallel' [5]='pipeline|bubble|1f1b|zb.h1'
  [6]='context.(parallel|ranks)|\bring.attention|zigzag' [7]='expert|\bmesh')
passed=0 failed=0

# judge FILE VIOLATIONS: lines of the file that it may not have.
judge() {
  if [ -z "${2//$'\n'/}" ]; then
    passed=$((passed + 1))
    return
  fi
  failed=$((failed + 1))
  grep . <<< "$2" | sed "s|^|$1:|"
}

# later_words N: what a file of stage N may not name.
later_words() {
  local all=() n
  for n in 3 4 5 6 7; do [ "$n" -le "$1" ] || all+=("${words[$n]}"); done
  IFS='|'
  echo "${all[*]:-nothing is later}"
}

allowed=''
for room in "${rooms[@]}"; do
  allowed+="${allowed:+|}$room/"
  for file in common/$room/*.*; do
    lines=$(grep -nE '^ *#include "' "$file" | grep -vE "\"($allowed)" | grep -vE '"(modelled_link|device/(errors|mapped_file)).h"')
    case $room-$file in
      *seams.h | *kernels/experts*) ;;
      *config.* | *checkpoint_folder.* | *log.*) lines+=$'\n'$(grep -niP "${words[3]}|${words[5]}|${words[6]}" "$file") ;;
      *) lines+=$'\n'$(grep -niP "${words[3]}|${words[5]}|${words[6]}|${words[7]}" "$file") ;;
    esac
    judge "$file" "$lines"
  done
done
for file in 0[1-7]_*/*.* 0[1-7]_*/*/*.*; do
  stage=${file:1:1}
  lines=$(grep -nE "^ *#include \"(\.\./)+0[$((stage + 1))-9]" "$file")
  [ "$stage" = 1 ] || lines+=$'\n'$(grep -niP "$(later_words "$stage")" "$file")
  judge "$file" "$lines"
done

for file in $(grep -l '^__global__' common/*/*.cu 0*/*.cu); do
  judge "$file" "$(awk '/^__global__/ { signature = ""; open = 1 }
    open { signature = signature $0 }
    open && /\) \{/ {
      open = 0
      sub(/.*\/\*(all|both) [^\/]*\//, "", signature)
      gsub(/\/\*[^\/]*\//, "@", signature)
      n = split(signature, argument, ",")
      for (i = 1; i <= n; ++i)
        if (argument[i] ~ /(In|Out)<|(real|accum|double|_t|T|Result)\* / && argument[i] !~ /@/) print NR ": no shape:" argument[i]
    }' "$file")"
done

for option in $(cat 0*/*.[hc]* 0*/*/*.[hc]* common/*/*.[hc]* | tr '\n' ' ' | grep -oP '\bline\.\w+\(\s*"\K--[\w-]+' | sort -u); do
  judge "$option" "$(for kind in "test_*.c[cu]:test" "*.md:note"; do
    grep -rqP --include="${kind%:*}" -e "$option(?![\w-])" .github [0-9]* common tests README.md || echo "no ${kind#*:} names it"
  done)"
done

# Types, and functions and variables, whose lines begin with a type.
names='^(?:(?:class|struct|enum class) \K\w+|using \K\w+(?= =)|[A-Za-z][\w:<>,&* ]*[ *&]\K\w+(?=\(| = |\{|\[))'
for kind in "test_*.cu" "test_*.cc cpu/test_*.cc" "mpi/test_*.cu"; do
  judge tests "$(cd tests && grep -oP "$names" $kind | sort -u |
    awk -F : '{ files[$2] = files[$2] " " $1; n[$2]++ } END { for (name in n) if (n[name] > 1) print name " is in" files[name] }')"
done
# Without this line, which a formatter may join to others, a file is compiled nowhere (tests.mk).
judge tests "$(grep -L '^// precisions: ' tests/*.cu tests/mpi/*.cu | sed 's|$| says no precisions|')"
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
