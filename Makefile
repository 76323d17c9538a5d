# "make help" lists the targets. BACKEND=cpu|cuda, PRECISION=fp32|fp64|bf16 and SANITIZE=thread|address choose what is
# built; each choice has a folder of its own under build/. V=1 shows the commands.

# With a GPU, nvcc compiles the sources; without one, g++ compiles the same sources against the headers in common/cpu.
NVCC := $(or $(shell command -v nvcc),$(wildcard /usr/local/cuda/bin/nvcc))
GPU_ARCH := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | tr -d .)
BACKEND ?= $(if $(and $(NVCC),$(GPU_ARCH)),cuda,cpu)
PRECISION ?= fp32
SANITIZE ?=
TEST_PRECISIONS ?= $(if $(SANITIZE),fp32,fp32 fp64 bf16)

# $(call check,NAME,valid values): an unknown value ends make with one line.
check = $(if $(filter-out $(2),$($(1))),$(error $(1): $($(1)) is not valid; expected $(2)))
$(call check,BACKEND,cpu cuda)
$(call check,PRECISION,fp32 fp64 bf16)
$(call check,SANITIZE,$(if $(filter cpu,$(BACKEND)),thread address,nothing with BACKEND=cuda))

ifeq ($(MAKELEVEL)$(filter -j%,$(MAKEFLAGS)),0)
  MAKEFLAGS += -j$(shell nproc)
endif
Q := $(if $(filter 1,$(V)),,@)
comma := ,

# ---- Sources ---------------------------------------------------------------------------------------------------------
# A .cc file knows neither CUDA nor the precision (those in common/cpu excepted): it is compiled once for all builds,
# and its test runs in the fp32 build only. A .cu file is compiled for each build.
BUILD := build/$(BACKEND)-$(PRECISION)$(addprefix -,$(SANITIZE))
HOST := build/host$(addprefix -,$(SANITIZE))
PROGRAMS := $(patsubst %/main.cu,%,$(wildcard [0-9][0-9]_*/main.cu))
COMMON := $(patsubst %,$(HOST)/%.o,$(wildcard common/*.cc)) $(patsubst %,$(BUILD)/objects/%.o,$(wildcard common/*.cu))
ifeq ($(BACKEND),cpu)
  COMMON += $(patsubst %,$(BUILD)/objects/%.o,$(wildcard common/cpu/*.cc))
endif
TESTS := $(HOST)/tests/main.cc.o $(patsubst %,$(BUILD)/objects/%.o,$(wildcard tests/test_*.cu))
ifeq ($(PRECISION),fp32)
  TESTS += $(patsubst %,$(HOST)/%.o,$(wildcard tests/test_*.cc))
endif

# ---- Flags -----------------------------------------------------------------------------------------------------------
# (GCC sees uninitialised variables in the standard library when it instruments it.)
SANITIZER := $(if $(SANITIZE),-fsanitize=$(SANITIZE:address=address$(comma)alignment) -fno-sanitize-recover=all -Wno-maybe-uninitialized)
DEFINES := -DPENTATRON_CORPUS=\"$(CURDIR)/common/corpus.txt\" -DPENTATRON_TESTS=\"$(CURDIR)/tests\"
PRECISION_DEFINE := -DPRECISION=$(patsubst bf%,%,$(patsubst fp%,%,$(PRECISION)))
HOST_FLAGS := -std=c++20 -g1 -Wall -Wextra $(if $(WERROR),-Werror) $(SANITIZER) -Icommon $(DEFINES)

# Debian keeps OpenBLAS's OpenMP variant, which shares its threads with the kernels, in a folder of its own.
MULTIARCH := $(shell $(CXX) -print-multiarch)
OPENBLAS := $(wildcard /usr/lib/$(MULTIARCH)/openblas-openmp)
# Sums may be reordered, so that they vectorise; NaN and infinity keep their meaning.
CPU_FLAGS := $(HOST_FLAGS) -march=native -fopenmp -fno-math-errno -fassociative-math -fno-signed-zeros \
  -fno-trapping-math -Icommon/cpu $(OPENBLAS:/usr/lib/%=-I/usr/include/%) $(PRECISION_DEFINE)
CPU_LIBRARIES := $(addprefix -L,$(OPENBLAS)) $(addprefix -Wl$(comma)-rpath$(comma),$(OPENBLAS)) -lopenblas $(if $(filter x86_64%,$(MULTIARCH)),-lmvec)

CUDA_ARCH := -arch=sm_$(or $(GPU_ARCH),90)
CUDA_FLAGS := -std=c++20 $(CUDA_ARCH) --expt-relaxed-constexpr -lineinfo -Werror all-warnings -Xcompiler -Wall,-Wextra,-Werror,-fopenmp \
  -Icommon $(DEFINES) $(PRECISION_DEFINE)
CUDA_LIBRARIES := -lcublas

ifeq ($(BACKEND),cpu)
  COMPILE := $(CXX) $(CPU_FLAGS)
  CU := -x c++
  LINK := $(CXX) $(SANITIZER) -fopenmp -rdynamic
  LIBRARIES := $(CPU_LIBRARIES)
else
  COMPILE := $(NVCC) $(CUDA_FLAGS)
  CU := -x cu
  LINK := $(NVCC) $(CUDA_ARCH) -Xcompiler -fopenmp,-rdynamic
  LIBRARIES := $(CUDA_LIBRARIES)
endif
TEST_LIBRARIES := $(if $(wildcard $(addsuffix /catch2/catch_all.hpp,/usr/include /usr/local/include)),-lCatch2)

# ---- Building --------------------------------------------------------------------------------------------------------
.PHONY: all programs run test bench clean help FORCE
.SECONDARY:
.DELETE_ON_ERROR:

all: programs $(BUILD)/tests
programs: $(PROGRAMS:%=$(BUILD)/%)

$(PROGRAMS:%=$(BUILD)/%): $(BUILD)/%: $(BUILD)/objects/%/main.cu.o $(COMMON)
$(BUILD)/tests: $(TESTS) $(COMMON)
$(BUILD)/tests: LIBRARIES += $(TEST_LIBRARIES)
$(PROGRAMS:%=$(BUILD)/%) $(BUILD)/tests:
	@mkdir -p $(@D); echo "link     $@"
	$(Q)$(LINK) -o $@ $(filter %.o,$^) $(LIBRARIES)

# Tests are compiled quickly rather than made fast.
OPTIMIZE = $(if $(filter tests/%,$<),-O1,-O3)

$(HOST)/%.cc.o: %.cc $(HOST)/flags
	@mkdir -p $(@D); echo "compile  $<"
	$(Q)$(CXX) $(HOST_FLAGS) $(OPTIMIZE) -MMD -MP -c $< -o $@

$(BUILD)/objects/%.cc.o: %.cc $(BUILD)/flags
	@mkdir -p $(@D); echo "compile  $<  ($(BUILD:build/%=%))"
	$(Q)$(COMPILE) $(OPTIMIZE) -MMD -MP -c $< -o $@

$(BUILD)/objects/%.cu.o: %.cu $(BUILD)/flags
	@mkdir -p $(@D); echo "compile  $<  ($(BUILD:build/%=%))"
	$(Q)$(COMPILE) $(OPTIMIZE) -MMD -MP $(CU) -c $< -o $@

# The commands that a folder was built with. When they change, everything in it is compiled again.
$(HOST)/flags: COMMANDS = $(CXX) $(HOST_FLAGS)
$(BUILD)/flags: COMMANDS = $(COMPILE) $(LINK) $(LIBRARIES)
$(HOST)/flags $(BUILD)/flags: FORCE
	@mkdir -p $(@D); echo '$(COMMANDS)' | cmp -s - $@ || echo '$(COMMANDS)' > $@

-include $(patsubst %.o,%.d,$(COMMON) $(TESTS) $(PROGRAMS:%=$(BUILD)/objects/%/main.cu.o))

# ---- Running ---------------------------------------------------------------------------------------------------------
run:
	@common/setup.sh
	@$(MAKE) --no-print-directory programs
	$(BUILD)/01_single_gpu --sample 400 $(ARGS)

# Every test, in each precision; make test-01 only those with the tag [01].
test:
	@common/setup.sh
	@for p in $(TEST_PRECISIONS); do $(MAKE) --no-print-directory PRECISION=$$p all || exit 1; done
	@tests/run.sh '$(FILTER)' $(foreach p,$(TEST_PRECISIONS),$(BUILD:build/$(BACKEND)-$(PRECISION)%=build/$(BACKEND)-$p%))

test-%:
	@$(MAKE) --no-print-directory test FILTER='[$*]'

bench: programs
	$(BUILD)/01_single_gpu --layers 8 --d-model 512 --heads 8 --d-ff 1536 --seq-len 256 --micro-batch-size 4 \
	  --global-batch-size 4 --steps 10 --log-every 1 $(ARGS)

clean:
	rm -rf build

help:
	@echo "make               build all programs and tests"
	@echo "make run           install what is missing, build, train the tiny model on real text; ARGS='--steps 50 ...'"
	@echo "make test          install what is missing, build, run every test;  make test-01: one stage's"
	@echo "make bench         the speed of one training step"
	@echo "make clean         remove build/"
	@echo "BACKEND=cpu|cuda  PRECISION=fp32|fp64|bf16  SANITIZE=thread|address  V=1    (here: $(BUILD))"
