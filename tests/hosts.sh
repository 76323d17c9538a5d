#!/usr/bin/env bash
# hosts.sh FOLDER: runs the programs of a build folder over two hosts (two_hosts.sh), and then cuts the
# network or kills ranks. Each host has an ssh server. The last line is "N passed, N failed". The ssh server
# is dropbear, whose package starts nothing.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
programs=$1 needs=(dropbear:dropbear-bin ssh:openssh-client)
. tests/two_hosts.sh

# ---- The hosts --------------------------------------------------------------------------------------------------------
mkdir -p -m 700 "$at/home/.ssh"
awk -F : -v OFS=: -v home="$at/home" '$1 == "root" { $6 = home; $7 = "/bin/sh" } 1' /etc/passwd > "$at/passwd"
dropbearkey -t ed25519 -f "$at/host_key" > /dev/null 2>&1
ssh-keygen -q -t ed25519 -N '' -f "$at/key" && cp "$at/key.pub" "$at/home/.ssh/authorized_keys"
cat > "$at/ssh" << END
#!/bin/sh
exec ssh -F none -i $at/key -o UserKnownHostsFile=$at/known_hosts -o StrictHostKeyChecking=accept-new \\
  -o LogLevel=ERROR -o ServerAliveInterval=5 -o ServerAliveCountMax=2 "\$@"
END
chmod +x "$at/ssh"

# shellcheck disable=SC2016
server='mount --bind $3/passwd /etc/passwd
  exec dropbear -F -E -s -p $2:22 -r $3/host_key -P $3/pid-of-$1'
host node-a 10.21.0.1 "$server"
host node-b 10.21.0.2 "$server" --time --monotonic 1000000 --boottime 1000000 # its clocks are eleven days ahead
connect_hosts
within 60 on node-a "$at/ssh" node-b true 2> /dev/null || {
  echo "hosts: ssh: $(cat "$at"/log-of-*)"
  exit 1
}

# ---- The tests --------------------------------------------------------------------------------------------------------
export UCX_LOG_LEVEL=error CUDA_CPU_DEVICES=4

# run NAME ARGUMENTS...: mpirun on node-a; its output goes to a file. A trap can end `wait`, and no other
# command.
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
quiet() {
  left=$(on "$1" pgrep -la . | grep -v dropbear)
  [ -z "$left" ]
}
# fault TITLE TIMEOUT OPTIONS COMMAND...: starts 02 on two hosts, runs the command in the middle of a step,
# waits for the end. A rank that is cut off ends itself; the next part begins when all have, and the network
# is whole again.
fault() {
  local title=$1
  out=$at/$1
  touch "$out"
  run "$1" $3 "${both[@]}" node-a,node-b -ppn 2 -n 4 "$programs/02_data_parallel" --steps 100000 --log-every 1 --timeout "$2" &
  local job=$!
  check "$title: begins" within $limit says '^ +3 '
  "${@:4}"
  local begin=$SECONDS
  wait $job
  check "$title: ends, and not well, after $((SECONDS - begin)) s" test $? -ne 0 -a $((SECONDS - begin)) -lt $((100 + $2))
  local host
  for host in node-a node-b; do
    check "$title: nothing is left on $host" within $limit quiet $host
    [ -z "$left" ] || echo "$left"
  done
  on node-b ip link set eth0 up
  check "$title: the network is whole" within 60 are_connected
}
names_ranks() {
  for rank in 2 3; do
    check "$1: names rank $rank" says "^rank $rank \(node-b\) holds up the others: it is stopped, or its host is gone$"
  done
  check "$1: accuses no other" test "$(grep -c 'holds up the others' "$out")" -eq 2
}
fault cut 20 -disable-auto-cleanup on node-b ip link set eth0 down
names_ranks cut
fault killed 60 -disable-auto-cleanup on node-b pkill -KILL 02_
names_ranks killed
fault "killed by default" 60 "" on node-b pkill -KILL 02_
check "killed by default: mpirun names the host" says 'RUNNING AT node-b'
check "killed by default: the beginning names its ranks" says '^host +node-b: ranks 2 3 '

echo "$passed passed, $failed failed"
exit $((failed > 0))
