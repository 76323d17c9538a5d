#!/usr/bin/env bash
# gpu_check.sh REPORT: what only a GPU can tell (make gpu-check). First it builds what its parts start. Then it runs the
# tests, measures, and looks for wrong accesses and races in the kernels: nine minutes at most (GPU_CHECK_SECONDS;
# GPU_BUILD_SECONDS for what comes before). What matters most comes first, and the report grows with each part, so that
# whoever cuts it off loses only the rest. Started again, it goes on with what is built. A part that fails, or takes
# longer than it may, is noted and the next one begins; one whose program could not be built, or whose tool is not
# there, is skipped. Left out are tests of the CPU stand-ins, and of time that they model: [standin]; and what is
# hidden, [.].
set -uo pipefail
unset MAKEFLAGS MFLAGS MAKELEVEL  # our makes have jobs of their own: killed, they couldn't return those of a parent
[ -z "${NVCC:-}" ] || PATH=$(dirname "$NVCC"):$PATH

for needed in nvcc nvidia-smi; do
  command -v $needed > /dev/null || { echo "gpu-check needs nvcc and a GPU, and here is no $needed" >&2; exit 2; }
done
report=$1
gpus=$(nvidia-smi -L | grep -c '^GPU')
reserve=0  # seconds that are kept for later parts
passes=0 failures=0 skipped=0 table=
# mpirun's ranks are in process groups of their own, where no signal to mpirun's reaches them. So a part's processes are
# known by a variable in their environment.
end_processes() {
  local processes _
  for _ in 1 2 3; do  # one may have started another meanwhile
    processes=$(grep -lzxF "GPU_CHECK_PART=$$ $1" /proc/[0-9]*/environ 2> /dev/null | cut -d / -f 3)
    [ -z "$processes" ] || kill -KILL $processes 2> /dev/null
  done
}
part_name=
trap 'kill $! 2> /dev/null; end_processes "$part_name"; exit 1' INT TERM

say() { printf '%s\n' "$@" | tee -a "$report"; }

# row NAME SECONDS VERDICT: in the table, and said at once.
row() {
  local row
  row=$(printf '%-44.44s %4d s   %s' "$@")
  table+=$row$'\n'
  say "$row"
}
skip() { row "$1" 0 "skipped: $2"; skipped=$((skipped + 1)); }

# part SECONDS NAME COMMAND...: runs the command; what it prints goes into the report, then a row of the table.
part() {
  local limit=$1 left=$((deadline - reserve - SECONDS)) begin=$SECONDS verdict=passed word
  part_name=$2
  for word in "${@:3}"; do
    case $3:$word in
      make:*) ;;
      *:build/*/*) [ -e "$word" ] || { skip "$part_name" "$word was not built"; return 1; } ;;
    esac
  done
  command -v "$3" > /dev/null || { skip "$part_name" "no $3"; return 1; }
  [ "$limit" -le "$left" ] || limit=$left
  if [ "$limit" -le 0 ]; then
    verdict="not run: no time was left"
  else
    printf '\n==== %s\n     %s\n\n' "$part_name" "${*:3}" >> "$report"
    GPU_CHECK_PART="$$ $part_name" timeout --kill-after=10 "$limit" "${@:3}" >> "$report" 2>&1 < /dev/null &
    wait $! 2> /dev/null  # says "Killed"
    local status=$?
    case $status in
      0) ;;
      124 | 137) verdict="not finished after $limit s" ;;
      *) verdict="failed with status $status" ;;
    esac
    [ $status -eq 0 ] || end_processes "$part_name"
  fi
  row "$part_name" $((SECONDS - begin)) "$verdict"
  if [ "$verdict" = passed ]; then passes=$((passes + 1)); else failures=$((failures + 1)); return 1; fi
}

# want FOLDER PROGRAMS PACKAGE...: these programs are in the next build, unless one of the packages is missing.
wanted=()
want() {
  local programs package without=
  read -ra programs <<< "$2"
  programs=("${programs[@]/#/build/$1/}")
  rm -f "${programs[@]}"  # what is there afterwards is of these sources
  for package in "${@:3}"; do
    case ":$missing:" in *":$package:"*) without+=${without:+, }$package ;; esac
  done
  if [ -n "$without" ]; then skip "build of $1: $2" "no $without"; else wanted+=("${programs[@]}"); fi
}

# build NAME: all that is wanted.
build() {
  [ ${#wanted[@]} -gt 0 ] || return
  part 3600 "$1" make --no-print-directory -k BACKEND=cuda "${wanted[@]}"
  wanted=()
}

# Some of what tests start has four ranks, which want a GPU each.
run_tests() {
  local several=''
  [ "$gpus" -ge 4 ] && [ -e build/cuda-fp32/mpi_tests ] || several='~[faults]~[mpirun]'
  part 60 "tests, $1" build/cuda-"$1"/tests "~[standin]~[program]~[.]$several"
}
# run_mpi_tests SECONDS RANKS FOLDER FILTER; without MPICH's remarks about what an abort leaves behind.
run_mpi_tests() { part "$1" "tests on $2 ranks, $3, $4" env UCX_LOG_LEVEL=error mpirun -n "$2" build/"$3"/mpi_tests "$4"; }

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
  git log -1 --format='commit %h %s' 2> /dev/null || cat .mpich/commit
} > "$report" 2>&1

common/build/setup.sh cuda 2>&1 | tee -a "$report"
missing=$(common/build/packages.sh "$(command -v nvcc)" | sed 's/.*PACKAGES_MISSING=//')
case $missing in *CLI11* | *nlohmann-json* | *Catch2* | *zlib* | *MPI*)
  say "make gpu-bundle, on a machine with a network, packs what Debian has of it" ;;
esac
pytorch=$(timeout 60 python3 -c 'import torch; print(torch.cuda.is_available())' 2>&1 | tail -n 1)
[ "$pytorch" = True ] || say "no PyTorch: $pytorch"

deadline=$((SECONDS + ${GPU_BUILD_SECONDS:-1800}))
base='CLI11 nlohmann-json zlib cuBLAS'
stages=$(echo 0[1-7]_*/)
stages="${stages//\//} experts"
want cuda-bf16 "bench 01_single_gpu" $base
[ "$gpus" -lt 2 ] || want cuda-bf16 "02_data_parallel 03_zero 05_pipeline_parallel collectives" $base MPI NCCL
want cuda-bf16 tests $base Catch2
build "build for bf16, one rank"  # the other builds share its objects in build/cuda
want cuda-fp64 tests $base Catch2
want cuda-fp32 "tests 01_single_gpu" $base Catch2
want cuda-fp16 tests $base Catch2
want cuda-fp8 "tests 01_single_gpu" $base Catch2
build "build for fp64, fp32, fp16 and fp8, one rank"
for precision in fp64 bf16; do
  want cuda-$precision mpi_tests $base Catch2 MPI NCCL
  want cuda-$precision-mpi mpi_tests $base Catch2 MPI
done
want cuda-fp64 "$stages" $base MPI NCCL
[ "$gpus" -lt 4 ] || want cuda-fp32 "$stages collectives mpi_tests" $base Catch2 MPI NCCL
build "build for several ranks"

deadline=$((SECONDS + ${GPU_CHECK_SECONDS:-540}))
run_tests bf16
for what in kernels attention training; do part 60 "speed of $what, bf16" build/cuda-bf16/bench $what; done
part 20 "shared memory cycles of an mma" tests/tools/shared_cycles.py \
  build/cuda-bf16/objects/common/tensor_cores/attention.cu.o
real="--model smollm-1.7b --seq-len 2048 --micro-batch-size 4 --attention tensor-core --recompute selective --steps 3"
part 60 "fp8 training" build/cuda-fp8/01_single_gpu $real --global-batch-size 8
reserve=200
[ "$pytorch" != True ] || measure_pytorch 2048 smollm-1.7b llama-3.2-1b smollm-135m
reserve=0

for precision in fp64 fp32 fp16 fp8; do run_tests $precision; done
check memcheck bf16
check racecheck fp8
check racecheck bf16
check racecheck fp64

# All GPUs at once.
for run in 02_data_parallel '03_zero --zero-stage 3' 05_pipeline_parallel; do
  [ "$gpus" -lt 2 ] || part 40 "$run on $gpus GPUs" mpirun -n "$gpus" build/cuda-bf16/$run $real --global-batch-size $((8 * gpus))
done
[ "$gpus" -lt 2 ] || part 60 "collectives on $gpus GPUs" mpirun -n "$gpus" build/cuda-bf16/collectives
combined=''  # a mesh of one GPU shows nothing, and its groups take NCCL a minute to make
[ "$gpus" -gt 1 ] || combined='~[07]'
for precision in fp64 bf16; do run_mpi_tests 60 "$gpus" cuda-$precision "~[standin]~[.]$combined"; done

# Ranks that share a GPU take turns, which is slow: two of them, a stage after the other.
for stage in 02 03 04 05 06; do
  for precision in fp64 bf16; do run_mpi_tests 40 2 cuda-$precision-mpi "[$stage]~[standin]~[.]"; done
done

# All stages are in the command, so that the part is skipped where one was not built.
part 180 "tests of the programs, fp64" bash -c '"$0" "[program]"' \
  $(printf 'build/cuda-fp64/%s ' tests $stages)
[ "$pytorch" != True ] || measure_pytorch 4096 smollm-1.7b llama-3.2-1b smollm-135m

printf '\n==== All parts\n\n%s' "$table" >> "$report"
say "$passes parts passed, $failures failed, $skipped were skipped; the report is $report"
[ "$failures" -eq 0 ] && [ "$passes" -gt 0 ]
