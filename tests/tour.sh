#!/usr/bin/env bash
# tour.sh [--check | --record]: the steps of tour.txt, in the terminal (make tour). Enter goes on, and so does the end of
# the input: a pipe or a file works, too. The last step changes a line in a copy, build/tour, which goes with
# the tour; the tree itself is never written. STEP is the first one that is shown. What a step says of a command's output is looked up there.
# Without a terminal the last line is "N passed, N failed", of these and of the places in the code.
#
# A learner's tree, whose programs lack bodies, has one step less, and runs nothing: it shows what the complete
# programs print, which --record has written into homework/tour.out. So does --check, which looks for all this.
set -uo pipefail
cd "$(dirname "$0")/.."
copy=build/tour check='' recorded=tests/homework/tour.out recording='' learner='' passed=0 failed=0
[ "${1:-}" != --check ] || check=1
[ "${1:-}" != --record ] || { recording=1 && : > "$recorded"; }
[ ! -e .homework ] || learner=1
trap 'rm -rf "$copy"' EXIT
trap 'echo; exit 130' INT TERM HUP

# note GOOD WHAT: counts; a failure is said.
note() {
  if [ "$1" = 0 ]; then passed=$((passed + 1)); else
    failed=$((failed + 1))
    echo "FAILED: step $step, $2"
  fi
}
say() { [ -n "$check" ] || printf '%s\n' "$@"; }
pause() { [ -n "$check" ] || {
  read -rp $'\n'"[$1] " || true
  [ -t 0 ] || echo
}; }

# look FILE TEXT: where it stands, with what follows.
look() {
  line=$(grep -nF -- "$2" "$1" | cut -d: -f1)
  [[ $line =~ ^[0-9]+$ ]]
  note $? "$2 is not once in $1" && [[ $line =~ ^[0-9]+$ ]] || return
  say '' "  $1:$line"
  [ -n "$check" ] || sed -n "$line,$((line + 3))p" "$1" | sed 's/^/  | /'
}

run() {
  say '' "$ $1" ''
  if [ -n "$check$learner" ]; then
    output=$(line="$ $1" awk '/^\$ / { of = ($0 == ENVIRON["line"]); next } of' "$recorded")
    [ -n "$output" ]
    note $? "what it prints is not recorded: $1"
  else
    output=$(bash -c "$1" 2>&1 < /dev/null)
    [ -z "$recording" ] || printf '%s\n' "$ $1" "${output//$PWD\//}" | sed 's/ *$//' >> "$recorded"
  fi
  say "$output"
}

# change FILE TEXT OTHER: in a copy with the object files that are there, so that only this file is compiled
# again.
change() {
  look "$1" "$2"
  file=$1
  [ -z "$check" ] || return
  rm -rf "$copy"
  mkdir -p "$copy/build/cpu-fp32"
  cp -a Makefile 0* common tests "$copy"
  cp -a build/batches build/cpu "$copy/build"
  cp -a build/cpu-fp32/objects "$copy/build/cpu-fp32"
  say '' "Change line $line of $copy/$1 in your editor, where it says" "  $2" "to" "  $3"
  pause "Enter: changed, or the tour shall change it"
  if cmp -s "$1" "$copy/$1"; then sed -i "${line}s|$2|$3|" "$copy/$1"; fi
  diff "$1" "$copy/$1"
}

# fails GOALS PROGRAM TEST FILTER: what was changed compiles, and the test notices. FILTER, of sed: what is
# shown of it.
fails() {
  say '' "$ $2 '$3'" ''
  [ -z "$check" ] || return
  # With this CURDIR the commands are those of this tree, and what it has compiled is not compiled again.
  env -u MAKEFLAGS -u MAKELEVEL make -s -C "$copy" "CURDIR=$PWD" $1 ||
    {
      note 1 "$file does not compile"
      return
    }
  output=$(cd "$copy" && timeout 300 "$2" "$3" 2>&1 < /dev/null)
  grep -qE '^[0-9]+ passed, [1-9][0-9]* failed$' <<< "$output"
  note $? "the test does not fail with the change; what did you change?"
  sed -n "$4" <<< "$output"
  tail -n 1 <<< "$output"
}

[[ ${STEP:=1} =~ ^([1-9]|10)$ ]] || {
  echo "STEP: $STEP is not valid; expected 1 to 10" >&2
  exit 2
}
say "Ten steps, about an hour. Enter goes on, Ctrl-C ends; make tour STEP=4 begins with the fourth."
step=0
while read -r -u 3 word text; do
  [ "$word" = step ] || [ "$step" -ge "$STEP" ] || continue
  case $word in
    '#'* | '') ;;
    step)
      step=$((step + 1))
      [ "$step" -ge "$STEP" ] || continue
      [ "$step" = "$STEP" ] || pause Enter
      say '' "== $step. $text" ''
      ;;
    say) say "$text" ;;
    ask)
      say '' "? $text"
      pause "think, then Enter"
      ;;
    look) look "${text%% | *}" "${text#* | }" ;;
    run) run "$text" ;;
    expect)
      grep -qF -- "$text" <<< "$output"
      note $? "its command does not print: $text"
      ;;
    change)
      IFS='|' read -r file from to <<< "${text// | /|}"
      change "$file" "$from" "$to"
      ;;
    fails)
      IFS='|' read -r goals program test filter <<< "${text// | /|}"
      fails "$goals" "$program" "$test" "$filter"
      ;;
    *) note 1 "$word is not a word of tour.txt" ;;
  esac
done 3< tests/tour.txt
[ "$step" -eq $((10 - ${learner:-0})) ]
note $? "there are $step steps"
[ -z "$check" ] && [ -t 0 ] && [ "$failed" -eq 0 ] || echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
