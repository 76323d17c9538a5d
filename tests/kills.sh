#!/usr/bin/env bash
# kills.sh PROGRAMS N: a run of four ranks saves after each step, and is killed at N random moments: all of its ranks,
# or one. What is then there must be a checkpoint, at least as new as the last one that the run reported; and from it
# the run must get to the same bits as if nobody had killed it. The last line is "N passed, N failed".
set -uo pipefail

programs=$1 kills=$2
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export UCX_LOG_LEVEL=error OMP_NUM_THREADS=1
steps=12
layouts=('03_zero --zero-stage 3' '07_combined_5d --tp 2 --pp 2' '02_data_parallel' '07_combined_5d --cp 2 --experts 4 --ep 2')

# run SAVE OUTPUT OPTION...
run() {
  local program="$layout"
  # shellcheck disable=SC2086
  mpirun -n 4 "$programs"/${program%% *} ${program#"${program%% *}"} --layers 2 --micro-batch-size 1 --global-batch-size 8 \
    --seq-len 16 --save "$1" --save-every 1 --log-every 1000 "${@:3}" > "$2" 2>&1
}
bytes_of() { cat "$1/step_0000$steps"/{model,optimizer}.safetensors | cksum; }

passed=0 failed=0 during=0
for ((i = 0; i < kills; ++i)); do
  layout=${layouts[i % ${#layouts[@]}]}
  whole=$folder/whole-$((i % ${#layouts[@]})) save=$folder/save log=$folder/log
  if [ ! -e "$whole/latest" ]; then
    begin=$(date +%s%N)
    run "$whole" "$log" --steps $steps || { cat "$log"; exit 1; }
    took[i % ${#layouts[@]}]=$((($(date +%s%N) - begin) / 1000000))
  fi
  rm -rf "$save"
  run "$save" "$log" --steps $steps &
  sleep "$(awk -v most="${took[i % ${#layouts[@]}]}" -v seed="$i$RANDOM" 'BEGIN { srand(seed); print rand() * most / 1000 }')"
  mapfile -t ranks < <(pgrep -f "^$programs/.* --save $save ")
  if [ $((i % 2)) -eq 0 ]; then kill -9 "${ranks[@]}"; else kill -9 "${ranks[@]:0:1}"; fi 2> /dev/null
  wait
  words="kill $((i + 1)) of $layout"
  reported=$(grep ' is saved' "$log" | tail -n 1 | sed 's/.*step_0*\([0-9]*\) is saved/\1/')
  newest=$(sed 's/step_0*//' "$save/latest" 2> /dev/null)
  ls "$save"/*.part > /dev/null 2>&1 && during=$((during + 1))
  load=()
  [ -z "$newest" ] || load=(--load "$save")
  if [ "${newest:-0}" -lt "${reported:-0}" ]; then
    echo "$words: step $reported was reported, ${newest:-none} is there"; failed=$((failed + 1))
  elif ! run "$save" "$log" --steps $steps "${load[@]}"; then
    echo "$words: refused"; cat "$log"; failed=$((failed + 1))
  elif [ "${newest:-0}" -lt $steps ] && [ "$(bytes_of "$save")" != "$(bytes_of "$whole")" ]; then
    echo "$words: other bits after step ${newest:-0}"; failed=$((failed + 1))
  else
    passed=$((passed + 1))
  fi
done
echo "$during of $kills kills came during a save"
echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
