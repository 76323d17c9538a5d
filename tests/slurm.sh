#!/usr/bin/env bash
# slurm.sh FOLDER: a real Slurm on two hosts (two_hosts.sh) starts 07 of a build folder (fp64), by the script
# that stands in common/cluster.md. It requeues it, loses a node, and comes to its time limit; the losses must
# stay those of a run on one machine. The last line is "N passed, N failed".
#
# The daemons have a configuration, ports, sockets and processes of their own, so a Slurm of this machine is
# not touched. The nodes claim 64 cores and eight GPUs each. These are device files that nothing opens; Slurm
# shares them out all the same.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
programs=$PWD/$1 needs=(slurmctld:slurmctld slurmd:slurmd sbatch:slurm-client munged:munge)
. tests/two_hosts.sh

# ---- The cluster ------------------------------------------------------------------------------------------------------
export SLURM_CONF=$at/slurm.conf UCX_LOG_LEVEL=error
mkdir -p "$at"/{controller,node-a,node-b,project/build/cuda-bf16}
(
  umask 377
  head -c 128 /dev/urandom > "$at/munge.key"
)
echo "Name=gpu File=/run/gpu[0-7]" > "$at/gres.conf"
cat > "$SLURM_CONF" << END
ClusterName=test
SlurmctldHost=node-a
SlurmUser=root
StateSaveLocation=$at/controller
SlurmctldPidFile=$at/controller/pid
SlurmctldLogFile=$at/controller/log
SlurmdSpoolDir=$at/%n
SlurmdPidFile=$at/%n/pid
SlurmdLogFile=$at/%n/log
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SlurmdParameters=config_overrides
NodeName=node-a,node-b CPUs=64 Gres=gpu:8
PartitionName=all Nodes=ALL Default=YES
# On a busy machine everything may take its time.
MessageTimeout=100
TCPTimeout=60
BatchStartTimeout=$limit
KillWait=$limit
UnkillableStepTimeout=$limit
MinJobAge=100000
END
# shellcheck disable=SC2016
server='mount -t tmpfs tmpfs /run; mkdir -m 755 /run/munge
  for gpu in 0 1 2 3 4 5 6 7; do mknod /run/gpu$gpu c 1 3; done
  munged --force --key-file=$3/munge.key --pid-file=/run/munge/pid --seed-file=/run/munge/seed --log-file=$3/$1/munge-log
  [ $1 != node-a ] || slurmctld -i
  exec slurmd -D'
host node-a 10.21.0.1 "$server"
host node-b 10.21.0.2 "$server"
connect_hosts
slurm() { on node-a timeout --kill-after=10 "$limit" "$@"; }
two_idle() { [ "$(slurm sinfo -h -t idle -o %D 2> /dev/null)" = 2 ]; }
within $limit two_idle || {
  echo "slurm: no two nodes: $(tail -n 5 "$at"/log-of-* "$at"/*/log)"
  exit 1
}

# ---- The tests --------------------------------------------------------------------------------------------------------
# Jobs run in a folder where build/cuda-bf16 has the CPU's 07, with the GPU that Slurm lets a rank see.
cat > "$at/project/build/cuda-bf16/07_combined_5d" << END
#!/bin/sh
echo "\$SLURMD_NODENAME \$CUDA_VISIBLE_DEVICES" >> gpus
export CUDA_CPU_DEVICES=1 CUDA_CPU_UUID="\$CUDA_VISIBLE_DEVICES"
exec $programs/07_combined_5d "\$@"
END
chmod +x "$at/project/build/cuda-bf16/07_combined_5d"
awk '/^```/ { inside = 0 } /^#!\/bin\/bash$/ { inside = 1 } inside' common/cluster.md > "$at/project/job.sh"
cd "$at/project" || exit
mesh=(--tp 2 --dp 2 --pp 2 --micro-batch-size 4 --log-every 1)

# submit ARGUMENTS...: sbatch; sets the job's number, and the file of its output.
submit() {
  job=$(slurm sbatch --parsable "$@") out=$PWD/slurm-$job.out
  touch "$out"
}
# is FIELD VALUE: of the job.
is() { slurm scontrol show job -o "$job" | grep -qE "(^| )$1=$2( |$)"; }
losses() { sed -n 's/^{"step":\([0-9]*\),"loss":\([^,]*\),.*/\1 \2/p' "$@"; }
steps_of() { losses "log-$job-$1.jsonl" 2> /dev/null | cut -d ' ' -f 1; } # of the job's start number $1

logged() { [ "$(losses "$1" 2> /dev/null | wc -l)" -ge "$2" ]; }

# on_one_machine NAME STEPS ARGUMENTS...: losses of a run without Slurm, until it has logged as many.
on_one_machine() {
  out=$PWD/$1
  on node-a timeout "$limit" mpirun -n 8 "$programs/07_combined_5d" "${mesh[@]}" --log-json "$1.json" "${@:3}" > "$out" 2>&1 &
  local run=$!
  within $limit logged "$1.json" "$2" || return
  on node-a pkill 07_
  wait $run || true # it was ended, if it had not already
}
# same LOG OTHER...: the steps of the others, and the losses in LOG.
same() {
  awk 'NR == FNR { loss[$1] = $2; next }
    { d = $2 - loss[$1]; if (!($1 in loss) || d > 1e-10 || d < -1e-10) { print "step " $1 ": " $2 ", not " loss[$1]; bad = 1 } ++n }
    END { exit bad || n < 3 }' <(losses "$1") <(losses "${@:2}")
}

# To the letter: two nodes of eight ranks.
rm -f gpus
submit job.sh --tp 4 --dp 2 --pp 2 --micro-batch-size 4 --steps 3
check "sbatch job.sh: ends well" within $limit is JobState COMPLETED
check "sbatch job.sh: 16 ranks on two nodes" says '^host +node-b: ranks 8 9 10 11 12 13 14 15 on GPUs 0 0 0 0 0 0 0 0$'
check "sbatch job.sh: each rank sees one GPU" cmp <(sort gpus) <(printf '%s\n' node-{a,b}\ {0..7})
check "sbatch job.sh: saves" test "$(cat run/latest)" = step_000003
rm -r run

# Interrupted: each start goes on where the one before has ended, and has saved because it was asked to.
submit --ntasks-per-node=4 job.sh "${mesh[@]}" --steps 100000
begun() { logged "log-$job-$1.jsonl" 3; }
check "job: begins" within $limit begun 0
# goes_on NAME START: Slurm lets a job that was requeued wait two minutes, unless told to start it now.
goes_on() {
  within $limit is JobState PENDING && slurm scontrol update jobid="$job" starttime=now
  check "$1: goes on" within $((2 * limit)) begun "$2"
  local last
  last=$(steps_of $(($2 - 1)) | tail -n 1)
  check "$1: with step $((last + 1)), the next one" test "$(steps_of "$2" | head -n 1)" = $((last + 1))
}
slurm scontrol requeue "$job"
goes_on requeue 1
slurm scontrol update nodename=node-b state=down reason=test
check "node down: the job waits" within $limit is JobState PENDING
# Slurm does not wait for what runs on such a node. If it is back before that has ended, Slurm loses the job's
# next step.
has_ended() { ! on node-b pgrep --runstates R,S,D slurmstepd > /dev/null; }
check "node down: its ranks end" within $limit has_ended
slurm scontrol update nodename=node-b state=resume
goes_on "node down" 2
slurm scontrol update jobid="$job" endtime=now+300 # so Slurm sends its warning when it next looks
check "time limit: the job requeues itself" within $limit is JobState PENDING
slurm scontrol update jobid="$job" timelimit=1-0
goes_on "time limit" 3
slurm scancel "$job"
check "scancel: ends" within $limit is JobState CANCELLED
chain=(log-"$job"-*.jsonl)
last=$(losses "${chain[@]}" | tail -n 1 | cut -d ' ' -f 1)
check "a run on one machine" on_one_machine one "$last" --steps 100000
check "four starts, $last steps: the losses of one machine" same one.json "${chain[@]}"

# Without job.sh.
submit --nodes=2 --ntasks-per-node=4 --wrap "mpirun $programs/07_combined_5d ${mesh[*]} --steps 3 --log-json mpirun.json"
check "mpirun in an allocation: ends well" within $limit is JobState COMPLETED
check "mpirun in an allocation: it finds the nodes" says '^host +node-b: ranks 4 5 6 7 on GPUs 0 0 0 0$'
check "three steps on one machine" on_one_machine short 3 --steps 3
check "mpirun in an allocation: the losses of one machine" same short.json mpirun.json
submit --nodes=2 --ntasks-per-node=1 --wrap "srun --mpi=none $programs/07_combined_5d --steps 3"
check "srun --mpi=none: refused, status 2" within $limit is ExitCode 2:0
check "srun --mpi=none: one line" says '^mpirun: 2 processes were started, and each is alone; expected .* srun --mpi=pmi2 '

echo "$passed passed, $failed failed"
exit $((failed > 0))
