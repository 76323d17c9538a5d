#!/usr/bin/env bash
# gpu_check.sh REPORT: what only a GPU can tell (make gpu-check). It builds for one, runs the tests, measures, and looks
# for wrong accesses and races in the kernels. What matters most comes first, and the report grows with each part, so
# that whoever cuts it off loses only the rest. A part that fails, or takes longer than it may, is noted and the next
# one begins; together they take nine minutes at most (GPU_CHECK_SECONDS). Left out are tests of the CPU stand-ins, and
# of time that they model: [standin], [overlap]; and what is hidden, [.].
set -uo pipefail
unset MAKEFLAGS MFLAGS MAKELEVEL  # our makes have jobs of their own: killed, they couldn't return those of a parent
[ -z "${NVCC:-}" ] || PATH=$(dirname "$NVCC"):$PATH

report=$1
gpus=$(nvidia-smi -L | grep -c '^GPU')
deadline=$((SECONDS + ${GPU_CHECK_SECONDS:-540}))
reserve=0  # seconds that are kept for later parts
failures=0 table=
export CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d) CUDA_MPS_LOG_DIRECTORY=$CUDA_MPS_PIPE_DIRECTORY
# Without pipes in this folder CUDA looks for no MPS.
quit_mps() {
  [ ! -e "$CUDA_MPS_PIPE_DIRECTORY"/control ] || echo quit | timeout 20 nvidia-cuda-mps-control
  rm -rf "$CUDA_MPS_PIPE_DIRECTORY"
}
trap quit_mps EXIT
trap 'kill $! 2> /dev/null; exit 1' INT TERM

say() { printf '%s\n' "$@" | tee -a "$report"; }

# part SECONDS NAME COMMAND...: runs the command; what it prints goes into the report, then a row of the table.
part() {
  local limit=$1 name=$2 left=$((deadline - reserve - SECONDS)) begin=$SECONDS verdict=passed row
  [ "$limit" -le "$left" ] || limit=$left
  if [ "$limit" -le 0 ]; then
    verdict="not run: no time was left"
  else
    printf '\n==== %s\n     %s\n\n' "$name" "${*:3}" >> "$report"
    timeout --kill-after=10 "$limit" "${@:3}" >> "$report" 2>&1 < /dev/null &
    wait $!
    local status=$?
    case $status in
      0) ;;
      124 | 137) verdict="not finished after $limit s" ;;
      *) verdict="failed with status $status" ;;
    esac
  fi
  row=$(printf '%-44s %4d s   %s' "$name" $((SECONDS - begin)) "$verdict")
  table+=$row$'\n'
  say "$row"
  [ "$verdict" = passed ] || { failures=$((failures + 1)); return 1; }
}

# What needs no MPI.
build_core() { part "$1" "build, $2" make -k BACKEND=cuda PRECISION="$2" build/cuda-"$2"/{tests,bench,01_single_gpu}; }
build_all() { part "$1" "build, $2, all" make -k BACKEND=cuda PRECISION="$2" all; }
build_over_mpi() {
  part "$1" "build, $2, NCCL over MPI" make BACKEND=cuda NCCL=mpi PRECISION="$2" build/cuda-"$2"-mpi/mpi_tests
}

# Some of what tests start has four ranks, which want a GPU each.
[ "$gpus" -ge 4 ] && several='' || several='~[faults]~[primer]'
run_tests() { part 60 "tests, $1" build/cuda-"$1"/tests "~[standin]~[program]~[.]$several"; }
# run_mpi_tests SECONDS RANKS FOLDER FILTER; without MPICH's remarks about what an abort leaves behind.
run_mpi_tests() { part "$1" "tests on $2 ranks, $3" env UCX_LOG_LEVEL=error mpirun -n "$2" build/"$3"/mpi_tests "$4"; }

# check TOOL PRECISION: the kernels of this project, not those of cuBLAS.
check() {
  part 60 "$1 of the kernels, $2" compute-sanitizer --tool "$1" --kernel-name kns=pentatron --error-exitcode 1 \
    build/cuda-"$2"/tests '[kernels]'
}

# measure_pytorch SEQUENCE MODEL...: in micro-batches as large as ours.
measure_pytorch() {
  local model
  for model in "${@:2}"; do
    part 120 "PyTorch, $model, $1" python3 tests/pytorch_speed.py --model "$model" --seq-len "$1" \
      --micro-batch-size $((16384 / $1)) --steps 5 --device cuda --dtype bf16 --compile
  done
}

mkdir -p "$(dirname "$report")"
{
  date
  nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm --format=csv
  nvcc --version | tail -n 2
  git log -1 --format='commit %h %s' 2> /dev/null
} > "$report" 2>&1

part 60 "packages" common/setup.sh
build_core 150 bf16
run_tests bf16
for what in kernels attention training; do part 60 "speed of $what, bf16" build/cuda-bf16/bench $what; done
pytorch=$(timeout 60 python3 -c 'import torch; print(torch.cuda.is_available())' 2>&1 | tail -n 1)
reserve=200
[ "$pytorch" = True ] || say "no PyTorch: $pytorch"
[ "$pytorch" != True ] || measure_pytorch 2048 smollm-1.7b llama-3.2-1b smollm-135m
reserve=0

for precision in fp64 fp32; do
  build_core 90 $precision
  build_all 60 $precision
  run_tests $precision
done
check memcheck bf16
check racecheck bf16
check racecheck fp64

build_all 60 bf16
for precision in fp64 bf16; do run_mpi_tests 60 "$gpus" cuda-$precision '~[standin]~[.]'; done

# Ranks that share a GPU take turns, so that one that waits keeps it from the others, unless the multi-process service
# (MPS) lets their kernels run side by side. Without it there are two, for a few tests.
for precision in fp64 bf16; do build_over_mpi 60 $precision; done
if command -v nvidia-cuda-mps-control > /dev/null && part 30 "MPS starts, and 01 runs with it" \
  bash -c 'nvidia-cuda-mps-control -d && build/cuda-bf16/01_single_gpu --steps 1'; then
  say "8 ranks share $gpus GPU(s) through MPS"
  ranks=8 filter='~[standin]~[.]'
else
  say "no MPS: 2 ranks share $gpus GPU(s), [02] and [03] only"
  quit_mps
  ranks=2 filter='[02]~[standin]~[.],[03]~[standin]~[.]'
fi
for precision in fp64 bf16; do run_mpi_tests 90 $ranks cuda-$precision-mpi "$filter"; done
quit_mps

part 120 "tests of the programs, fp64" build/cuda-fp64/tests '[program]'
[ "$pytorch" != True ] || measure_pytorch 4096 smollm-1.7b llama-3.2-1b smollm-135m

printf '\n==== All parts\n\n%s' "$table" >> "$report"
say "$failures parts failed; the report is $report"
[ "$failures" -eq 0 ]
