#!/usr/bin/env bash
# kills.sh PROGRAMS N: a run of four ranks saves after each step, and is killed at N random moments: all of
# its ranks, or one. What is then there must be a checkpoint, at least as new as the last one that the run
# reported; and from it the run must get to the same bits as if nobody had killed it.
#
# Then a run is ended N times, by SIGTERM, SIGUSR1 or SIGKILL, and goes on with --resume in another layout
# each time. After the first two signals its status is 75, and its newest checkpoint is of the last step. Its
# losses must be those of a run that nobody has touched. The last line is "N passed, N failed".
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
    run "$whole" "$log" --steps $steps || {
      cat "$log"
      exit 1
    }
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
  if [ "${newest:-0}" -lt "${reported:-0}" ]; then
    echo "$words: step $reported was reported, ${newest:-none} is there"
    failed=$((failed + 1))
  elif ! run "$save" "$log" --steps $steps --resume; then
    echo "$words: refused"
    cat "$log"
    failed=$((failed + 1))
  elif [ "${newest:-0}" -lt $steps ] && [ "$(bytes_of "$save")" != "$(bytes_of "$whole")" ]; then
    echo "$words: other bits after step ${newest:-0}"
    failed=$((failed + 1))
  else
    passed=$((passed + 1))
  fi
done
echo "$during of $kills kills came during a save"

# ---- Ended, and resumed in another layout

steps=40 restarts=0 chains=0
layouts=('8 07_combined_5d --tp 2 --dp 2 --pp 2' '6 07_combined_5d --tp 2 --dp 3' '4 03_zero --zero-stage 3' '1 01_single_gpu'
  '6 07_combined_5d --cp 2 --pp 3' '4 07_combined_5d --pp 2 --cp 2')
signals=(TERM USR1 KILL)
save=$folder/chain log=$folder/log json=$folder/json

# segment OPTION...: the run as `layout` has it, from where it is to its end. It replaces the shell that it is
# started in.
segment() {
  local words command=()
  read -ra words <<< "$layout"
  [ "${words[0]}" = 1 ] || command=(mpirun -n "${words[0]}") # of a program without MPI, mpirun may lose the status
  exec "${command[@]}" "$programs/${words[1]}" "${words[@]:2}" --layers 3 --micro-batch-size 1 --global-batch-size 24 --seq-len 16 \
    --steps $steps --log-every 1000 --log-json "$json" "$@" > "$log" 2>&1
}
losses() { sed -n 's/^{"step":\([0-9]*\),"loss":\([^,]*\),.*/\1 \2/p' "$@"; }
last_step() { losses "$json" | tail -n 1 | cut -d ' ' -f 1; }
fails() {
  failed=$((failed + 1))
  echo "$*"
  tail -n 5 "$log"
}

layout='1 01_single_gpu'
(segment) || {
  cat "$log"
  exit 1
}
losses "$json" > "$folder/untouched"
for ((i = 0; i < kills; ++i)); do
  [ -e "$save" ] || {
    : > "$folder/chain-losses"
    killed=0
  }
  layout=${layouts[RANDOM % ${#layouts[@]}]}
  signal=${signals[RANDOM % 3]}
  rm -f "$json"
  (segment --save "$save" --save-every 3 --resume) &
  job=$! after=$((RANDOM % 6))
  while kill -0 $job 2> /dev/null && [ "$(losses "$json" 2> /dev/null | wc -l)" -lt $after ]; do sleep 0.05; done
  sleep 0.$((RANDOM % 5))
  mapfile -t ranks < <(pgrep -f "^$programs/.* --save $save ")
  statuses=' 75 '
  case $((RANDOM % 2))-$signal in
    0-*) [ ${#ranks[@]} -eq 0 ] || kill "-$signal" "${ranks[RANDOM % ${#ranks[@]}]}" ;;
    1-KILL) kill -KILL "${ranks[@]}" ;;
    *)
      statuses=' 75 0 '
      kill "-$signal" $job
      ;; # mpirun may lose the status when it passes a signal on (test_faults.cc)
  esac 2> /dev/null
  wait $job
  status=$?
  words="SIG$signal $((i + 1)) of $layout" reached=$(last_step 2> /dev/null) newest=$(sed 's/step_0*//' "$save/latest" 2> /dev/null)
  losses "$json" >> "$folder/chain-losses" 2> /dev/null
  restarts=$((restarts + 1))
  [ $signal != KILL ] || killed=$((killed + 1))
  if [ $signal != KILL ] && [ -n "$reached" ] && { [ "$newest" != "$reached" ] || { [ "$reached" -lt $steps ] && [[ $statuses != *" $status "* ]]; }; }; then
    fails "$words: status $status, step ${newest:-none} is saved, $reached was the last one"
  else
    passed=$((passed + 1))
  fi
  [ "${reached:-0}" = $steps ] || [ $((i + 1)) -eq "$kills" ] || continue
  (segment --save "$save" --resume) || fails "$words: does not go on" # also after its end
  losses "$json" >> "$folder/chain-losses"
  # A step is logged when the next one has begun: by then it may be saved, and the run killed.
  if awk -v killed=$killed '
    NR == FNR { loss[$1] = $2; next }
    { d = $2 - loss[$1]; if (d > 1e-10 || d < -1e-10) { print "step " $1 " has " $2 ", not " loss[$1]; bad = 1 }; seen[$1] = 1 }
    END { for (step in loss) if (!(step in seen)) { print "step " step " is not in a log"; ++lost }; exit bad || lost > killed }
  ' "$folder/untouched" "$folder/chain-losses" > "$folder/differences"; then
    passed=$((passed + 1))
  else
    fails "a run that was resumed after $killed SIGKILL: $(cat "$folder/differences")"
  fi
  chains=$((chains + 1))
  rm -rf "$save"
done
echo "$restarts restarts in $chains runs"
echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
