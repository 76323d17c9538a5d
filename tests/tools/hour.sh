#!/usr/bin/env bash
# hour.sh FOLDER LAYOUTS PROGRAM RANKS [OPTIONS]: a group's hour on a node of GPUs (tests/homework/course.md).
# LAYOUTS has a line for each run: its name, and its options of 07; a line that begins with "all" has options
# of all runs that follow, and # begins a comment. Each run leaves FOLDER/NAME.jsonl and NAME.trace, for make
# report. One that is refused, fails, or takes longer than HOUR_RUN_SECONDS costs one line. After HOUR_SECONDS
# no further run begins. Started again, it goes on: what has ended well is not run again. With --dry-run among
# OPTIONS it is a rehearsal, and names end with "-modelled".
set -uo pipefail
PATH=$PWD/build/packages/bin:$PATH
folder=$1 layouts=$2 program=$3 ranks=$4 shared=() runs=0 good=0
options=("${@:5}") suffix=''
[[ " ${options[*]} " != *" --dry-run "* ]] || suffix=-modelled
mkdir -p "$folder"
part=$folder/part.jsonl # a log has its name when its run has ended well
trap 'rm -f "$part"' EXIT
while read -r -u 3 name words; do
  case $name in
    '' | '#'*) continue ;;
    all)
      read -ra shared <<< "$words"
      continue
      ;;
    *[!A-Za-z0-9._-]* | [.-]*)
      echo "$layouts: $name is not valid; expected a name of letters, digits, . _ or -" >&2
      exit 2
      ;;
  esac
  runs=$((runs + 1)) run=$folder/$name$suffix
  if [ -e "$run.jsonl" ]; then
    good=$((good + 1))
    echo "$name: has run"
    continue
  fi
  left=$((${HOUR_SECONDS:-2400} - SECONDS)) limit=${HOUR_RUN_SECONDS:-300}
  [ "$left" -gt 0 ] || {
    echo "$name: no time is left"
    continue
  }
  read -ra own <<< "$words"
  if timeout --kill-after=10 $((limit < left ? limit : left)) mpirun -n "$ranks" "$program" "${shared[@]}" "${own[@]}" --steps 5 \
    --log-every 1 --trace "$run.trace" "${options[@]}" --log-json "$part" < /dev/null > "$run.txt" 2>&1; then
    mv "$part" "$run.jsonl"
    good=$((good + 1))
    echo "$name: $(grep -E '^ +5 ' "$run.txt" | tail -n 1)"
  else
    status=$?
    [ $status -ne 124 ] || echo "not finished in time" >> "$run.txt"
    echo "$name: $(tail -n 1 "$run.txt" | cut -c1-160)"
  fi
done 3< "$layouts"
echo "$good of $runs layouts have run"
[ "$good" -gt 0 ]
