#!/usr/bin/env bash
# gpu_check.sh REPORT: what only a GPU can tell (make gpu-check). Builds for it in every precision, runs the tests, looks
# for wrong accesses and races in the kernels, measures, and writes one report. Every part has a time limit, and all of
# them together ten minutes; what fails or takes too long is noted, and the next part begins. Left out are tests of
# the CPU stand-ins, and of time that they model: [standin], [overlap].
set -uo pipefail

report=$1
make=${MAKE:-make}
gpus=$(nvidia-smi -L | wc -l)
deadline=$((SECONDS + ${GPU_CHECK_SECONDS:-600}))
table=$(mktemp) details=$(mktemp) output=$(mktemp)
trap 'rm -f "$table" "$details" "$output"' EXIT
failures=0

# part SECONDS NAME COMMAND...: runs the command, and adds a row to the table and its output to the details.
part() {
  local limit=$1 name=$2 left=$((deadline - SECONDS)) begin=$SECONDS verdict=passed
  [ "$limit" -le "$left" ] || limit=$left
  if [ "$limit" -le 0 ]; then
    verdict="not run: no time was left"
  else
    timeout --kill-after=10 "$limit" "${@:3}" > "$output" 2>&1
    local status=$?
    case $status in
      0) ;;
      124 | 137) verdict="not finished after $limit s" ;;
      *) verdict="failed with status $status" ;;
    esac
    printf '\n==== %s\n     %s\n\n' "$name" "${*:3}" >> "$details"
    cat "$output" >> "$details"
  fi
  [ "$verdict" = passed ] || failures=$((failures + 1))
  printf '%-44s %4d s   %s\n' "$name" $((SECONDS - begin)) "$verdict" | tee -a "$table"
}

# Without MPICH's remarks about what an abort leaves behind.
ranks() { echo env UCX_LOG_LEVEL=error mpirun -n "$1"; }

for precision in bf16 fp32 fp64; do
  part 180 "build, $precision" "$make" BACKEND=cuda PRECISION=$precision all
done
part 120 "build, fp64, NCCL over MPI" "$make" BACKEND=cuda NCCL=mpi PRECISION=fp64 build/cuda-fp64-mpi/mpi_tests
part 120 "build, bf16, NCCL over MPI" "$make" BACKEND=cuda NCCL=mpi PRECISION=bf16 build/cuda-bf16-mpi/mpi_tests

# Programs that the tests start on several ranks want a GPU for each.
[ "$gpus" -ge 4 ] && several= || several='~[faults]~[primer]'
for precision in fp64 fp32 bf16; do
  part 60 "tests, $precision" build/cuda-$precision/tests "~[standin]$several"
done
part 60 "memcheck of the kernels, bf16" compute-sanitizer --tool memcheck --error-exitcode 1 build/cuda-bf16/tests '[kernels]'
part 60 "racecheck of the kernels, bf16" compute-sanitizer --tool racecheck --error-exitcode 1 build/cuda-bf16/tests '[kernels]'
part 60 "racecheck of the kernels, fp64" compute-sanitizer --tool racecheck --error-exitcode 1 build/cuda-fp64/tests '[kernels]'

part 150 "speed, bf16" build/cuda-bf16/bench
if python3 -c 'import torch' 2> /dev/null; then
  for model in smollm-135m smollm-1.7b llama-3.2-1b; do
    for sequence in 2048 4096; do  # in micro-batches as large as ours
      part 60 "PyTorch, $model, $sequence" python3 tests/pytorch_speed.py --model $model --seq-len $sequence \
        --micro-batch-size $((16384 / sequence)) --steps 5 --device cuda --dtype bf16 --compile
    done
  done
fi

for precision in fp64 fp32 bf16; do
  part 90 "tests on $gpus ranks, NCCL, $precision" $(ranks "$gpus") build/cuda-$precision/mpi_tests '~[standin]~[overlap]'
done
for precision in fp64 bf16; do
  part 120 "tests on 8 ranks, NCCL over MPI, $precision" $(ranks 8) build/cuda-$precision-mpi/mpi_tests '~[standin]~[overlap]'
done

mkdir -p "$(dirname "$report")"
{
  date
  nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm --format=csv
  "${NVCC:-nvcc}" --version | tail -n 2
  git log -1 --format='commit %h %s' 2> /dev/null
  echo
  cat "$table" "$details"
} > "$report"
echo "$failures parts failed; the report is $report"
[ "$failures" -eq 0 ]
