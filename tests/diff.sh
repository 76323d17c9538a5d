#!/usr/bin/env bash
# diff.sh 03: what a stage adds, a screen each: the lines of main.cu, against 01 or, where they are fewer, 02 (of 07, whose
# lines say what is not in 01, against that); what the technique's header puts in place of the defaults of a seam; where the rest lies, as the stage's note says.
# diff.sh 02 experts: the lines of main.cu alone, of two programs.
set -uo pipefail
cd "$(dirname "$0")/.."
seams=common/model/seams.h
color=$([ -t 1 ] && echo always || echo never)

# main_of NAME: the source of a stage (02) or of a program beside it (experts).
main_of() {
  local found
  for found in "$1"_*/main.cu 0*/"$1.cu"; do [ -e "$found" ] && echo "$found" && return; done
  echo "$1: no such stage; expected 01 to 07 or $(basename -as .cu 0*/[a-ln-z]*.cu | paste -sd ' ')" >&2
  exit 2
}
lines() { git diff --no-index --numstat "$1" "$2" | cut -f "$3"; }  # 1: more, 2: fewer
show_main() {
  echo "== $2, against $1: $(lines "$1" "$2" 1) lines more, $(lines "$1" "$2" 2) fewer"
  git --no-pager diff --no-index --color=$color --unified=2 "$1" "$2" | tail -n +5
}

# show_function FILE LINE: it, from its line to its end.
show_function() {
  echo "  $1:$2"
  awk -v first="$2" 'NR >= first { print "    " $0; if (/[;}]( *\/\/.*)?$/ && (NR == first || /^  }/) || /;$/ && !body) exit
                                   if (/\{$/) body = 1 }' "$1"
}

if [ $# -lt 2 ]; then
  case ${1:-} in 0[2-7]) ;; *) echo "diff: ${1:-nothing} is not valid; expected 02 to 07" >&2; exit 2 ;; esac
fi
main=$(main_of "$1") || exit 2
if [ $# -gt 1 ]; then
  other=$(main_of "$2") || exit 2
  show_main "$main" "$other"
  exit 0
fi
base=$(main_of 01)
if [[ $1 == 0[3-6] ]] && [ "$(lines "$(main_of 02)" "$main" 1)" -lt "$(lines "$base" "$main" 1)" ]; then base=$(main_of 02); fi
show_main "$base" "$main"

for header in "$(dirname "$main")"/*.h; do
  overrides=$(grep -nE '\) (const )?override' "$header" | cut -d: -f1)
  [ -n "$overrides" ] || continue
  echo; echo "== $header, in place of the defaults in $seams"
  for line in $overrides; do
    # A declaration may have begun on an earlier line.
    while ! sed -n "${line}p" "$header" | grep -qE '^  [A-Za-z]'; do line=$((line - 1)); done
    name=$(sed -n "${line}p" "$header" | grep -oE '[a-z_]+\(' | head -n 1)
    echo; show_function "$header" "$line"
    default=$(grep -nE "virtual .*[ >]${name%(}\(" "$seams" | head -n 1 | cut -d: -f1)
    [ -z "$default" ] || { echo "  default:"; show_function "$seams" "$default"; }
  done
done

echo; echo "== The rest ($(dirname "$main")/README.md)"
awk '/^## / { on = /^## Where it is/; next } on' "$(dirname "$main")/README.md" | sed -E 's/\[`?([^]`]*)`?\]\([^)]*\)/\1/g'
