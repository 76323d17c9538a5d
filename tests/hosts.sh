#!/usr/bin/env bash
# hosts.sh FOLDER: runs the programs of a build folder over two hosts, and then cuts the network or kills ranks. A host is
# a set of namespaces with its own name, address, processes and shared memory, and an ssh server. The last line is
# "N passed, N failed"; where there can be no namespaces, one line says so, and the status is 2.
#
# The script itself is the first process of a namespace, so whatever ends it ends everything that it has started. It
# writes to build/hosts only. The ssh server is dropbear, whose package starts nothing.
set -uo pipefail
cd "$(dirname "$0")/.."
programs=$1 at=$PWD/build/hosts

if [ "${2:-}" != inside ]; then
  if [ "$(id -u)" -ne 0 ] || ! unshare --net --uts --ipc --mount --pid --fork true 2> /dev/null; then
    echo "hosts: skipped, because only root can make network namespaces, and some containers forbid it" >&2; exit 2
  fi
  common/setup.sh cpu dropbear:dropbear-bin ssh:openssh-client ip:iproute2 pgrep:procps || exit 2
  exec unshare --net --mount --pid --fork --mount-proc --kill-child=KILL "$0" "$programs" inside
fi
trap exit INT TERM

# ---- The hosts --------------------------------------------------------------------------------------------------------
rm -rf "$at"; mkdir -p -m 700 "$at/home" "$at/home/.ssh"
printf '127.0.0.1 localhost\n10.21.0.1 node-a\n10.21.0.2 node-b\n' > "$at/hosts"
awk -F : -v OFS=: -v home="$at/home" '$1 == "root" { $6 = home; $7 = "/bin/sh" } 1' /etc/passwd > "$at/passwd"
dropbearkey -t ed25519 -f "$at/host_key" > /dev/null 2>&1
ssh-keygen -q -t ed25519 -N '' -f "$at/key" && cp "$at/key.pub" "$at/home/.ssh/authorized_keys"
cat > "$at/ssh" << END
#!/bin/sh
exec ssh -F none -i $at/key -o UserKnownHostsFile=$at/known_hosts -o StrictHostKeyChecking=accept-new \\
  -o LogLevel=ERROR -o ServerAliveInterval=5 -o ServerAliveCountMax=2 "\$@"
END
chmod +x "$at/ssh"

declare -A first  # process of each host, as seen from here
host() {  # NAME ADDRESS OPTION...
  # shellcheck disable=SC2016
  unshare --net --uts --ipc --mount --pid "${@:3}" --fork --mount-proc sh -ec '
    hostname $1; mount -t tmpfs tmpfs /dev/shm
    mount --bind $3/hosts /etc/hosts; mount --bind $3/passwd /etc/passwd
    until ip address add $2/24 dev eth0 2> /dev/null; do sleep 0.1; done
    ip link set lo up; ip link set eth0 up
    exec dropbear -F -E -s -p $2:22 -r $3/host_key -P $3/pid-of-$1' - "$1" "$2" "$at" > "$at/log-of-$1" 2>&1 &
  until first[$1]=$(pgrep -P $!); do sleep 0.1; done
}
host node-a 10.21.0.1
host node-b 10.21.0.2 --time --monotonic 1000000 --boottime 1000000  # its clocks are eleven days ahead
ip link add eth0 netns "${first[node-a]}" type veth peer eth0 netns "${first[node-b]}"

on() { nsenter --all --target "${first[$1]}" --wd="$PWD" "${@:2}"; }  # HOST COMMAND...

# within SECONDS COMMAND...: tries it until it succeeds.
within() {
  local end=$((SECONDS + $1))
  until "${@:2}"; do [ $SECONDS -lt $end ] || return; sleep 0.2; done
}
within 60 on node-a "$at/ssh" node-b true 2> /dev/null || { echo "hosts: ssh: $(cat "$at"/log-of-*)"; exit 1; }

# ---- The tests --------------------------------------------------------------------------------------------------------
export UCX_LOG_LEVEL=error CUDA_CPU_DEVICES=4
limit=300  # seconds for a run, on a busy machine
passed=0 failed=0 out=

# check TITLE COMMAND...: counts it; a failure shows the end of the last run's output.
check() {
  if "${@:2}"; then passed=$((passed + 1)); echo "passed  $1"; return; fi
  failed=$((failed + 1)); echo "FAILED  $1: ${*:2}"
  tail -n 30 "$out" | sed 's/^/  | /'
}
says() { grep -qE -- "$1" "$out"; }

# run NAME ARGUMENTS...: mpirun on node-a; its output goes to a file. A trap can end `wait`, and no other command.
run() {
  out=$at/$1
  on node-a timeout --kill-after=10 "$limit" mpirun "${@:2}" > "$out" 2>&1 < /dev/null &
  wait $!
}
both=(-launcher ssh -launcher-exec "$at/ssh" -hosts)
numbers() { grep -oE '"(loss|grad_norm)":[^,}]*' "$1"; }

# parity NAME RANKS HOSTS PROGRAM...: losses and gradient norms are those of one host.
parity() {
  check "$1: runs on one host" run "$1-one" -n "$2" "$programs/${@:4}" --steps 3 --log-json "$at/$1-one.json"
  check "$1: runs on two" run "$1-two" "${both[@]}" $3 -n "$2" "$programs/${@:4}" --steps 3 --log-json "$at/$1-two.json"
  check "$1: same losses" cmp <(numbers "$at/$1-one.json") <(numbers "$at/$1-two.json")
  check "$1: three steps" test "$(numbers "$at/$1-two.json" | grep -c loss)" -ge 3
}
parity 02 4 "node-a,node-b -ppn 2" 02_data_parallel
check "02: GPUs on node-a" says '^host +node-a: ranks 0 1 on GPUs 0 1$'
check "02: GPUs on node-b" says '^host +node-b: ranks 2 3 on GPUs 0 1$'
parity 07 8 "node-a:2,node-b:4,node-a:2" 07_combined_5d --tp 2 --dp 2 --pp 2 --micro-batch-size 4
check "07: GPUs on node-a" says '^host +node-a: ranks 0 1 6 7 on GPUs 0 1 2 3$'
check "07: GPUs on node-b" says '^host +node-b: ranks 2 3 4 5 on GPUs 0 1 2 3$'

run dry-run "${both[@]}" node-a,node-b -n 2 "$programs/02_data_parallel" --dry-run
check "dry run: refused, status 2" test $? -eq 2
check "dry run: one line" says '^--dry-run: on several hosts is not valid; expected all ranks on one$'

# An ssh server keeps the connection to a host that is cut off.
quiet() { ! on "$1" pgrep -l . | grep -v dropbear > /dev/null; }
# fault TITLE TIMEOUT OPTIONS COMMAND...: starts 02 on two hosts, runs the command in the middle of a step, waits for the
# end.
fault() {
  local title=$1
  out=$at/$1; touch "$out"
  run "$1" $3 "${both[@]}" node-a,node-b -ppn 2 -n 4 "$programs/02_data_parallel" --steps 100000 --log-every 1 --timeout "$2" &
  local job=$!
  check "$title: begins" within $limit says '^ +3 '
  "${@:4}"
  local begin=$SECONDS
  wait $job
  check "$title: ends, and not well, after $((SECONDS - begin)) s" test $? -ne 0 -a $((SECONDS - begin)) -lt $((100 + $2))
  check "$title: nothing is left on node-a" within 60 quiet node-a
  check "$title: nothing is left on node-b" within 60 quiet node-b
}
names_ranks() {
  for rank in 2 3; do
    check "$1: names rank $rank" says "^rank $rank \(node-b\) holds up the others: it is stopped, or its host is gone$"
  done
  check "$1: accuses no other" test "$(grep -c 'holds up the others' "$out")" -eq 2
}
fault cut 20 -disable-auto-cleanup on node-b ip link set eth0 down
names_ranks cut
on node-b ip link set eth0 up
fault killed 60 -disable-auto-cleanup on node-b pkill -KILL 02_
names_ranks killed
fault "killed by default" 60 "" on node-b pkill -KILL 02_
check "killed by default: mpirun names the host" says 'RUNNING AT node-b'
check "killed by default: the beginning names its ranks" says '^host +node-b: ranks 2 3 '

echo "$passed passed, $failed failed"
exit $((failed > 0))
