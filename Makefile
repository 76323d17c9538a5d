# "make help" lists the targets. BACKEND=cpu|cuda, PRECISION=fp32|fp64|bf16|fp16|fp8 and SANITIZE=thread|address choose what is
# built, BLOCK_THREADS=4 makes a CPU block four threads; each choice has a folder of its own under build/. V=1 shows
# the commands.

# With a GPU, nvcc compiles the sources; without one, g++ compiles the same sources against the headers in common/cpu.
NVCC := $(or $(shell command -v nvcc),$(wildcard /usr/local/cuda/bin/nvcc))
GPU_ARCH := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | tr -d .)
BACKEND ?= $(if $(and $(NVCC),$(GPU_ARCH)),cuda,cpu)
PRECISION ?= fp32
SANITIZE ?=
BLOCK_THREADS ?=
TEST_PRECISIONS ?= $(if $(SANITIZE),fp32,fp32 fp64 bf16 fp16 fp8)

# $(call check,NAME,valid values): an unknown value ends make with one line.
check = $(if $(filter-out $(2),$($(1))),$(error $(1): $($(1)) is not valid; expected $(2)))
NCCL ?= $(if $(filter cpu,$(BACKEND)),mpi,nccl)
$(call check,BACKEND,cpu cuda)
$(call check,NCCL,$(if $(filter cpu,$(BACKEND)),mpi,nccl mpi))
$(call check,PRECISION,fp32 fp64 bf16 fp16 fp8)
$(call check,SANITIZE,$(if $(filter cpu,$(BACKEND)),thread address,nothing with BACKEND=cuda))

ifeq ($(MAKELEVEL)$(filter -j%,$(MAKEFLAGS)),0)
  MAKEFLAGS += -j$(shell nproc)
endif
Q := $(if $(filter 1,$(V)),,@)
comma := ,

# ---- Sources ---------------------------------------------------------------------------------------------------------
# A .cc file knows neither CUDA nor the precision: it is compiled once for all builds, in HOST, and its test is in the
# fp32 builds only. A .cu file is compiled for each build, in BUILD. What calls CUDA or NCCL, but knows no precision, is
# compiled once for all precisions, in SHARED: the stand-ins, which are in the folders named cpu, their tests, and ranks.
SUFFIX := $(if $(filter cuda-mpi,$(BACKEND)-$(NCCL)),-mpi)$(addprefix -block,$(BLOCK_THREADS))$(addprefix -,$(SANITIZE))
BUILD := build/$(BACKEND)-$(PRECISION)$(SUFFIX)
SHARED := build/$(BACKEND)$(SUFFIX)
HOST := build/host$(addprefix -,$(SANITIZE))
# The rooms of common, from the bottom up: a file includes only files of its own room and of rooms below.
ROOMS := clock device kernels tensor_cores model ranks checkpoint run
# What runs on several ranks, needs MPI and NCCL: everything but 01.
PARALLEL_SOURCES := $(wildcard common/ranks/*.cu) common/run/parallel_program.cu
PROGRAMS := $(patsubst %/main.cu,%,$(wildcard [0-9][0-9]_*/main.cu))
# Programs beside the main.cu of their stage.
SIDE_PROGRAMS := 02_data_parallel/collectives 07_combined_5d/experts
ANY_PRECISION := build/batches/standin_% common/cpu/% common/device/%.cu $(patsubst %,common/ranks/%.cu,comm watchdog) \
  tests/cpu/% tests/mpi/test_hangs.cu tests/mpi/test_nccl_%
# $(call objects,SOURCES): their object files.
objects = $(patsubst %,$(SHARED)/%.o,$(filter $(ANY_PRECISION),$(1))) \
  $(patsubst %,$(HOST)/%.o,$(filter-out $(ANY_PRECISION),$(filter %.cc,$(1)))) \
  $(patsubst %,$(BUILD)/objects/%.o,$(filter-out $(ANY_PRECISION),$(filter %.cu,$(1))))
# Compiled one by one: what is to be fast, what is shared by more builds than the rest, and kernels; on the CPU these only in
# fp32 and fp64, in which one tries a change. All else: in batches. Alone are also CUDA's streams, whose types would make
# g++ warn in a batch, and NCCL's access to a device, which differs.
KERNELS := $(shell grep -l '__global__' -r common tests $(wildcard 0*) --include=*.cu)
ALONE := $(filter-out common/cpu/%,$(ANY_PRECISION)) $(if $(filter cuda,$(BACKEND)),$(KERNELS),$(if $(filter fp32 fp64,$(PRECISION)),common/kernels/%)) \
  common/cpu/cuda/cuda_stream.cc common/cpu/nccl/device_access_% \
  $(addprefix tests/,test_schedule.cc main.cc one_process.cc mpi/ranks.cc)
# $(call batches,NAME,SOURCES): like objects, but of one file that includes the sources, or of two where they are many, because
# most of the time goes into headers and what is in them. Names in the unnamed namespaces of one batch must differ.
# They are written when this file is read, not by a rule, so that the largest objects, which come first, are begun first.
batch_of = $(if $(2),$(shell mkdir -p build/batches; lines=$$(printf '#include "%s"\n' $(2)); \
  echo "$$lines" | cmp -s - build/batches/$(1) || echo "$$lines" > build/batches/$(1))build/batches/$(1))
share = $(shell printf '%s\n' $(2) | awk 'NR % $(subst of, == ,$(1))')
batches_of = $(foreach n,$(if $(word 13,$(3)),2of0 2of1,1of0),$(call batch_of,$(1)-$(n)$(if $(filter cu,$(2)),-$(notdir $(BUILD))).$(2),$(call share,$(n),$(3))))
batches = $(call objects,$(filter $(ALONE),$(2)) $(foreach kind,cc cu,$(call batches_of,$(1),$(kind),$(filter-out $(ALONE),$(filter %.$(kind),$(2))))))
COMMON := $(call batches,kernels,$(wildcard common/kernels/*.cu common/tensor_cores/*.cu)) $(call batches,common,$(filter-out common/kernels/%.cu common/tensor_cores/%.cu $(PARALLEL_SOURCES),$(wildcard $(ROOMS:%=common/%/*.cc) $(ROOMS:%=common/%/*.cu))))
PARALLEL := $(call batches,parallel,$(PARALLEL_SOURCES))
STANDINS := $(if $(filter cpu,$(BACKEND)),$(call batches,standin_cuda,$(wildcard common/cpu/cuda/*.cc)))
# The stand-ins model the time of a GPU.
PROFILE := $(patsubst %,$(HOST)/common/%.cc.o,clock/device_profile device/errors)
# NCCL over MPI: on a GPU the same sources, but for the one file that reaches device memory.
NCCL_CPU := $(filter-out %/device_access_cpu.cc,$(wildcard common/cpu/nccl/*.cc)) \
  common/cpu/nccl/$(if $(filter cpu,$(BACKEND)),device_access_cpu.cc,device_access_cuda.cu)
NCCL_STANDIN := $(if $(filter mpi,$(NCCL)),$(call batches,standin_nccl,$(NCCL_CPU)))
# With TAG=01 (make test-01) only files that have tests with this tag are compiled, into programs of their own; with
# TAG=test_parity only this file.
TAG ?=
with_tag = $(if $(TAG),$(or $(filter %/$(TAG).cc %/$(TAG).cu,$(1)),$(shell grep -l '\[$(TAG)\]' $(1))),$(1))
# Which tests a precision has. Those of the stand-ins and of .cc files have none, and are in fp32. Of several ranks: fp64
# has what depends on the layout, bf16 what depends on the elements; fp16 and fp8 have only what others don't show. A
# build for a sanitizer has all.
mpi_tests = $(patsubst %,tests/mpi/test_%.cu,$(1))
NCCL_TESTS := $(wildcard tests/mpi/test_nccl_*.cu)
MPI_TESTS_fp64 := $(filter-out $(NCCL_TESTS) $(call mpi_tests,fp8 loss_scale),$(wildcard tests/mpi/test_*.cu))
MPI_TESTS_bf16 := $(filter-out $(call mpi_tests,bad_numbers combined combined_costs parity virtual_time),$(MPI_TESTS_fp64))
MPI_TESTS_fp32 := $(if $(SANITIZE),$(MPI_TESTS_fp64)) $(NCCL_TESTS)
MPI_TESTS_fp16 := $(call mpi_tests,bad_numbers loss_scale)
MPI_TESTS_fp8 := $(call mpi_tests,fp8)
# The planner knows times from NCCL over MPI, so its tests need that, too.
MPI_TESTS := $(filter-out $(if $(filter nccl,$(NCCL)),$(NCCL_TESTS) $(call mpi_tests,plan)),$(MPI_TESTS_$(PRECISION)))
# Of one process: fp64 has all, the others what their elements change.
CU_TESTS_bf16 := attention experts fp8 golden kernels steps transformer
CU_TESTS_fp32 := $(if $(SANITIZE),,attention kernels steps fp8 loss_scale)
CU_TESTS_fp16 := attention kernels loss_scale
CU_TESTS_fp8 := fp8
CU_TESTS := $(or $(CU_TESTS_$(PRECISION):%=tests/test_%.cu),$(wildcard tests/test_*.cu))
# Tests of faults start ranks that hang. Models in parallel are what all but those of NCCL over MPI look at; fp16 and fp8
# look at 07's only.
MPI_TESTS := $(call batches,mpi$(TAG),tests/main.cc tests/mpi/ranks.cc tests/mpi/test_hangs.cu $(call with_tag,$(MPI_TESTS)) \
  $(if $(filter-out $(NCCL_TESTS),$(MPI_TESTS)),$(wildcard tests/mpi/$(if $(filter fp16 fp8,$(PRECISION)),combined,*)_model.cu)))
# In fp32, and for a stage, also of what knows no precision; on the CPU they are others, so the batch has another name.
CC_TESTS := $(if $(filter fp32,$(PRECISION))$(TAG),$(wildcard tests/test_*.cc) $(if $(filter cpu,$(BACKEND)),$(wildcard tests/cpu/test_*.cc)))
TESTS := $(call batches,tests$(TAG)$(if $(filter cuda,$(BACKEND)),-cuda),tests/main.cc tests/one_process.cc $(call with_tag,$(CU_TESTS) $(CC_TESTS)))
TEST_PROGRAMS := $(if $(MPI_TESTS),$(BUILD)/mpi_tests$(TAG:%=-%)) $(BUILD)/tests$(TAG:%=-%)

# ---- Flags -----------------------------------------------------------------------------------------------------------
# GCC, when it instruments the standard library, believes to see uninitialised variables there.
SANITIZER_thread := -fsanitize=thread
SANITIZER_address := -fsanitize=address,undefined
SANITIZER := $(addsuffix $() -fno-sanitize-recover=all -Wno-maybe-uninitialized,$(SANITIZER_$(SANITIZE)))
DEFINES := -DPENTATRON_PROFILES=\"$(CURDIR)/common/clock/profiles\" -DPENTATRON_CORPUS=\"$(CURDIR)/common/corpus.txt\" -DPENTATRON_STYLES=\"$(CURDIR)/07_combined_5d/plan/styles\" -DPENTATRON_TESTS=\"$(CURDIR)/tests\"
BUILD_DEFINES_fp64 := -DPRECISION=64
BUILD_DEFINES_fp32 := -DPRECISION=32
BUILD_DEFINES_bf16 := -DPRECISION=16
BUILD_DEFINES_fp16 := -DPRECISION=16 -DREAL_IS_HALF
BUILD_DEFINES_fp8 := -DPRECISION=16 -DPRODUCTS_IN_FP8
BUILD_DEFINES := $(BUILD_DEFINES_$(PRECISION))
# PACKAGE_HEADERS and PACKAGE_LIBRARIES are folders that the compilers do not search by themselves, with colons between.
$(foreach word,$(shell CXX='$(CXX)' common/packages.sh $(if $(filter cuda,$(BACKEND)),$(NVCC))),$(eval $(word)))
PACKAGE_FLAGS := $(addprefix -isystem ,$(subst :, ,$(PACKAGE_HEADERS)))
PACKAGE_LINK := $(foreach folder,$(subst :, ,$(PACKAGE_LIBRARIES)),-L$(folder) -Xlinker -rpath -Xlinker $(folder))
ifneq ($(findstring /.mpich/,$(PACKAGE_LIBRARIES)),)
  PACKAGE_LINK += -Xlinker --disable-new-dtags  # the libraries there look for others there
endif
export PATH := $(CURDIR)/build/packages/bin:$(PATH)
# MPICH's processes would wait for each other at the start in a loop that yields to none: if they are more than the
# cores, that costs more than a short run.
export MPIR_CVAR_NOLOCAL ?= 1
# Nor need each process read the settings of all PCI devices, a fifth of its start.
export HWLOC_COMPONENTS ?= -linuxio
CCACHE := $(and $(shell command -v ccache),ccache)
HOST_FLAGS := -std=c++20 -g1 -Wall -Wextra $(SANITIZER) -I. -Icommon $(DEFINES) $(PACKAGE_FLAGS)
# What CI adds changes no object file, and so compiles nothing again. g++ looks for garbage later, which takes 8 % off its
# time, for a quarter more memory.
LATE_GARBAGE := --param=ggc-min-heapsize=2000000
HOST_STRICT := $(if $(WERROR),-Werror $(LATE_GARBAGE))

# Debian keeps OpenBLAS's OpenMP variant in a folder of its own. It is
# opened by name when a program starts (common/cpu/cuda/cublas.cc); the sanitizers, too, look for it where -rpath says.
MULTIARCH := $(shell $(CXX) -print-multiarch)
OPENBLAS := $(wildcard /usr/lib/$(MULTIARCH)/openblas-openmp)
# Sums may be reordered, so that they vectorise; NaN and infinity keep their meaning. "#pragma unroll" is for nvcc.
CPU_FLAGS := $(HOST_FLAGS) -Wno-unknown-pragmas -march=native -fopenmp-simd -fno-math-errno -fassociative-math -fno-signed-zeros \
  -fno-trapping-math -DCUDA_CPU -Icommon/cpu/cuda -Itests $(OPENBLAS:/usr/lib/%=-I/usr/include/%) \
  $(addprefix -DCUDA_CPU_THREADS_PER_BLOCK=,$(BLOCK_THREADS))
CPU_LIBRARIES := $(OPENBLAS:%=-Wl$(comma)--disable-new-dtags$(comma)-rpath$(comma)%) -ldl \
  $(if $(filter x86_64%,$(MULTIARCH)),-lmvec)

# MPICH's library, without the flags that its compiler wrapper would add.
MPI_FLAGS := $(if $(filter mpi,$(NCCL)),-Icommon/cpu/nccl)
MPI_LIBRARIES := $(if $(filter nccl,$(NCCL)),-lnccl) -lmpich

# sm_90a has what only Hopper has. Without a GPU here, sm_90 runs on Hopper and on later ones.
CUDA_ARCH := -arch=sm_$(or $(patsubst 90,90a,$(GPU_ARCH)),90)
CUDA_FLAGS := -std=c++20 $(CUDA_ARCH) --expt-relaxed-constexpr -lineinfo -Xcompiler -Wall,-Wextra \
  -I. -Icommon $(DEFINES) $(PACKAGE_FLAGS)
CUDA_LIBRARIES := -lcublas -lcublasLt

ifeq ($(BACKEND),cpu)
  COMPILE := $(CCACHE) $(CXX) $(CPU_FLAGS) $(MPI_FLAGS)
  STRICT = $(HOST_STRICT)
  LINK := $(CXX) $(SANITIZER) -pthread -rdynamic $(PACKAGE_LINK)
  LIBRARIES := $(CPU_LIBRARIES)
else
  COMPILE := $(NVCC) $(CUDA_FLAGS) -Itests $(MPI_FLAGS)
  STRICT := $(if $(WERROR),-Werror all-warnings -Xcompiler -Werror$(comma)$(LATE_GARBAGE))
  LINK := $(NVCC) $(CUDA_ARCH) -Xcompiler -rdynamic $(PACKAGE_LINK)
  LIBRARIES := $(CUDA_LIBRARIES)
endif
LIBRARIES += -lz
TEST_LIBRARIES := $(if $(wildcard $(addsuffix /catch2/catch_all.hpp,/usr/include /usr/local/include $(subst :, ,$(PACKAGE_HEADERS)))),-lCatch2)

# ---- Building --------------------------------------------------------------------------------------------------------
.PHONY: setup all tested programs tsan-cases run lessons lessons-programs diff fuzz mutants homework grade fingerprints homework-check format compile-commands environments test test-format test-hosts test-slurm sanitize test-hf test-kills test-plan test-fold plan calibrate report test-report sweep precisions check tokens text bench gpu-check gpu-bundle clean published tour test-tour test-questions notes-slow hour book test-book help FORCE
.SECONDARY:
.DELETE_ON_ERROR:

all: programs $(BUILD)/bench $(BUILD)/tests $(BUILD)/mpi_tests
# Programs need no Catch2, and with NCCL over MPI no NCCL.
GOALS := $(filter all programs,$(or $(MAKECMDGOALS),all))
LACKING := $(filter-out $(if $(filter mpi,$(NCCL)),NCCL) $(if $(filter all,$(GOALS)),,Catch2),$(subst :, ,$(PACKAGES_MISSING)))
$(if $(and $(GOALS),$(LACKING)),$(error missing: $(LACKING); make setup BACKEND=$(BACKEND) installs what is missing))
# What make test runs. In fp32 and fp64 the tests start programs, those of a stage only its own and 01; in bf16 and fp8 the
# lessons do.
STAGE := $(filter $(TAG)_%,$(PROGRAMS))
OF_STAGE := $(if $(STAGE),$(sort 01_single_gpu $(STAGE) $(notdir $(filter $(STAGE)/%,$(SIDE_PROGRAMS)))))
tested: $(TEST_PROGRAMS) $(if $(filter bf16 fp16 fp8,$(PRECISION)),,$(or $(OF_STAGE:%=$(BUILD)/%),programs))
tested: $(if $(filter cpu-bf16$(TAG) cpu-fp8$(TAG),$(BACKEND)-$(PRECISION)$(SUFFIX)),$(BUILD)/07_combined_5d)
programs: $(PROGRAMS:%=$(BUILD)/%) $(addprefix $(BUILD)/,$(notdir $(SIDE_PROGRAMS)))

# A program for each race that ThreadSanitizer must see in a use of the stand-ins, and its correct twin.
tsan-cases: $(BUILD)/tsan_cases $(if $(BLOCK_THREADS),,$(BUILD)/nccl_tsan_cases)

$(PROGRAMS:%=$(BUILD)/%): $(BUILD)/%: $(BUILD)/objects/%/main.cu.o $(COMMON) $(STANDINS)
$(BUILD)/tests$(TAG:%=-%): $(TESTS) $(COMMON) $(STANDINS)
$(BUILD)/bench $(BUILD)/logits: $(BUILD)/%: $(BUILD)/objects/tests/tools/%.cu.o $(COMMON) $(STANDINS)
$(BUILD)/tsan_cases: $(SHARED)/tests/cpu/tsan_cases.cc.o $(STANDINS) $(PROFILE)
$(foreach p,$(SIDE_PROGRAMS) 07_combined_5d/plan/plan,$(eval $(BUILD)/$(notdir $(p)): $(BUILD)/objects/$(p).cu.o $(COMMON) $(STANDINS)))
$(BUILD)/mpi_tests$(TAG:%=-%): $(MPI_TESTS) $(COMMON) $(PARALLEL) $(STANDINS) $(NCCL_STANDIN)
PARALLEL_PROGRAMS := $(patsubst %,$(BUILD)/%,$(filter-out 01_single_gpu,$(PROGRAMS)) $(notdir $(SIDE_PROGRAMS)) plan)
$(PARALLEL_PROGRAMS): $(PARALLEL) $(NCCL_STANDIN)
$(BUILD)/nccl_tsan_cases: $(SHARED)/tests/cpu/nccl_tsan_cases.cc.o $(STANDINS) $(PROFILE) $(NCCL_STANDIN)
$(PARALLEL_PROGRAMS) $(filter $(BUILD)/mpi_tests%,$(TEST_PROGRAMS)) $(BUILD)/nccl_tsan_cases: private LIBRARIES += $(MPI_LIBRARIES)
$(BUILD)/01_single_gpu $(PARALLEL_PROGRAMS) $(BUILD)/bench $(BUILD)/logits $(TEST_PROGRAMS) $(BUILD)/tsan_cases $(BUILD)/nccl_tsan_cases:
	@mkdir -p $(@D); echo "link     $@"
	$(Q)$(LINK) -o $@ $(filter %.o,$^) $(LIBRARIES) $(if $(filter $(TEST_PROGRAMS),$@),$(TEST_LIBRARIES))

# Kernels, what carries them out, and the search for layouts (of bf16) are to be fast. All else is to be compiled quickly:
# -Og takes a fifth less time than -O1. Tests of the stand-ins look at what the optimiser made of kernels.
OPTIMIZE = $(or $(if $(filter common/kernels/% common/tensor_cores/% common/cpu/% build/batches/standin_% build/batches/kernels% tests/cpu/test_% tests/tools/% $(if $(filter bf16,$(PRECISION)),%/plan.cu),$<),-O3),\
  $(if $(filter build/batches/tests%.cc tests/main.cc,$<),-O0),$(if $(filter cuda,$(BACKEND)),-O1,-Og))

# With a GPU, what has kernels is CUDA; all else is C++, which nvcc compiles in half the time.
LANGUAGE = -x $(if $(and $(filter cuda,$(BACKEND)),$(filter $(KERNELS),$<)),cu,c++)

# $(call compile,FOLDER,COMMAND,SUFFIX): compiles the sources of this kind. The commands are noted; when they change,
# everything in the folder is compiled again.
define compile
$(1)/%.$(3).o: %.$(3) $(1)/flags
	@mkdir -p $$(@D); echo "compile  $$<  ($(patsubst build/%,%,$(1:/objects=)))"
	$$(Q)$(2) $$(OPTIMIZE) -MMD -MP $(if $(filter cu,$(3)),$$(LANGUAGE)) -c $$< -o $$@
endef
$(eval $(call compile,$(HOST),$(CCACHE) $(CXX) $(HOST_FLAGS) $(HOST_STRICT),cc))
$(foreach suffix,cc cu,$(eval $(call compile,$(SHARED),$(COMPILE) $(STRICT),$(suffix))))
$(eval $(call compile,$(BUILD)/objects,$(COMPILE) $(BUILD_DEFINES) $(STRICT),cu))
$(HOST)/flags: private COMMANDS = $(CXX) $(HOST_FLAGS)
$(SHARED)/flags: private COMMANDS = $(COMPILE)
$(BUILD)/objects/flags: private COMMANDS = $(COMPILE) $(BUILD_DEFINES) $(LINK) $(LIBRARIES) $(MPI_LIBRARIES)
$(HOST)/flags $(SHARED)/flags $(BUILD)/objects/flags: FORCE
	@mkdir -p $(@D); echo '$(COMMANDS)' | cmp -s - $@ || echo '$(COMMANDS)' > $@

-include $(patsubst %.o,%.d,$(COMMON) $(PARALLEL) $(STANDINS) $(NCCL_STANDIN) $(TESTS) $(MPI_TESTS) \
  $(call objects,$(addsuffix /main.cu,$(PROGRAMS)) $(addsuffix .cu,$(SIDE_PROGRAMS) 07_combined_5d/plan/plan) $(wildcard tests/tools/*.cu tests/cpu/*cases.cc)))

# ---- Running ---------------------------------------------------------------------------------------------------------

# Every stage trains the same model on the same batches, so that one table can compare them with 01. ARGS='...' changes
# what all of them train, RANKS how many there are (one for each GPU); ONLY='01 05-%' makes only these runs.
RANKS ?= $(if $(filter cuda-nccl,$(BACKEND)-$(NCCL)),$(shell nvidia-smi -L 2>/dev/null | wc -l),8)
RUN_STEPS ?= 10
LOGS := $(BUILD)/runs
# Three dimensions on 8 ranks; and with experts all five, on 16 ranks or, where a rank is a GPU, four on 8.
MESH_3D := $(if $(filter 8,$(RANKS)),tp 2 cp 2 pp 2)
MESH_5D := $(if $(filter mpi,$(NCCL)),tp 2 cp 2 dp 2 pp 2 ep 2,$(if $(filter 8,$(RANKS)),tp 2 dp 2 pp 2 ep 2))
AXES = $(patsubst --2,2,$(addprefix --,$(1)))
# $(call add_run,NAME,PROGRAM,RANKS,OPTIONS): one run follows another; beside it the programs of later ones are compiled.
RUN_NAMES :=
define add_run
.PHONY: run-$(1)
run-$(1): $(BUILD)/$(2) $(RUN_NAMES:%=run-%)
	@mkdir -p $(LOGS)
	@V=$(V) python3 common/report/progress.py $(1) $(LOGS)/$(1).txt $(addprefix mpirun -n ,$(3)) $(BUILD)/$(2) --steps $(RUN_STEPS) \
	  --log-every 1 $(4) $(ARGS) --log-json $(LOGS)/$(1).json --trace $(LOGS)/$(1).trace
RUN_NAMES += $(1)
endef
add_run_of = $(if $(filter $(or $(ONLY),%),$(1)),$(eval $(call add_run,$(1),$(2),$(3),$(4))))
$(call add_run_of,01,01_single_gpu,,--sample 200)
$(call add_run_of,02-bucket,02_data_parallel,$(RANKS),)
$(call add_run_of,03-zero3,03_zero,$(RANKS),--zero-stage 3)
# Ranks that share a micro-batch take the whole batch at once; a pipeline needs many.
$(call add_run_of,04-tp-sp,04_tensor_parallel,$(RANKS),--micro-batch-size 32 --sequence-parallel)
$(call add_run_of,05-1f1b,05_pipeline_parallel,$(RANKS),--micro-batch-size 4)
$(call add_run_of,06-zigzag,06_context_parallel,$(RANKS),--micro-batch-size 32)
$(call add_run_of,07-3d,07_combined_5d,$(RANKS),--micro-batch-size 8 $(call AXES,$(MESH_3D)) --sequence-parallel --zero-stage 3)
$(call add_run_of,07-experts,07_combined_5d,1,--micro-batch-size 8 --experts 8)
$(call add_run_of,07-experts-5d,07_combined_5d,$(if $(filter mpi,$(NCCL)),16,$(RANKS)),--micro-batch-size 8 $(call AXES,$(MESH_5D)) --experts 8)
.PHONY: runs
runs: $(RUN_NAMES:%=run-%) $(if $(ONLY),,programs $(if $(filter cpu,$(BACKEND)),lessons-programs))
	@python3 common/report/runs.py $(LOGS)
	@$(if $(ONLY)$(filter cuda,$(BACKEND)),,$(LESSONS) --table)
	@echo "What each run printed is in $(LOGS)/*.txt; all steps are in $(LOGS)/*.json, timelines in $(LOGS)/*.trace."
setup:
	@common/setup.sh $(BACKEND)
run:
	@case " 1 2 4 8 " in *" $(RANKS) "*) ;; *) echo "RANKS: $(RANKS) is not valid; expected 1, 2, 4 or 8, \
which share out the tiny model and its batch" >&2; exit 2 ;; esac
	@[ -n "$(RUN_NAMES)" ] || { echo "ONLY: $(ONLY) is not valid; expected names of runs, as in ONLY='01 05-%'" >&2; exit 2; }
	@common/setup.sh $(BACKEND) python3:python3
	@$(MAKE) --no-print-directory runs

# What the techniques buy and cost at a real size, in dry runs (tests/lessons.txt);  make lessons GPU=h200 W='a word'.
# 07 is enough: with one axis it is the stage of that axis. It is compiled when the objects that this build shares with it
# are there. Lessons on fp8 need that of fp8, too.
GPU ?= h100
LESSONS := python3 common/report/lessons.py tests/lessons.txt build/cpu-bf16 build/cpu-bf16/lessons --gpu $(GPU)
lessons-programs: $(BUILD)/$(if $(filter bf16,$(PRECISION)),07_combined_5d,02_data_parallel)
	@$(MAKE) -s --no-print-directory BACKEND=cpu PRECISION=bf16 SANITIZE= BLOCK_THREADS= build/cpu-bf16/07_combined_5d
	@$(if $(findstring fp8,$(W)),$(MAKE) -s --no-print-directory BACKEND=cpu PRECISION=fp8 SANITIZE= BLOCK_THREADS= build/cpu-fp8/07_combined_5d)
lessons:
	@common/setup.sh cpu python3:python3
	@$(MAKE) --no-print-directory BACKEND=cpu SANITIZE= BLOCK_THREADS= PRECISION=bf16 W='$(or $(W),fp8)' lessons-programs
	@$(LESSONS) $(if $(W),'$(W)')

# Runs that others published, on 8 to 16,384 GPUs, beside folded dry runs of them;  make published W='a word of the name'.
# To look for the reason of an error:  SCALE='memory_achievable=0.5' of the profile, ADD='--recompute full' of the commands.
PUBLISHED := python3 common/report/published.py common/report/published.txt build
published:
	@common/setup.sh cpu python3:python3
	@for p in bf16 fp8; do \
	  $(MAKE) --no-print-directory BACKEND=cpu SANITIZE= BLOCK_THREADS= PRECISION=$$p build/cpu-$$p/07_combined_5d || exit 1; done
	@$(PUBLISHED) $(if $(W),'$(W)') $(SCALE:%=--scale %) $(if $(ADD),--add='$(ADD)')

# $(call venv,NAME): build/python-NAME, a virtual environment with these packages, made once.
PYTHON_format := clang-format==14.0.6
PYTHON_report := altair==6.3.0 vl-convert-python==1.9.0.post1
PYTHON_book := mkdocs-material==9.8.2 $(PYTHON_report)
PYTHON_precisions := $(PYTHON_report) numpy==2.2.6 safetensors==0.6.2
PYTHON_browser := playwright==1.65.2
PYTHON_tokens := tokenizers
venv = [ -e build/python-$(1)/ready ] || { mkdir -p build && rm -rf build/python-$(1) && \
  /usr/bin/python3 -m venv build/python-$(1) && \
  build/python-$(1)/bin/pip install -q --disable-pip-version-check $(PYTHON_$(1)) && touch build/python-$(1)/ready; }
# What CI needs of them, all at once.
environments:
	@$(call venv,format)
	@$(call venv,browser)
	@$(call venv,report)
	@$(call venv,book)
	@tests/hugging_face.sh

# One page about the runs of make run, or about RUNS='a.json b.json'. It asks plan, with the options PLAN='--config
# config.json --max-memory 70GiB', and 07 for dry runs of pipelines.
REPORT := build/report.html
RUNS ?= $(LOGS)
report:
	@common/setup.sh cpu ensurepip.py:python3-venv
	@$(MAKE) --no-print-directory BACKEND=cpu PRECISION=fp32 SANITIZE= BLOCK_THREADS= build/cpu-fp32/07_combined_5d
	@$(MAKE) --no-print-directory BACKEND=cpu PRECISION=bf16 SANITIZE= BLOCK_THREADS= build/cpu-bf16/plan
	@$(MAKE) -s --no-print-directory BACKEND=cpu PRECISION=bf16 SANITIZE= BLOCK_THREADS= lessons-programs
	@[ build/cpu-bf16/lessons/01.json -nt build/cpu-bf16/07_combined_5d ] || $(LESSONS) --table > /dev/null
	@$(call venv,report)
	@build/python-report/bin/python common/report/report.py $(REPORT) build '$(PLAN)' $(RUNS)

# The page in a browser without a window, and its numbers against the programs. The runs are few and short.
test-report: private FOLDER := build/test-report
test-report: private OURS = $(MAKE) --no-print-directory BACKEND=cpu PRECISION=fp32 SANITIZE= REPORT=$(FOLDER)/report.html
test-report:
	@rm -rf $(FOLDER) && mkdir -p $(FOLDER)
	@+$(OURS) sweep MODEL=smollm-1.7b GPUS=4 & \
	$(OURS) run ONLY='01 04-tp-sp 05-1f1b 07-3d 07-experts' RUN_STEPS=3 LOGS=$(FOLDER)/runs > $(FOLDER)/run.log 2>&1 || { tail $(FOLDER)/run.log; exit 1; }; \
	wait $$!
	@+$(OURS) report RUNS=$(FOLDER)/runs PLAN='--gpus 16 --seq-len 2048'
	@common/setup.sh cpu chromium:chromium
	@$(call venv,browser)
	@build/python-browser/bin/python tests/report.py $(FOLDER)/report.html build

# The notes as a book: build/book, which needs no server, and build/book.html, all of it in one file. Its figures are drawn
# from what these programs print. make test-book opens it in a browser without a window.
book:
	@common/setup.sh cpu ensurepip.py:python3-venv
	@$(MAKE) -s --no-print-directory BACKEND=cpu PRECISION=fp32 SANITIZE= BLOCK_THREADS= build/cpu-fp32/05_pipeline_parallel
	@$(MAKE) -s --no-print-directory BACKEND=cpu PRECISION=bf16 SANITIZE= BLOCK_THREADS= \
	  $(addprefix build/cpu-bf16/,02_data_parallel 07_combined_5d plan)
	@$(call venv,book)
	@NO_MKDOCS_2_WARNING=1 build/python-book/bin/mkdocs build -q --strict -f common/report/book.yml -d "$(abspath build/book)"
	@echo "build/book/index.html: open it in a browser;  build/book.html: all of it, to print or mail"
test-book: book
	@common/setup.sh cpu chromium:chromium
	@$(call venv,browser)
	@build/python-browser/bin/python tests/book.py build

# The planner's ten fastest layouts, run on the GPUs, or in virtual time:  make sweep GPUS=8 MODEL=smollm-1.7b
GPUS ?= $(RANKS)
MODEL ?= smollm-1.7b
SWEEP_ARGS := --seq-len 2048 --global-batch-size 64 $(ARGS)
sweep: plan
	@$(MAKE) --no-print-directory PRECISION=bf16 SANITIZE= BLOCK_THREADS= build/$(BACKEND)-bf16$(filter -mpi,$(SUFFIX))/07_combined_5d
	@python3 common/report/sweep.py $(dir $(REPORT))sweep.csv build/host/plan build/$(BACKEND)-bf16$(filter -mpi,$(SUFFIX))/07_combined_5d \
	  $(GPUS) --model $(MODEL) $(SWEEP_ARGS) $(if $(filter cpu,$(BACKEND)),--dry-run)

# What the precision does to learning: 400 steps of 01 in each of them, as a table and a picture.
precisions:
	@common/setup.sh
	@for p in fp32 bf16 fp16 fp8; do \
	  $(MAKE) --no-print-directory BACKEND=cpu PRECISION=$$p SANITIZE= BLOCK_THREADS= build/cpu-$$p/01_single_gpu || exit 1; done
	@$(call venv,precisions)
	@build/python-precisions/bin/python common/report/precisions.py build/precisions build $(STEPS)

# The first hour (tests/tour.txt): ten steps, in the terminal. Its test goes through them without one.
tour test-tour:
	@[ -e tests/tour.sh ] || { echo "tour: a learner's tree has none" >&2; exit 2; }
	@common/setup.sh
	@$(MAKE) --no-print-directory BACKEND=cpu PRECISION=fp32 SANITIZE= BLOCK_THREADS= TAG=test_primer programs build/cpu-fp32/tests-test_primer
	@$(MAKE) --no-print-directory BACKEND=cpu PRECISION=bf16 SANITIZE= BLOCK_THREADS= build/cpu-bf16/07_combined_5d
	@DEFINES='$(DEFINES)' tests/tour.sh $(if $(filter test-tour,$@),< /dev/null)

# The notes' numbers are what the commands that they name print; those that take minutes:  make notes-slow.
NOTES := $(wildcard README.md 0*/*.md common/*/README.md common/*/*/README.md tests/*.md tests/homework/*.md)
test-questions notes-slow:
	@common/setup.sh
	@$(MAKE) --no-print-directory BACKEND=cpu PRECISION=fp32 SANITIZE= BLOCK_THREADS= programs
	@$(MAKE) --no-print-directory BACKEND=cpu PRECISION=bf16 SANITIZE= BLOCK_THREADS= programs
	@python3 tests/questions.py $(if $(filter notes-slow,$@),--slow) $(NOTES)

# What a stage adds:  make diff-03;  the lines of main.cu alone, of any two programs:  make diff A=02 B=experts.
diff:
	@[ -n "$(A)" ] && [ -n "$(B)" ] || { echo "diff: which two? expected two stages or programs, as in \
make diff A=02 B=experts,  or  make diff-03" >&2; exit 2; }
	@tests/diff.sh $(A) $(B)
diff-%:
	@tests/diff.sh $*

# Every test, in each precision; make test-01 only those with the tag [01], in fp64. On the CPU the test of the stand-ins
# starts the race cases, built for ThreadSanitizer, and fp32 for ThreadSanitizer also has the kernels with threads in a
# block.
THREADS_IN_BLOCKS := $(if $(filter cputhread,$(BACKEND)$(SANITIZE)),$(filter fp32,$(TEST_PRECISIONS)))
TEST_FOLDERS = $(TEST_PRECISIONS:%=build/$(BACKEND)-%$(SUFFIX)) $(THREADS_IN_BLOCKS:%=build/cpu-%-block4-thread)
# The first precision's build has all that the others share; then these may be built side by side.
TESTED_AFTER := $(patsubst %,tested-%,$(wordlist 2,9,$(TEST_PRECISIONS)) $(if $(filter cpu,$(BACKEND)),races))
test:
	@common/setup.sh $(BACKEND)
	@$(MAKE) --no-print-directory tested-$(firstword $(TEST_PRECISIONS))
	@$(if $(TESTED_AFTER),$(MAKE) --no-print-directory $(TESTED_AFTER))
	@tests/run.sh '' $(TEST_FOLDERS)

tested-races:
	@$(MAKE) --no-print-directory PRECISION=fp32 SANITIZE=thread BLOCK_THREADS= tsan-cases
	@$(MAKE) --no-print-directory PRECISION=fp32 SANITIZE=thread BLOCK_THREADS=4 \
	  tsan-cases $(THREADS_IN_BLOCKS:%=all)
tested-%:
	@$(MAKE) --no-print-directory PRECISION=$* tested

test-%:
	@grep -qF '[$*]' tests/test_*.c[cu] tests/*/test_*.c[cu] || { echo "test-$*: no test has this tag; expected 01 to 07, \
or another word in brackets behind the name of a test" >&2; exit 2; }
	@common/setup.sh $(BACKEND)
	@$(MAKE) --no-print-directory PRECISION=fp64 TAG=$* tested
	@tests/run.sh '[$*]' build/$(BACKEND)-fp64$(SUFFIX)

# The tests of a name, as the notes print it, wherever they are:  make check T='05: deadlocks' RANKS=4
check:
	@common/setup.sh $(BACKEND)
	@+tests/check.sh "$(T)" $(if $(filter command,$(origin RANKS)),$(RANKS))

# 02 and 07 over two hosts, which are namespaces of this one; then one of them is cut off, or its ranks killed.
test-hosts:
	@common/setup.sh
	@$(MAKE) --no-print-directory BACKEND=cpu PRECISION=fp32 programs
	@tests/hosts.sh build/cpu-fp32$(addprefix -,$(SANITIZE))

# The script of README.md's "Slurm", under a real Slurm of two such hosts.
test-slurm:
	@common/setup.sh
	@$(MAKE) --no-print-directory BACKEND=cpu PRECISION=fp64 SANITIZE= BLOCK_THREADS= build/cpu-fp64/07_combined_5d
	@tests/slurm.sh build/cpu-fp64

# Every test under AddressSanitizer with UBSan, and under ThreadSanitizer: hours;  make sanitize S=address P='fp32 fp64': a part.
sanitize:
	@common/setup.sh
	@+tests/sanitize.sh "$(or $(S),address thread)" "$(or $(P),fp32 fp64 bf16 fp16 fp8)"

# Text to tokens.bin and tokenizer.json, in the folder TO;  make tokens TEXT=book.txt VOCAB=4096. TOKENIZER=FILE: with an
# existing one.
VOCAB ?= 4096
tokens:
	@[ -n "$(TEXT)" ] || { echo "TEXT: missing; expected a text file, as in make tokens TEXT=book.txt VOCAB=4096" >&2; exit 2; }
	@common/setup.sh cpu ensurepip.py:python3-venv
	@$(call venv,tokens)
	@build/python-tokens/bin/python common/tokens.py "$(TEXT)" "$(VOCAB)" "$(TOKENIZER)" "$(or $(TO),.)"
# What --sample prints, as text:  build/cpu-fp32/01_single_gpu --load run --sample 100 | make -s text
text:
	@$(call venv,tokens)
	@build/python-tokens/bin/python common/tokens.py --text "$(or $(TOKENIZER),tokenizer.json)"

# Against Hugging Face's transformers: their models here, ours there.
test-hf:
	@common/setup.sh
	@for p in fp32 fp64; do \
	  $(MAKE) --no-print-directory BACKEND=cpu PRECISION=$$p SANITIZE= programs build/cpu-$$p/logits || exit 1; done
	@tests/hugging_face.sh build

# The planner: build/host/plan --model llama-3.1-8b --gpus 64 --seq-len 4096 --global-batch-size 256. It plans in bf16.
plan:
	@common/setup.sh
	@$(MAKE) --no-print-directory BACKEND=cpu PRECISION=bf16 SANITIZE= BLOCK_THREADS= build/cpu-bf16/plan
	@mkdir -p build/host; cmp -s build/cpu-bf16/plan build/host/plan || cp build/cpu-bf16/plan build/host/plan

# The planner against dry runs of 07;  make test-plan N=60. PLAN_RANKS: how many ranks, by chance.
test-plan: plan
	@$(MAKE) --no-print-directory BACKEND=cpu PRECISION=bf16 SANITIZE= BLOCK_THREADS= build/cpu-bf16/07_combined_5d
	@python3 tests/plan.py build/cpu-bf16 $(if $(filter command,$(origin N)),$(N),60) $(PLAN_RANKS)

# Fits a style of the planner to measured steps:  make calibrate SWEEP=my.csv;  STYLE=nanotron: where it begins; TO=build/style.json.
calibrate: plan
	@[ -n "$(SWEEP)" ] || { echo "calibrate: which steps? expected SWEEP=my.csv" >&2; exit 2; }
	@python3 07_combined_5d/plan/calibrate.py build/host/plan "$(SWEEP)" 07_combined_5d/plan/styles/$(or $(STYLE),nanotron).json \
	  "$(or $(TO),build/style.json)"

# Folded dry runs of 07 against whole ones;  make test-fold N=60 SEED=1. FOLD_RANKS: how many ranks, by chance.
test-fold:
	@$(MAKE) --no-print-directory BACKEND=cpu PRECISION=bf16 SANITIZE= BLOCK_THREADS= build/cpu-bf16/07_combined_5d
	@python3 tests/fold.py build/cpu-bf16 $(if $(filter command,$(origin N)),$(N),60) $(FOLD_RANKS) $(addprefix --seed ,$(SEED))

# Runs that save are killed, or asked to end, at random moments, then go on;  make test-kills N=30.
test-kills:
	@common/setup.sh
	@$(MAKE) --no-print-directory BACKEND=cpu PRECISION=fp64 SANITIZE= programs
	@tests/kills.sh build/cpu-fp64 $(if $(filter command,$(origin N)),$(N),30)

# All C++ and CUDA as .clang-format says. make format changes the files, make test-format names those that it would.
CLANG_FORMAT = git ls-files '*.cu' '*.h' '*.cc' | xargs build/python-format/bin/clang-format
format test-format:
	@common/setup.sh cpu ensurepip.py:python3-venv
	@{ $(call venv,format) } || { echo "skipped: clang-format can not be installed here"; exit 0; }; \
	$(if $(filter format,$@),$(CLANG_FORMAT) -i,$(CLANG_FORMAT) --dry-run -Werror && echo "1 passed, 0 failed")

# What clangd asks for, of this build (.clangd).
compile-commands:
	@mkdir -p build
	@$(MAKE) --no-print-directory -Bn V=1 ALONE=% all | python3 -c 'import json, os, sys; json.dump([{"directory": os.getcwd(), \
	  "command": line.strip(), "file": line.split(" -c ")[1].split()[0]} for line in sys.stdin if " -c " in line], \
	  sys.stdout, indent=1)' > build/compile_commands.json

# Random meshes, models and options of 07 against one rank;  make fuzz N=500 SEED=7. FUZZ_RANKS: how many ranks, by turns.
N ?= 100
SEED ?= 1
FUZZ_RANKS ?= 2 3 4 6 8 8 8 8
fuzz:
	@common/setup.sh
	@$(MAKE) --no-print-directory PRECISION=fp64 BACKEND=cpu build/cpu-fp64$(addprefix -,$(SANITIZE))/mpi_tests
	@tests/fuzz.sh build/cpu-fp64$(addprefix -,$(SANITIZE))/mpi_tests $(N) $(SEED) $(FUZZ_RANKS)

# Breaks the code on purpose (tests/mutants.txt) and looks whether the tests notice;  make mutants M='02-* 03-stale-prefetch'.
mutants:
	@[ -e tests/mutants.sh ] || { echo "mutants: a learner's tree has none" >&2; exit 2; }
	@+set -f; tests/mutants.sh $(M)

# Homework (tests/homework/README.md). Learners: grade, hint, races, paper, submit; teachers: the rest.
HOMEWORK := python3 tests/homework/homework.py
GIVEN = $(foreach name,ID HUNT STAGES TERM TO IN OUT GRADING PAGES,$(if $($(name)),$(name)='$($(name))'))
grade-%:
	@common/setup.sh
	@$(HOMEWORK) grade-stage $* $(GIVEN)
races-% paper-%:
	@common/setup.sh
	@$(HOMEWORK) $(firstword $(subst -, ,$@)) $* $(GIVEN)
hint-% submit-% hunt-% gradescope-%:
	@$(HOMEWORK) $(firstword $(subst -, ,$@)) $* $(GIVEN)
homework:
	@$(HOMEWORK) homework $(GIVEN)
grade:
	@common/setup.sh cpu bwrap:bubblewrap ensurepip.py:python3-venv
	@$(if $(PAGES),$(call venv,report))
	@$(HOMEWORK) grade $(GIVEN)
# A group's hour on a node (tests/homework/course.md): its layouts, run, and a page about them;  make hour GROUP=a
# LAYOUTS=a.txt. Without a GPU it is a rehearsal in virtual time, for the same page.
hour:
	@[ -n "$(GROUP)" ] && [ -f "$(LAYOUTS)" ] || { echo "hour: whose, and which layouts? expected a name and a file, as in \
make hour GROUP=a LAYOUTS=a.txt" >&2; exit 2; }
	@common/setup.sh $(BACKEND)
	@$(MAKE) --no-print-directory PRECISION=bf16 SANITIZE= BLOCK_THREADS= build/$(BACKEND)-bf16$(filter -mpi,$(SUFFIX))/07_combined_5d
	@tests/homework/hour.sh "build/hour-$(GROUP)" "$(LAYOUTS)" build/$(BACKEND)-bf16$(filter -mpi,$(SUFFIX))/07_combined_5d $(RANKS) \
	  $(if $(filter cpu,$(BACKEND)),--dry-run)
	@$(MAKE) --no-print-directory report RUNS="build/hour-$(GROUP)" REPORT="build/hour-$(GROUP)/report.html"
fingerprints:
	@set -f; $(HOMEWORK) fingerprints $(M)
homework-check:
	@common/setup.sh cpu bwrap:bubblewrap ensurepip.py:python3-venv
	@$(call venv,report)
	@$(HOMEWORK) check $(PART)

# Speed of the kernels, of attention and of a training step, beside what the device can do; then where a step's time
# goes (events around every kernel cost a little), and the collectives.
bench: programs $(BUILD)/bench
	$(BUILD)/bench
	$(BUILD)/bench profile > $(BUILD)/gpu.json  # for --gpu of a CPU build
	$(BUILD)/01_single_gpu --layers 8 --d-model 512 --heads 8 --kv-heads 8 --d-ff 1536 --seq-len 256 \
	  --micro-batch-size 4 --global-batch-size 4 --log-every 1 --steps 3 --profile $(ARGS)
	[ $(RANKS) -lt 2 ] || mpirun -n $(RANKS) $(BUILD)/collectives

# Everything that only a GPU can tell, in one report: builds, then measures for nine minutes at most.
gpu-check:
	$(if $(and $(NVCC),$(GPU_ARCH)),,$(error gpu-check needs nvcc and a GPU, and here is $(if $(NVCC),no GPU,no nvcc)))
	@NVCC='$(NVCC)' tests/gpu_check.sh build/gpu-report.txt

# What gpu-check needs on a machine that reaches no network, in one archive.
gpu-bundle:
	@tests/gpu_bundle.sh build/pentatron-gpu.tar.gz

clean:
	rm -rf build

help:
	@echo "make               build all programs and tests"
	@echo "make run           install what is missing, build, train the tiny model on real text in every way; one table"
	@echo "                   RANKS=8  RUN_STEPS=10  ARGS='--lr 1e-3 ...'  ONLY='01 05-%'"
	@echo "make tour          a first hour, in the terminal: ten steps;  test-tour: the same without one;  test-questions: the notes' numbers"
	@echo "make setup         install what is missing, for this BACKEND"
	@echo "make diff-03       what stage 03 adds: main.cu, the seam, the rest;  make diff A=02 B=experts: main.cu of any two"
	@echo "make lessons       what each technique buys and costs at a real size;  GPU=h100 W='pipeline': those whose sentence has it"
	@echo "make test          install what is missing, build, run every test;  make test-01: one stage's, in fp64"
	@echo "make test-hosts    as root: 02 and 07 over two hosts, made of namespaces; a cut network, killed ranks"
	@echo "make test-slurm    as root: 07 under a real Slurm of two such hosts: requeued, a node down, its time over"
	@echo "make check T=NAME  the tests of this name, wherever they are;  RANKS=4: those of several ranks on so many"
	@echo "make sanitize      every test under AddressSanitizer, UBSan, ThreadSanitizer: hours;  S=thread P=fp64: a part"
	@echo "make mutants       break the code in many small ways; does a test notice each?  M='02-*': only these"
	@echo "make grade-03      what you have written of stage 03: points, and what is wrong;  hint-03.2 races-03 paper-03 submit-03"
	@echo "make published     runs of others on up to 16,384 GPUs, and what a dry run of them says;  W='Llama'"
	@echo "make homework      a starter tree:  STAGES=03 TERM=2027s TO=../hw03;  hunt-03 ID=you: three mistakes to find"
	@echo "make grade         grade many:  IN=submissions/ OUT=grades.csv TERM=2027s, for Canvas and Moodle, too;  PAGES=FOLDER: a page for each"
	@echo "                   GRADING=FILE: weights, late days, dropped stages;  gradescope-03: the zip of an autograder"
	@echo "make hour          a group's layouts on a node's GPUs, and a page about them:  GROUP=a LAYOUTS=a.txt"
	@echo "make homework-check  does the homework keep its promises?  PART=quick, or a part of tests/homework/check.py"
	@echo "make tokens        tokens.bin and tokenizer.json of a text:  TEXT=FILE VOCAB=4096, or TOKENIZER=FILE; TO=FOLDER"
	@echo "make test-hf       against Hugging Face's transformers;  make test-kills: runs killed or asked to end"
	@echo "make plan          build/host/plan: the fastest layout of a run that fits, without a GPU;  --help lists its options"
	@echo "make calibrate     a style of the planner, fitted to measured steps:  SWEEP=my.csv"
	@echo "make test-plan     the planner against dry runs of 07;  N=60.  make test-fold: folded dry runs against whole ones;  N=60"
	@echo "make report        build/report.html: losses, memory, timelines of the runs of make run, or of RUNS='a.json b.json'"
	@echo "                   PLAN='--config config.json --tokens 2T --price 2.5': what its calculator and its heatmap are about"
	@echo "make book          the notes as a book, with figures and search: build/book/index.html;  make test-book: in a browser"
	@echo "make sweep         the planner's ten fastest layouts, run:  GPUS=8 MODEL=smollm-1.7b;  make test-report: in a browser"
	@echo "make fuzz          random meshes, models and options of 07 against one rank;  N=100 SEED=1"
	@echo "make bench         the speed of each kernel, of attention, of a training step"
	@echo "make gpu-check     on a GPU: build, test, look for races, measure; one report, nine minutes after the build"
	@echo "make gpu-bundle    pack what gpu-check needs on a machine without network: this tree, MPICH, headers"
	@echo "make format        clang-format over all sources;  make compile-commands: build/compile_commands.json, for clangd"
	@echo "make clean         remove build/"
	@echo "BACKEND=cpu|cuda  PRECISION=fp32|fp64|bf16|fp16|fp8  SANITIZE=thread|address  V=1    (here: $(BUILD))"
