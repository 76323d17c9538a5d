#!/usr/bin/env bash
# gpu_check.sh REPORT: what only a GPU can tell (make gpu-check). First it builds what its parts start, unless
# gpu_bundle.sh has packed that. Then it tests, measures, and looks for wrong accesses and races in the
# kernels: 540 seconds at most (GPU_CHECK_SECONDS; GPU_BUILD_SECONDS for what comes before). Right comes before
# fast: what no CPU shows, first. The report grows with each part, so that whoever cuts it off loses only the
# rest; in the end it says first what failed. Started again with the same sources on the same GPU, it adds to
# the report what has not passed yet. A part that fails, or takes longer than it may, is noted and the next
# one begins; one whose program could not be built, or whose tool is not there, is skipped. Left out are tests
# of the CPU stand-ins, and of time that they model: [standin]; and what is hidden, [.].
#
# gpu_check.sh --programs: builds them only, on a machine that may have no GPU, and prints their paths.
set -uo pipefail
unset MAKEFLAGS MFLAGS MAKELEVEL # our makes have jobs of their own: killed, they couldn't return those of a parent
[ -z "${NVCC:-}" ] || PATH=$(dirname "$NVCC"):$PATH

packed=.mpich/packed # names the folder in which the programs were built
needs='nvcc nvidia-smi'
[ ! -e $packed ] || needs=nvidia-smi
[ "$1" != --programs ] || needs=nvcc
for needed in $needs; do
  command -v $needed > /dev/null || {
    echo "gpu-check needs nvcc and a GPU, and here is no $needed" >&2
    exit 2
  }
done
report=$1
[ "$1" != --programs ] || report=build/gpu-programs.txt
gpus=$(nvidia-smi -L 2> /dev/null | grep -c '^GPU')
passed=/dev/null # a file with the parts that have passed; a build is made again
passes=0 failures=0 skipped=0 table=
# mpirun's ranks are in process groups of their own, where no signal to mpirun's reaches them. So a part's
# processes are known by a variable in their environment.
end_processes() {
  local processes _
  for _ in 1 2 3; do # one may have started another meanwhile
    processes=$(grep -lzxF "GPU_CHECK_PART=$$ $1" /proc/[0-9]*/environ 2> /dev/null | cut -d / -f 3)
    [ -z "$processes" ] || kill -KILL $processes 2> /dev/null
  done
}
part_name=
sampler=
trap '[ -z "$sampler" ] || kill $sampler 2> /dev/null' EXIT
trap 'kill $! 2> /dev/null; end_processes "$part_name"; finish; exit 1' INT TERM

# Puts what failed, and all parts, in front of the report.
finish() {
  {
    echo "==== What failed"
    printf '%s' "$table" | grep -E ' s   (failed|not finished)' || echo "nothing"
    printf '\n==== All parts\n\n%s\n' "$table"
    cat "$report"
  } > "$report.new" && mv "$report.new" "$report"
}

say() { printf '%s\n' "$@" | tee -a "$report"; }

# row NAME SECONDS VERDICT: in the table, and said at once.
row() {
  local row
  row=$(printf '%-68.68s %4d s   %s' "$@")
  table+=$row$'\n'
  say "$row"
}
skip() {
  row "$1" 0 "skipped: $2"
  skipped=$((skipped + 1))
}

# part SECONDS NAME COMMAND...: runs the command; what it prints goes into the report, then a row of the
# table, with the means of the clock and the power of all GPUs.
part() {
  local limit=$1 left=$((deadline - SECONDS)) begin=$SECONDS verdict=passed word samples power=
  part_name=$2
  if grep -qxF -e "$part_name" "$passed"; then
    row "$part_name" 0 "passed before"
    passes=$((passes + 1))
    return
  fi
  for word in "${@:3}"; do
    case $3:$word in
      make:*) ;;
      *:build/cuda-*/*) [ -e "$word" ] || {
        skip "$part_name" "$word was not built"
        return 1
      } ;;
    esac
  done
  command -v "$3" > /dev/null || {
    skip "$part_name" "no $3"
    return 1
  }
  [ "$limit" -le "$left" ] || limit=$left
  if [ "$limit" -le 0 ]; then
    verdict="not run: no time was left"
  else
    printf '\n==== %s\n     %s\n\n' "$part_name" "${*:3}" >> "$report"
    samples=$(wc -l < "$clocks")
    GPU_CHECK_PART="$$ $part_name" timeout --kill-after=10 "$limit" "${@:3}" >> "$report" 2>&1 < /dev/null &
    wait $! 2> /dev/null # says "Killed"
    local status=$?
    case $status in
      0) ;;
      124 | 137) verdict="not finished after $limit s" ;;
      *) verdict="failed with status $status" ;;
    esac
    [ $status -eq 0 ] || end_processes "$part_name"
    power=$(tail -n +$((samples + 1)) "$clocks" | awk -F, 'NF == 2 { mhz += $1; watts += $2; ++n }
      END { if (n) printf ", %d MHz, %d W", mhz / n, watts / n }')
  fi
  row "$part_name" $((SECONDS - begin)) "$verdict$power"
  if [ "$verdict" = passed ]; then
    passes=$((passes + 1))
    echo "$part_name" >> "$passed"
  else
    failures=$((failures + 1))
    return 1
  fi
}

# want FOLDER PROGRAMS PACKAGE...: these programs are in the next build, unless one of the packages is
# missing.
wanted=() programs_built=()
want() {
  local programs package without=
  [ ! -e $packed ] || return
  read -ra programs <<< "$2"
  programs=("${programs[@]/#/build/$1/}")
  rm -f "${programs[@]}" # what is there afterwards is of these sources
  for package in "${@:3}"; do
    case ":$missing:" in *":$package:"*) without+=${without:+, }$package ;; esac
  done
  if [ -n "$without" ]; then skip "build of $1: $2" "no $without"; else wanted+=("${programs[@]}"); fi
}

# build NAME: all that is wanted.
build() {
  [ ${#wanted[@]} -gt 0 ] || return
  part 3600 "$1" make --no-print-directory -k BACKEND=cuda ${GPU_ARCH:+GPU_ARCH=$GPU_ARCH} "${wanted[@]}"
  programs_built+=("${wanted[@]}") wanted=()
}

# Some of what tests start has four ranks, which want a GPU each.
run_tests() {
  local several=''
  [ "$gpus" -ge 4 ] && [ -e build/cuda-fp32/mpi_tests ] || several='~[faults]~[mpirun]'
  part "${2:-60}" "tests, $1" build/cuda-"$1"/tests "~[standin]~[program]~[gpu]~[.]$several"
}
# run_mpi_tests SECONDS RANKS FOLDER FILTER; without MPICH's remarks about what an abort leaves behind.
run_mpi_tests() { part "$1" "tests on $2 ranks, $3, $4" env UCX_LOG_LEVEL=error mpirun -n "$2" build/"$3"/mpi_tests "$4"; }

# on_one_card SECONDS RANKS COMMAND...: NCCL itself, of ranks that share a card. NCCL refuses two ranks of a
# host on one GPU, and takes these for hosts.
on_one_card() {
  local what=${*:3}
  part "$1" "NCCL, $2 ranks: ${what/build\/cuda-fp64\//}" mpirun -n "$2" bash -c 'export NCCL_HOSTID=r$PMI_RANK NCCL_SOCKET_IFNAME=lo \
    NCCL_NET=Socket NCCL_MAX_CTAS=2 UCX_LOG_LEVEL=error; exec "$0" "$@"' "${@:3}"
}

# check TOOL PRECISION: the kernels of this project, not those of cuBLAS.
check() {
  part "${4:-60}" "$1 of $3, $2" compute-sanitizer --tool "$1" --kernel-name kns=pentatron --error-exitcode 1 \
    build/cuda-"$2"/tests "$3"
}

# measure_pytorch SECONDS SEQUENCE: all models in one process, in micro-batches as large as ours, one and
# eight a step.
measure_pytorch() {
  part "$1" "PyTorch, $2 tokens" python3 tests/pytorch_speed.py --model $models --seq-len "$2" \
    --micro-batch-size $((16384 / $2)) --micro-batches 1 8 --steps 3 --device cuda --dtype bf16 --compile
}

mkdir -p "$(dirname "$report")"
# What the parts that have passed depend on.
sources="$(git log -1 --format='commit %h' 2> /dev/null || cat .mpich/commit) $({ git diff HEAD && git status --porcelain; } 2> /dev/null | cksum) \
  $(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2> /dev/null | sort -u)"
[ "$sources" = "$(cat "$report.sources" 2> /dev/null)" ] || {
  rm -f "$report" "$report.passed"
  echo "$sources" > "$report.sources"
}
clocks=$report.clocks
: > "$clocks"
{
  date
  nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm --format=csv
  [ -e $packed ] || nvcc --version | tail -n 2
  git log -1 --format='commit %h %s' 2> /dev/null || cat .mpich/commit
} >> "$report" 2>&1

[ -e $packed ] || common/build/setup.sh cuda 2>&1 | tee -a "$report"
packages=$(common/build/packages.sh "$(command -v nvcc)")
missing=${packages##*PACKAGES_MISSING=}
if [ -e $packed ]; then # the programs look for libraries and files where they were built
  libraries=${packages##*PACKAGE_LIBRARIES=}
  export LD_LIBRARY_PATH=${libraries%% *}:${LD_LIBRARY_PATH:-} PATH=$PWD/build/packages/bin:$PATH
  [ -e "$(cat $packed)" ] || { mkdir -p "$(dirname "$(cat $packed)")" && ln -s "$PWD" "$(cat $packed)"; }
fi
case $missing in *CLI11* | *nlohmann-json* | *Catch2* | *zlib* | *MPI*)
  say "make gpu-bundle, on a machine with a network, packs what Debian has of it"
  ;;
esac
pytorch=''
[ "$1" = --programs ] || pytorch=$(timeout 60 python3 -c 'import torch; print(torch.cuda.is_available())' 2>&1 | tail -n 1)
[ "$pytorch" = True ] || [ "$1" = --programs ] || say "no PyTorch: $pytorch"

deadline=$((SECONDS + ${GPU_BUILD_SECONDS:-1800}))
base='CLI11 nlohmann-json zlib cuBLAS'
stages=$(echo 0[1-7]_*/)
stages="${stages//\//} experts"
want cuda-bf16 "bench 01_single_gpu" $base
want cuda-bf16 experts $base MPI NCCL
[ "$gpus" -lt 2 ] || want cuda-bf16 "02_data_parallel 03_zero 05_pipeline_parallel collectives" $base MPI NCCL
want cuda-bf16 tests $base Catch2
build "build for bf16, one rank" # the other builds share its objects in build/cuda
want cuda-fp64 tests $base Catch2
want cuda-fp32 "tests 01_single_gpu" $base Catch2
want cuda-fp16 tests $base Catch2
want cuda-fp8 "tests 01_single_gpu" $base Catch2
want cuda-fp8 experts $base MPI NCCL
build "build for fp64, fp32, fp16 and fp8, one rank"
want cuda-fp64 mpi_tests $base Catch2 MPI NCCL
want cuda-fp64-mpi mpi_tests $base Catch2 MPI
[ "$gpus" -lt 2 ] || want cuda-bf16 mpi_tests $base Catch2 MPI NCCL
want cuda-fp64 "$stages collectives" $base MPI NCCL
[ "$gpus" -lt 4 ] || want cuda-fp32 "$stages collectives mpi_tests" $base Catch2 MPI NCCL
build "build for several ranks"

# What the kernels take on modelled GPUs of such names, to stand beside what they take here.
models='smollm-135m smollm-1.7b llama-3.2-1b'
kernels="--profile --steps 3 --attention tensor-core --seq-len 2048 --micro-batch-size 8 --global-batch-size 8"
if [ ! -e $packed ] && part 1800 "build for modelled GPUs" make --no-print-directory BACKEND=cpu build/cpu-bf16/01_single_gpu; then
  mkdir -p build/modelled
  for gpu in a100 h100 h200 b200; do
    for model in $models; do
      build/cpu-bf16/01_single_gpu --dry-run --gpu $gpu $kernels --model $model > build/modelled/$gpu-$model.txt
    done
  done
fi

if [ "$1" = --programs ]; then
  for program in "${programs_built[@]}"; do [ ! -e "$program" ] || echo "$program"; done
  exit $((failures > 0))
fi

deadline=$((SECONDS + ${GPU_CHECK_SECONDS:-540})) passed=$report.passed
touch "$passed"
nvidia-smi --query-gpu=clocks.sm,power.draw --format=csv,noheader,nounits --loop=1 > "$clocks" 2> /dev/null &
sampler=$!
gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader | grep -oE -m 1 '[ABH][0-9]+00' | tr ABH abh)
real="--model smollm-1.7b --seq-len 2048 --micro-batch-size 4 --attention tensor-core --recompute selective --steps 3"

# Right: blocks that wait for a place and for their turn; 01; a step of each stage, which all have one loss.
part 90 "attention with more blocks than run at once" build/cuda-bf16/tests '[gpu]'
part 40 "tests of 01, fp64" build/cuda-fp64/tests '[01]~[kernels]~[standin]~[program]~[mpirun]~[.]'
part 40 "a step of each stage has the loss of 01, fp64" bash -c 'for program; do
    "$program" --steps 1 | awk -v name="$program" "\$1 == 1 && NF > 8 { print \$2, name }" || exit
  done | awk "{ print; losses[\$1] } END { exit length(losses) != 1 || NR < 7 }"' \
  steps $(printf 'build/cuda-fp64/%s ' ${stages% experts})

# Fast.
part 50 "speed of training, bf16" build/cuda-bf16/bench training
part 50 "speed of training, bf16, of the older sources" build/cuda-bf16-older/bench training # OLDER=commit make gpu-bundle
for precision in bf16 fp8; do
  part 20 "$precision training" build/cuda-$precision/01_single_gpu $real --global-batch-size 8
  part 20 "$precision training, 8 experts" build/cuda-$precision/experts $real --global-batch-size 8 --layers 4 \
    --experts 8 --top-k 2
done
part 20 "bf16 training, heads of 128" build/cuda-bf16/01_single_gpu $real --global-batch-size 8 --heads 16 --kv-heads 16
for model in $models; do
  part 20 "kernels of $model, measured and modelled" tests/tools/beside_model.sh "build/modelled/$gpu-$model.txt" \
    build/cuda-bf16/01_single_gpu $kernels --model "$model"
done
for what in attention kernels profile; do part 30 "speed of $what, bf16" build/cuda-bf16/bench $what; done

for precision in bf16 fp8 fp64 fp16; do run_tests $precision 45; done
check memcheck bf16 '[kernels]~[gpu]' 30
for tool in racecheck synccheck; do check $tool bf16 'attention on tensor cores*~[gpu]' 30; done
check racecheck fp8 'fp8*' 20

# NCCL itself, on one card: DualPipe, then groups, the order of launches, connecting and destroying. Ranks that
# share a card take turns, which is slow: the primer's smallest ring_all_reduce.h is two messages of each rank.
# DualPipe and a file in a V did not end here once; the watchdog says which rank waits for which operation.
if [ "$gpus" -lt 2 ]; then
  pipeline="build/cuda-fp64/05_pipeline_parallel --pp-schedule" two="--steps 2 --timeout 12"
  export NCCL_DEBUG=INFO NCCL_DEBUG_FILE=$report.nccl-%p
  on_one_card 25 2 $pipeline dualpipe $two
  on_one_card 25 2 $pipeline dualpipe --global-batch-size 8 --micro-batch-size 2 $two # the fewest: 4
  printf '%s\n' '0,3: F0 F1 F0.1 B0.1 F1.1 B1.1 B0 B1' '1,2: F0 F0.1 F1 F1.1 B0.1 B0 B1.1 B1' > build/v.txt
  on_one_card 25 2 $pipeline build/v.txt --global-batch-size 4 --micro-batch-size 2 $two
  on_one_card 25 2 env NCCL_LAUNCH_ORDER_IMPLICIT=0 $pipeline dualpipe $two
  unset NCCL_DEBUG NCCL_DEBUG_FILE
  on_one_card 20 2 build/cuda-fp64/collectives
  for stage in 02_data_parallel 03_zero 04_tensor_parallel 06_context_parallel 07_combined_5d; do
    on_one_card 20 2 build/cuda-fp64/$stage --steps 2
  done
  for schedule in 1f1b zb-v dualpipe-v; do on_one_card 20 2 $pipeline $schedule $two; done
  on_one_card 20 4 $pipeline 1f1b $two
  on_one_card 20 4 build/cuda-fp64/07_combined_5d --tp 2 --pp 2 --steps 2
  on_one_card 120 2 build/cuda-fp64/mpi_tests '[05]~[standin]~[.]'
fi
[ "$pytorch" != True ] || measure_pytorch 150 2048
for kernel in tensor_core_forward tensor_core_backward quantise rmsnorm_backward; do
  part 25 "Nsight Compute of $kernel" ncu --target-processes all --kernel-name "regex:$kernel" --launch-count 1 \
    --clock-control none --section SpeedOfLight --section Occupancy build/cuda-fp8/01_single_gpu $real --global-batch-size 4
done

# All GPUs at once.
for run in 02_data_parallel '03_zero --zero-stage 3' 05_pipeline_parallel; do
  [ "$gpus" -lt 2 ] || part 40 "$run on $gpus GPUs" mpirun -n "$gpus" build/cuda-bf16/$run $real --global-batch-size $((8 * gpus))
done
[ "$gpus" -lt 2 ] || part 60 "collectives on $gpus GPUs" mpirun -n "$gpus" build/cuda-bf16/collectives
[ "$gpus" -lt 2 ] || for precision in fp64 bf16; do run_mpi_tests 60 "$gpus" cuda-$precision "~[standin]~[.]"; done

# NCCL over MPI, of two ranks that share a GPU.
run_mpi_tests 40 2 cuda-fp64-mpi '[02]~[standin]~[.]'

# With time left.
part 20 "shared memory cycles of an mma" tests/tools/shared_cycles.py build/cuda-bf16/bench
# Four work queues are refused where there are more streams; one GPU's program has fewer.
for queues in 4 32; do
  part 20 "$queues work queues" env CUDA_DEVICE_MAX_CONNECTIONS=$queues build/cuda-bf16/01_single_gpu $real --global-batch-size 8
done
run_tests fp32
for precision in bf16 fp8 fp64; do check racecheck $precision '[kernels]~[gpu]'; done
for stage in 03 04 05 06; do run_mpi_tests 90 2 cuda-fp64-mpi "[$stage]~[standin]~[.]"; done
# All stages are in the command, so that the part is skipped where one was not built.
part 180 "tests of the programs, fp64" bash -c '"$0" "[program]"' \
  $(printf 'build/cuda-fp64/%s ' tests $stages)
[ "$pytorch" != True ] || measure_pytorch 150 4096

finish
say "$passes parts passed, $failures failed, $skipped were skipped; the report is $report"
[ "$failures" -eq 0 ] && [ "$passes" -gt 0 ]
