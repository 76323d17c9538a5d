# shellcheck shell=bash
# Two hosts on one machine, for hosts.sh and slurm.sh, which source this. A host is a set of namespaces with
# its own name, address, processes and shared memory. `needs` lists the commands that the hosts need, as
# common/build/setup.sh takes them. Where there can be no namespaces, one line says so, and the status is 2.
#
# The script itself is the first process of a namespace, so whatever ends it ends everything that it has
# started. It writes to its own folder in build only.
name=$(basename "$0" .sh)
at=$PWD/build/$name

if [ "${!#}" != inside ]; then
  if [ "$(id -u)" -ne 0 ] || ! unshare --net --uts --ipc --mount --pid --fork true 2> /dev/null; then
    echo "$name: skipped, because only root can make network namespaces, and some containers forbid it" >&2
    exit 2
  fi
  common/build/setup.sh cpu "${needs[@]}" ip:iproute2 pgrep:procps || exit 2
  exec unshare --net --mount --pid --fork --mount-proc --kill-child=KILL "$0" "$@" inside
fi
trap exit INT TERM
rm -rf "$at"
mkdir -p -m 700 "$at"
printf '127.0.0.1 localhost\n10.21.0.1 node-a\n10.21.0.2 node-b\n' > "$at/hosts"

declare -A first # process of each host, as seen from here
# host NAME ADDRESS SCRIPT OPTION...: starts one; SCRIPT ends in its server. $1 is NAME there, $2 ADDRESS, and
# $3 the folder.
host() {
  # shellcheck disable=SC2016
  unshare --net --uts --ipc --mount --pid "${@:4}" --fork --mount-proc sh -ec '
    hostname $1; mount -t tmpfs tmpfs /dev/shm; mount --bind $3/hosts /etc/hosts
    until ip address add $2/24 dev eth0 2> /dev/null; do sleep 0.1; done
    ip link set lo up; ip link set eth0 up
    '"$3" - "$1" "$2" "$at" > "$at/log-of-$1" 2>&1 &
  until first[$1]=$(pgrep -P $!); do sleep 0.1; done
}
connect_hosts() {
  ip link add eth0 netns "${first["node-a"]}" type veth peer eth0 netns "${first["node-b"]}"
  within 60 are_connected || {
    echo "$name: the link between the hosts does not come up" >&2
    exit 1
  }
}
# Each end says that its link is up, and its addresses are no longer tentative. Before that, UCX finds no
# network there.
are_connected() {
  local host
  for host in node-a node-b; do
    [[ $(on $host ip link show eth0) == *" state UP "* && -z $(on $host ip address show dev eth0 tentative) ]] || return
  done
}
on() { nsenter --all --target "${first[$1]}" --wd="$PWD" "${@:2}"; } # HOST COMMAND...

# within SECONDS COMMAND...: tries it until it succeeds.
within() {
  local end=$((SECONDS + $1))
  until "${@:2}"; do
    [ $SECONDS -lt $end ] || return
    sleep 0.2
  done
}

limit=${TEST_TIMEOUT:-300} # seconds for a run, on a busy machine
passed=0 failed=0 out=

# check TITLE COMMAND...: counts it; a failure shows the end of the last run's output.
check() {
  if "${@:2}"; then
    passed=$((passed + 1))
    echo "passed  $1"
    return
  fi
  failed=$((failed + 1))
  echo "FAILED  $1: ${*:2}"
  tail -n 30 "$out" | sed 's/^/  | /'
}
says() { grep -qE -- "$1" "$out"; }
