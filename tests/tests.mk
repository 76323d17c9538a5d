# Tests, checks and homework.
# ---- Where a test runs -----------------------------------------------------------------------------------------------
# A .cu file of tests says on one of its first lines in which precisions it runs. ALL has words: test_fp8.cu:bf16.
# A .cc file knows no precision, and runs in fp32.
ALL := $(shell awk '/^.. precisions: / { for (i = 3; i <= NF; ++i) print FILENAME ":" $$i }' tests/*.cu tests/mpi/*.cu)
# $(call runs_in,CONFIGURATION): files. A sanitizer's fp32 has those of fp64, too. Without NCCL over MPI there are no
# tests of it, and the planner does not know its times. A GPU has no stand-ins.
also_fp64 = $(if $(filter fp32,$(words)),$(if $(filter thread address,$(words)),fp64))
runs_in = $(filter-out $(if $(filter cpu mpi,$(words)),,tests/mpi/test_nccl_% tests/mpi/test_plan.cu),\
  $(sort $(foreach p,$(words) $(also_fp64),$(patsubst %:$(p),%,$(filter %:$(p),$(ALL))))))
several = $(filter tests/mpi/%,$(runs_in))
one_process = $(filter-out tests/mpi/%,$(runs_in))
any_precision = $(wildcard tests/test_*.cc $(if $(filter cpu,$(words)),tests/cpu/test_*.cc))
# $(call tagged,TAG,FILES): those with a test of this tag, for tests-05, or that of this name, for tests-test_parity.
tagged = $(or $(filter %/$(1).cc %/$(1).cu,$(2)),$(shell grep -l '\[$(1)\]' $(2) /dev/null))

# $(call tests,CONFIGURATION): its programs of tests. tsan_cases has each race that ThreadSanitizer must see in a use of
# the stand-ins, and its correct twin.
# Batches, as in rules.mk, halve the work; the programs of a tag have their files one by one.
ALONE := $(KERNELS) tests/cpu/% tests/mpi/test_nccl_% %_hangs.cu tests/test_schedule.cc
batch = $(if $(2),$(eval BATCH_$(1) := $(2))build/batches/$(1))
batched = $(filter $(ALONE),$(2)) $(foreach kind,cc cu,$(call batch,$(3)-$(1).$(kind),$(filter-out \
  $(ALONE),$(filter %.$(kind),$(2)))))
RUN_ONE = tests/main.cc tests/one_process.cc $(call needs,$(1),tests)
RUN_SEVERAL = tests/main.cc tests/mpi/ranks.cc $(call needs,$(1),mpi_tests)
CASES := $(wildcard common/*/device_profile.cc common/*/mapped_file.cc common/*/errors.cc) $(STANDINS_cpu)
define tests
$(call link,$(1),tests,$(call objects,$(1),$(RUN_ONE) \
  $(call batched,$(1),$(one_process) $(if $(filter fp32,$(words)),$(any_precision)),tests)))
$(call link,$(1),mpi_tests,$(call objects,$(1),$(RUN_SEVERAL) $(call batched,$(1),$(several),mpi)))
$(call link,$(1),tests-%,$(call objects,$(1),$(RUN_ONE)) \
  $$$$(call objects,$(1),$$$$(call tagged,$$$$*,$(one_process) $(any_precision))))
$(call link,$(1),mpi_tests-%,$(call objects,$(1),$(RUN_SEVERAL) $(filter %_model.cu %_hangs.cu,$(several))) \
  $$$$(call objects,$(1),$$$$(call tagged,$$$$*,$(several))))
$(call link,$(1),homework_tests-%,$(call objects,$(1),$(RUN_SEVERAL)) build/$(1)/objects/tests/homework/probes/%.cu.o)
$(call link,$(1),tsan_cases,$(call objects,$(1),tests/cpu/tsan_cases.cc $(CASES)))
$(call link,$(1),nccl_tsan_cases,$(call objects,$(1),tests/cpu/nccl_tsan_cases.cc $(CASES) $(NCCL_cpu)))
endef
$(foreach c,$(CONFIGURATIONS),$(eval $(call tests,$(c))))

# ---- Change -----------------------------------------------------------------------------------------------------------
# In fp32 and fp64 tests start programs, in bf16 and fp8 lessons do. Of fp32 on a CPU the tests of kernels are built for
# blocks of four threads, too: all else is the same there.
TEST_PRECISIONS ?= $(if $(SANITIZE),fp32,fp32 fp64 bf16 fp16 fp8)
FOLDERS := $(TEST_PRECISIONS:%=build/$(BACKEND)-%$(SUFFIX))
IN_BLOCKS := $(patsubst build/cpu-fp32%,build/cpu-fp32-block4%,$(filter build/cpu-fp32 build/cpu-fp32-thread,$(FOLDERS)))
RACES := build/cpu-fp32-thread/tsan_cases build/cpu-fp32-thread/nccl_tsan_cases build/cpu-fp32-block4-thread/tsan_cases
TESTED := $(FOLDERS:%=%/tests) $(FOLDERS:%=%/mpi_tests) $(IN_BLOCKS:%=%/tests-kernels) \
  $(if $(filter cpu,$(BACKEND)),$(RACES)) \
  $(foreach folder,$(filter build/$(BACKEND)-fp32% build/$(BACKEND)-fp64%,$(FOLDERS)),$(PROGRAMS:%=$(folder)/%)) \
  $(patsubst %,%/07_combined_5d,$(filter build/cpu-bf16 build/cpu-fp8,$(FOLDERS)))
test: ## every test, of each precision;  T='part of a name' RANKS=4: those of this name, wherever they are
test: $(if $(T),,$(TESTED))
	@$(if $(T),$(MAKES)tests/check.sh "$(T)" $(if $(filter command,$(origin RANKS)),$(RANKS)),\
	  tests/run.sh '' $(FOLDERS) $(IN_BLOCKS))

# $(call of_tag,TAG): the programs of these tests, in fp64, and those that they start: of a stage its own and 01.
FP64 := build/$(BACKEND)-fp64$(SUFFIX)
stage = $(filter $(PROGRAMS),$(foreach main,$(filter $(1)_%,$(MAINS)),$(call name_of,$(main))))
of_tag = $(addprefix $(FP64)/,tests-$(1) mpi_tests-$(1) $(sort 01_single_gpu $(or $(stage),$(PROGRAMS)))) \
  $(if $(shell grep -lF '[$(1)]' tests/test_*.c[cu] tests/*/test_*.c[cu]),,$(error test-$(1): no test has this tag; \
    expected 01 to 07, or another word in brackets behind the name of a test))
test-%: $$(call of_tag,$$*) ## the tests of stage 03 in fp64, or of another tag
	@tests/run.sh '[$*]' $(FP64)
sanitize: #: every test under AddressSanitizer, UBSan, ThreadSanitizer: hours;  S=thread P=fp64: a part
	@$(MAKES)tests/sanitize.sh "$(or $(S),address thread)" "$(or $(P),$(PRECISIONS))"
fuzz: #: random meshes, models, options of 07 against one rank;  N=100 SEED=1 FUZZ_RANKS='2 4 8', by turns
fuzz: build/cpu-fp64$(addprefix -,$(SANITIZE))/mpi_tests
	@tests/fuzz.sh $< $(or $(N),100) $(or $(SEED),1) $(or $(FUZZ_RANKS),2 3 4 6 8 8 8 8)
test-plan: #: the planner against dry runs of 07;  make test-fold: folded dry runs against whole ones;  N=60
test-plan: plan build/cpu-bf16/07_combined_5d
	@python3 tests/plan.py build/cpu-bf16 40 $(PLAN_RANKS)
test-fold: build/cpu-bf16/07_combined_5d
	@python3 tests/fold.py build/cpu-bf16 $(or $(N),60) $(FOLD_RANKS) $(addprefix --seed ,$(SEED))
test-kills: #: runs that save are killed, or asked to end, at random moments, then go on;  N=30
test-kills: $(PROGRAMS:%=build/cpu-fp64/%)
	@tests/kills.sh build/cpu-fp64 $(or $(N),30)
test-hosts: #: as root: 02 and 07 over two hosts, which are namespaces of this one; a cut network, killed ranks
test-hosts: $(PROGRAMS:%=build/cpu-fp32$(addprefix -,$(SANITIZE))/%)
	@tests/hosts.sh $(<D)
test-slurm: #: as root: job.sh of common/cluster.md under a real Slurm of two such hosts: requeued, a node down, its time over
test-slurm: build/cpu-fp64/07_combined_5d
	@tests/slurm.sh $(<D)
test-hf: #: against Hugging Face's transformers: their models here, ours there
test-hf: $(foreach p,fp32 fp64,$(addprefix build/cpu-$(p)/,$(PROGRAMS) logits))
	@tests/hugging_face.sh build
test-report: #: the page in a browser without a window
test-report: $(PROGRAMS:%=build/cpu-fp32/%) $(OF_REPORT) build/host/plan build/python-browser/ready
	@tests/report.sh
test-questions: #: the notes' numbers are what the commands print that they name;  make notes-slow: those of minutes
test-questions notes-slow: $(foreach p,fp32 bf16,$(PROGRAMS:%=build/cpu-$(p)/%)) build/cpu-bf16/plan build/cpu-fp8/07_combined_5d
	@python3 tests/questions.py $(if $(filter notes-slow,$@),--slow) $$(git ls-files '*.md')
gpu-check: #: on a GPU: build, test, look for races, measure; a report, 9 minutes after the build:  REPORT=PATH
	@NVCC='$(NVCC)' tests/gpu_check.sh "$(if $(filter command,$(origin REPORT)),$(REPORT),build/gpu-report.txt)"
gpu-bundle: #: pack what gpu-check needs on a machine without network: this tree, MPICH, headers, programs
	@tests/gpu_bundle.sh build/pentatron-gpu.tar.gz
format: ## format C++ and CUDA, Python, shell;  make test-format: what that would change
format test-format:
	@common/build/format.sh $(if $(filter test-format,$@),--check)
clangd: #: compile_flags.txt: what clangd asks for, of this build
	@printf '%s\n' -xc++ $(filter-out %ccache $(CXX) $(NVCC),$(call flags,$(notdir $(BUILD)))) > compile_flags.txt

# ---- Teach --------------------------------------------------------------------------------------------------------
HOMEWORK = python3 tests/homework/homework.py
# What the command line says; a variable of the shell, or of this Makefile, is none of it.
GIVEN = $(foreach name,ID HUNT LEVEL STAGES EXERCISES COURSE TO IN OUT ROSTER PAGES,$(if $(filter command,\
  $(origin $(name))),$(name)='$(call quoted,$($(name)))'))
grade-%: ## what you wrote of stage 03: points, and what is wrong;  hint-03.2  races-03  paper-03  submit-03
	@$(HOMEWORK) grade-stage $* $(GIVEN)
races-% paper-% hint-% submit-%:
	@$(HOMEWORK) $(firstword $(subst -, ,$@)) $* $(GIVEN)

# ---- In the reference alone: starter.py leaves this out of a learner's tree ------------------------------------------
homework: ## a starter tree:  STAGES=03 or EXERCISES=03.1,03.3 COURSE=2027s TO=../hw03
	@$(HOMEWORK) homework $(GIVEN)
hunt-%: #: a finished stage with three mistakes to find:  ID=you
	@$(HOMEWORK) hunt $* $(GIVEN)
exam: #: the exam, on paper;  make exam-answers: the same with answers;  COURSE=2027s
exam exam-answers:
	@$(HOMEWORK) $@ $(GIVEN)
course-hours: #: how long exercises take, as computed, and beside it what classes said;  IN=hours/
	@$(HOMEWORK) course-hours $(GIVEN)
grade: ## grade many:  IN=submissions/ OUT=grades.csv COURSE=2027s EXERCISES=03.1,paper ROSTER=FILE PAGES=TO
grade: build/homework/no_programs.so $(if $(PAGES),build/python-report/ready)
	@common/build/setup.sh cpu bwrap:bubblewrap && $(HOMEWORK) grade $(GIVEN)
homework-check: #: does the homework keep its promises?  PART=quick, or a part of tests/homework/check.py
homework-check: build/homework/no_programs.so build/python-report/ready
	@common/build/setup.sh cpu bwrap:bubblewrap && $(HOMEWORK) check $(PART)
build/homework/no_programs.so: tests/homework/no_programs.cc
	@mkdir -p $(@D) && $(CXX) -std=c++20 -Wall -Wextra -shared -fPIC -o $@ $<
homework-reference:
	@$(HOMEWORK) reference
# ---- Change ----------------------------------------------------------------------------------------------------------
mutants-by-chance: #: mistakes that nobody chose: a line, then its kind, drawn by chance; lists survivors;  N=60 SEED=1
mutants-by-chance:
	@$(MAKES)python3 tests/tools/mutants_by_chance.py $(or $(N),60) $(or $(SEED),1)
mutants: #: break the code in many small ways; does a test notice each?  M='02-*': only these
	@$(MAKES)set -f; tests/mutants.sh $(M)
test-book: #: the book in a browser;  make test-tour: the first hour, without a terminal
test-book: book build/python-browser/ready
	@build/python-browser/bin/python tests/book.py build
