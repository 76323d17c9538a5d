# What is built: the choices of who calls make, and the names of the folders below build/.
# With a GPU, nvcc compiles the sources; without one, g++ compiles the same sources against the headers in common/cpu.
NVCC := $(or $(shell command -v nvcc),$(wildcard /usr/local/cuda/bin/nvcc))
GPU_ARCH := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | tr -d .)
BACKEND ?= $(if $(and $(NVCC),$(GPU_ARCH)),cuda,cpu)
PRECISION ?= fp32
NCCL ?= $(if $(filter cpu,$(BACKEND)),mpi,nccl)
PRECISIONS := fp64 fp32 bf16 fp16 fp8

# $(call quoted,TEXT): between single quotes, for the shell.
quoted = $(subst ','\'',$(1))
# $(call check,NAME,valid values): an unknown value ends make with one line.
check = $(if $(filter-out $(2),$($(1))),$(error $(1): $($(1)) is not valid; expected $(2)))
$(call check,BACKEND,cpu cuda)
$(call check,NCCL,$(if $(filter cpu,$(BACKEND)),mpi,nccl mpi))
$(call check,PRECISION,$(PRECISIONS))
$(call check,SANITIZE,$(if $(filter cpu,$(BACKEND)),thread address,nothing with BACKEND=cuda))

# Where nothing can be built, make says why.
$(if $(filter Linux,$(shell uname)),,$(error this tree builds on Linux; elsewhere in its container: .devcontainer))
$(if $(filter 3.%,$(MAKE_VERSION)),$(error make $(MAKE_VERSION) is too old; expected 4 or newer))
$(if $(word 2,$(CURDIR)),$(error $(CURDIR): this path has a space; expected one without))
$(if $(filter-out help,$(or $(MAKECMDGOALS),all)),$(if $(shell test -w . || echo no),$(error $(CURDIR): cannot be written)))
# In the shell of a Slurm job mpirun starts ranks by srun. Without one it would hang, so they start here.
ifneq ($(and $(SLURM_JOB_ID),$(if $(shell command -v srun),,none)),)
$(shell echo "SLURM_JOB_ID is set, but there is no srun: ranks start on this machine" >&2)
export HYDRA_LAUNCHER := fork
export HYDRA_RMK := user
endif

# None of make's own rules, and as many jobs as processors.
JOBS := $(if $(MAKELEVEL:0=)$(filter -j%,$(MAKEFLAGS)),,-j$(shell nproc))
MAKEFLAGS += -r $(JOBS)
Q := $(if $(filter 1,$(V)),,@)

# A configuration is a folder below build/, whose name says all: cpu-fp64, cuda-bf16-mpi, cpu-fp32-block4-thread. There
# are rules for the CPU's, for those chosen here, for those of the race cases, and for those that a goal names.
SUFFIX := $(if $(filter cuda-mpi,$(BACKEND)-$(NCCL)),-mpi)$(addprefix -block,$(BLOCK_THREADS))$(addprefix -,$(SANITIZE))
BUILD := build/$(BACKEND)-$(PRECISION)$(SUFFIX)
CONFIGURATIONS := $(sort $(foreach p,$(PRECISIONS),cpu-$(p) $(BACKEND)-$(p)$(SUFFIX) \
  $(filter cpu-$(p)% cuda-$(p)%,$(subst /, ,$(MAKECMDGOALS)))) cpu-fp32-block4 cpu-fp32-thread cpu-fp32-block4-thread)
# $(call words,NAME): of a configuration. $(call shared,NAME): the folder of what knows no precision, as cpu-thread.
words = $(subst -, ,$(1))
backend = $(firstword $(words))
shared = $(subst $() ,-,$(strip $(filter-out $(PRECISIONS),$(words))))

# What only compiles says what is missing. All else installs it first: INSTALLS is for whom, cuda or cpu.
GOALS := $(or $(MAKECMDGOALS),all)
INSTALLS_NOT := all programs bench build/% clangd clean diff% gpu-% help hint-% homework homework-reference hunt-% submit-%
INSTALLS := $(if $(filter-out $(INSTALLS_NOT),$(GOALS)),$(if $(filter setup run test test-0% sweep,$(GOALS)),$(BACKEND),cpu))
# $(MAKES)COMMAND: one that calls make itself, and so gets a share of its jobs. With -n it is not started.
MAKES = $(if $(findstring n,$(firstword -$(MAKEFLAGS))),,+)
