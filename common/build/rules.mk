# How a program is built: the packages, the flags, the sources, one rule to compile and one to link.
# ---- Packages --------------------------------------------------------------------------------------------------------
# PACKAGE_HEADERS and PACKAGE_LIBRARIES are folders that the compilers do not search by themselves, with colons between.
$(foreach word,$(shell CXX='$(CXX)' common/build/packages.sh $(if $(filter cuda,$(BACKEND)),$(NVCC))),$(eval $(word)))
# Programs need no Catch2, and with NCCL over MPI no NCCL.
LACKING := $(filter-out $(NCCL:mpi=NCCL) $(if $(filter all,$(GOALS)),,Catch2),$(subst :, ,$(PACKAGES_MISSING)))
$(if $(and $(filter all programs,$(GOALS)),$(LACKING)),$(error missing: $(LACKING); \
  make setup BACKEND=$(BACKEND) installs what is missing))
HEADERS := $(subst :, ,$(PACKAGE_HEADERS))
# The libraries in .mpich look for others there.
PACKAGE_LINK := $(foreach folder,$(subst :, ,$(PACKAGE_LIBRARIES)),-L$(folder) -Xlinker -rpath -Xlinker $(folder)) \
  $(if $(findstring /.mpich/,$(PACKAGE_LIBRARIES)),-Xlinker --disable-new-dtags)
CATCH2 := $(if $(wildcard $(addsuffix /catch2/catch_all.hpp,/usr/include /usr/local/include $(HEADERS))),-lCatch2)
# Debian keeps OpenBLAS's OpenMP variant in a folder of its own. It is opened by name when a program starts
# (common/cpu/cuda/cublas.cc); the sanitizers, too, look for it where -rpath says.
MULTIARCH := $(shell $(CXX) -print-multiarch)
OPENBLAS := $(wildcard /usr/lib/$(MULTIARCH)/openblas-openmp)
export PATH := $(CURDIR)/build/packages/bin:$(PATH)
# MPICH's processes would wait for each other at the start in a loop that yields to none: if they are more than the
# cores, that costs more than a short run. Nor need each read the settings of all PCI devices, a fifth of its start.
export MPIR_CVAR_NOLOCAL ?= 1
export HWLOC_COMPONENTS ?= -linuxio

# ---- Flags -----------------------------------------------------------------------------------------------------------
# What each word of a configuration's name means to the compiler.
INCLUDES := -I. -Icommon -Itests $(addprefix -isystem ,$(HEADERS))
CCACHE := $(and $(shell command -v ccache),ccache)
FLAGS_cpu := $(CCACHE) $(CXX) -std=c++20 -g1 -Wall -Wextra -Wno-unknown-pragmas $(INCLUDES) -DCUDA_CPU \
  -Icommon/cpu/cuda -Icommon/cpu/nccl $(OPENBLAS:/usr/lib/%=-I/usr/include/%)
# sm_90a has what only Hopper has. Without a GPU here, sm_90 runs on Hopper and on later ones.
CUDA_ARCH := -arch=sm_$(or $(patsubst 90,90a,$(GPU_ARCH)),90)
FLAGS_cuda := $(NVCC) -std=c++20 $(CUDA_ARCH) --expt-relaxed-constexpr -lineinfo -Xcompiler -Wall,-Wextra $(INCLUDES)
FLAGS_mpi := -Icommon/cpu/nccl
FLAGS_fp64 := -DPRECISION=64
FLAGS_fp32 := -DPRECISION=32
FLAGS_bf16 := -DPRECISION=16
FLAGS_fp16 := -DPRECISION=16 -DREAL_IS_HALF
FLAGS_fp8 := -DPRECISION=16 -DPRODUCTS_IN_FP8
# GCC, when it instruments the standard library, believes to see uninitialised variables there.
FLAGS_thread := -fsanitize=thread -fno-sanitize-recover=all -Wno-maybe-uninitialized
FLAGS_address := -fsanitize=address,undefined -fno-sanitize-recover=all -Wno-maybe-uninitialized
$(foreach n,4 $(BLOCK_THREADS),$(eval FLAGS_block$(n) := -DCUDA_CPU_THREADS_PER_BLOCK=$(n)))
flags = $(foreach word,$(words),$(FLAGS_$(word)))

# What depends on the source, $<. Kernels, what carries them out, and the search for layouts are to be fast; all else is
# to be compiled quickly: -Og takes a fifth less time than -O1. Sums of a .cu file may be reordered, so that they
# vectorise; NaN and infinity keep their meaning.
FAST := common/kernels/% common/tensor_cores/% common/cpu/% build/batches/fast_% tests/cpu/test_% tests/tools/% \
  07_combined_5d/plan/plan.cu
VECTORS := -march=native -fopenmp-simd -fno-math-errno -fassociative-math -fno-signed-zeros -fno-trapping-math
# What has kernels is CUDA; all else is C++, which nvcc compiles in half the time.
KERNELS := $(shell grep -l '__global__' -r common tests $(wildcard 0*) --include=*.cu)
SLOW := tests/main.cc tests/test_%.cc build/batches/tests-%.cc
OPTIONS_cpu = -x c++ $(if $(filter $(FAST),$<),-O3,$(if $(filter $(SLOW),$<),-O0,-Og)) \
  $(if $(filter %.cu common/cpu/% build/batches/fast_% tests/cpu/%,$<),$(VECTORS))
OPTIONS_cuda = $(if $(filter $(FAST),$<),-O3,-O1) -x $(if $(filter $(KERNELS),$<),cu,c++)
# What CI adds changes no object file, and so compiles nothing again. g++ looks for garbage later, which takes 8 % off
# its time, for a quarter more memory.
STRICT_cpu := $(if $(WERROR),-Werror --param=ggc-min-heapsize=2000000)
STRICT_cuda := $(if $(WERROR),-Werror all-warnings -Xcompiler -Werror -Xcompiler --param=ggc-min-heapsize=2000000)
LINK_cpu := $(CXX) -pthread -rdynamic $(PACKAGE_LINK)
LINK_cuda := $(NVCC) $(CUDA_ARCH) -Xcompiler -rdynamic $(PACKAGE_LINK)
LIBRARIES_cpu := $(OPENBLAS:%=-Wl,--disable-new-dtags,-rpath,%) -ldl -lz $(if $(filter x86_64%,$(MULTIARCH)),-lmvec)
LIBRARIES_cuda := -lcublas -lcublasLt -lz
LIBRARIES_of_mpi = $(if $(filter cpu mpi,$(words)),,-lnccl) -lmpich

# ---- Sources ---------------------------------------------------------------------------------------------------------
# A .cu file is compiled for each configuration. A .cc file knows no precision, and is compiled once for all.
objects = $(patsubst %,build/$(shared)/objects/%.o,$(filter %.cc,$(2))) \
  $(patsubst %,build/$(1)/objects/%.o,$(filter %.cu,$(2)))
# What runs on several ranks, needs MPI and NCCL: everything but 01 and the tools.
ONE_RANK := 01_single_gpu bench logits tests tests-% tsan_cases
PARALLEL := $(wildcard common/ranks/*.cu common/watchdog/*.cu) \
  $(filter-out $(MAINS),$(wildcard 0*/*.cu 0*/workbench/*.cu))

# A batch is one file that includes several, because most of the time goes into their headers. Kernels are compiled one
# by one, and what g++ would warn of in a batch.
BATCH_common.cc := $(wildcard common/*/*.cc)
BATCH_workbench.cc := $(wildcard 0*/workbench/*.cc)
BATCH_common.cu := $(filter-out $(PARALLEL) $(KERNELS),$(wildcard common/*/*.cu))
BATCH_parallel.cu := $(PARALLEL)
BATCH_fast_cuda.cc := $(filter-out %/cuda_stream.cc,$(wildcard common/cpu/cuda/*.cc))
BATCH_fast_nccl.cc := $(filter-out %/device_access_cpu.cc,$(wildcard common/cpu/nccl/*.cc))
build/batches/%: FORCE
	@mkdir -p $(@D); new=$@.$$$$; printf '#include "%s"\n' $(BATCH_$*) > $$new; cmp -s $$new $@ && rm $$new || mv $$new $@
# The commit is part of each program; it is looked up each time, and compiled when it has changed.
build/version.cc: FORCE
	@mkdir -p $(@D); commit=$$(git describe --always --dirty 2> /dev/null || echo unknown); new=$@.$$$$; \
	  printf '#include "options/command_line.h"\nstd::string pentatron::version() { return "pentatron 1.0, commit %s"; }\n' \
	  "$$commit" > $$new; cmp -s $$new $@ && rm $$new || mv $$new $@
COMMON := build/version.cc build/batches/common.cc build/batches/workbench.cc build/batches/common.cu \
  $(filter common/%,$(filter-out common/cpu/%,$(KERNELS)))
STANDINS_cpu := build/batches/fast_cuda.cc common/cpu/cuda/cuda_stream.cc
NCCL_cpu := build/batches/fast_nccl.cc common/cpu/nccl/device_access_cpu.cc
NCCL_mpi := build/batches/fast_nccl.cc common/cpu/nccl/device_access_cuda.cu
# $(call needs,CONFIGURATION,PROGRAM): what a program needs beside its own sources.
needs = $(COMMON) $(STANDINS_$(backend)) \
  $(if $(filter $(ONE_RANK),$(2)),,build/batches/parallel.cu $(foreach word,$(words),$(NCCL_$(word))))

# ---- The rules -------------------------------------------------------------------------------------------------------
# $(call compile,FOLDER): its objects. The command is noted; when it changes, all in the folder are made again.
define compile
build/$(1)/objects/%.o: % build/$(1)/objects/flags
	@mkdir -p $$(@D); echo "compile  $$<  ($(1))"
	$(Q)$(flags) $(STRICT_$(backend)) $$(OPTIONS_$(backend)) -MMD -MP -c $$< -o $$@
build/$(1)/objects/flags: FORCE
	@mkdir -p $$(@D); echo '$(flags)' | cmp -s - $$@ || echo '$(flags)' > $$@
endef
# $(call link,CONFIGURATION,PROGRAM,OBJECTS): a program of these objects.
define link
build/$(1)/$(2): $(3)
	@mkdir -p $$(@D); echo "link     $$@"
	$(Q)$(LINK_$(backend)) $(filter -fsanitize%,$(flags)) -o $$@ $$(filter %.o,$$^) $(LIBRARIES_$(backend)) \
	  $(if $(filter $(ONE_RANK),$(2)),,$(LIBRARIES_of_mpi)) $(if $(findstring tests,$(2)),$(CATCH2))
endef
# $(call configuration,NAME): all programs of one; tests.mk adds those that test.
define configuration
$(foreach main,$(MAINS),$(eval $(call link,$(1),$(call name_of,$(main)),\
  $(call objects,$(1),$(main) $(call needs,$(1),$(call name_of,$(main)))))))
endef
.SECONDARY .DELETE_ON_ERROR .SECONDEXPANSION:
FOLDERS_OF_OBJECTS := $(sort $(CONFIGURATIONS) $(foreach c,$(CONFIGURATIONS),$(call shared,$(c))))
$(foreach folder,$(FOLDERS_OF_OBJECTS),$(eval $(call compile,$(folder))))
$(foreach c,$(CONFIGURATIONS),$(eval $(call configuration,$(c))))
-include $(shell find $(wildcard build/c*/objects) -name '*.d')
