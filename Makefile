# What one can make: each target below says it, and "make help" prints that. How programs are built is in
# common/build/rules.mk; tests and homework are in tests/tests.mk. All that is made goes into build/.
#
# BACKEND=cpu|cuda, PRECISION=fp32|fp64|bf16|fp16|fp8 and SANITIZE=thread|address choose what is built, BLOCK_THREADS=4
# makes a CPU block four threads; each choice has a folder below build/, as build/cpu-fp64. V=1 shows the commands.
.DEFAULT_GOAL := all
include common/build/choices.mk

# The first make installs. A second one looks where the packages are, and does the rest.
ifneq ($(filter-out $(INSTALLED),$(INSTALLS)),)
.PHONY: $(GOALS) second
$(GOALS): second ;
second:
	@common/build/setup.sh $(INSTALLS) python3:python3 >&2 || { echo "not without what is missing" >&2; exit 1; }
	@$(MAKE) --no-print-directory INSTALLED=$(INSTALLS) $(GOALS)
else

# A program is called after its folder, or after its file where that is not main.cu; MAINS are these files.
STAGES := $(patsubst %/main.cu,%,$(wildcard [0-9][0-9]_*/main.cu))
PROGRAMS := $(STAGES) collectives experts
MAINS := $(STAGES:%=%/main.cu) 02_data_parallel/collectives.cu 07_combined_5d/experts.cu 07_combined_5d/plan/plan.cu \
  $(wildcard tests/tools/*.cu)
name_of = $(if $(filter %/main.cu,$(1)),$(1:%/main.cu=%),$(basename $(notdir $(1))))
# What make report, and its test, need.
OF_REPORT := build/cpu-fp32/07_combined_5d build/cpu-bf16/plan build/cpu-bf16/lessons/01.jsonl build/python-report/ready
include common/build/rules.mk
include tests/tests.mk
# A target with a line of help is no file.
.PHONY: $(shell sed -n 's/^\([a-z-]*\): #[\#:].*/\1/p' Makefile tests/tests.mk) FORCE

# ---- Learn -----------------------------------------------------------------------------------------------------------
# Every stage trains the same model on the same batches, so that one table can compare them with 01 (progress.py lists
# the runs). RANKS: how many ranks there are, one for each GPU. ARGS='...' changes what all of them train.
RANKS ?= $(if $(filter cuda-nccl,$(BACKEND)-$(NCCL)),$(shell nvidia-smi -L 2>/dev/null | wc -l),8)
RUN_STEPS ?= 10
$(if $(filter run,$(GOALS)),$(call check,RANKS,1 2 4 8))
LOGS := $(BUILD)/runs
run: ## the tiny model, trained in every way: a table;  RANKS=8 RUN_STEPS=10 ARGS='--lr 1e-3' ONLY='01 05-%'
run: programs $(if $(ONLY)$(filter cuda,$(BACKEND)),,build/cpu-bf16/07_combined_5d)
	@V=$(V) python3 common/report/progress.py $(BUILD) $(LOGS) '$(RANKS)' $(RUN_STEPS) '$(ONLY)' $(ARGS)
	@python3 common/report/runs.py $(LOGS)
	@$(if $(ONLY)$(filter cuda,$(BACKEND)),,$(LESSONS) --table)
	@echo "What each run printed is in $(LOGS)/*.txt; all steps are in $(LOGS)/*.jsonl, timelines in $(LOGS)/*.trace."

tour: ## a first hour, in the terminal, ten steps;  STEP=4: from there
# The programs of a learner's tree lack bodies. There the tour shows what the complete ones print.
OF_TOUR := $(PROGRAMS:%=build/cpu-fp32/%) build/cpu-fp32/tests-test_primer build/cpu-bf16/07_combined_5d
tour test-tour: $(if $(wildcard .homework),,$(OF_TOUR))
	@STEP=$(STEP) tests/tour.sh $(if $(filter test-tour,$@),< /dev/null)

diff: #: the main.cu of any two programs:  A=02 B=experts
	@python3 tests/diff.py "$(A)" "$(B)"
diff-%: ## what stage 03 adds: main.cu, the seam, the rest
	@python3 tests/diff.py $*

# In dry runs (tests/lessons.txt). 07 is enough: with one axis it is the stage of that axis.
GPU ?= h100
LESSONS = python3 common/report/lessons.py tests/lessons.txt build/cpu-bf16 build/cpu-bf16/lessons --gpu $(GPU)
lessons: ## what each technique buys and costs at a real size:  GPU=h200 W='pipeline': those with this word
lessons: build/cpu-bf16/07_combined_5d $(if $(findstring fp8,$(or $(W),fp8)),build/cpu-fp8/07_combined_5d)
	@$(LESSONS) $(if $(W),'$(W)')
precisions: #: what the precision does to learning: 400 steps of 01 in each, a table and a picture
precisions: $(patsubst %,build/cpu-%/01_single_gpu,fp32 bf16 fp16 fp8) build/python-precisions/ready
	@build/python-precisions/bin/python common/report/precisions.py build/precisions build $(STEPS)

# ---- Train -----------------------------------------------------------------------------------------------------------
all: #: all programs and tests, in build/BACKEND-PRECISION
all: programs $(addprefix $(BUILD)/,bench tests mpi_tests)
programs: ## the programs alone
programs: $(PROGRAMS:%=$(BUILD)/%)
setup: #: install what is missing, for this BACKEND; run, test and others do so, too
	@:
clean: #: remove build/
	rm -rf build
help: #: this list;  W=tests: all lines with this word; W=all: all lines, and with what a target takes
	@awk -v 'word=$(call quoted,$(W))' -f common/build/help.awk Makefile tests/tests.mk
	@echo "BACKEND=cpu|cuda PRECISION=fp32|fp64|bf16|fp16|fp8 SANITIZE=thread|address V=1"

# The planner plans in bf16.
build/host/plan: build/cpu-bf16/plan build/cpu-bf16/07_combined_5d
	@mkdir -p build/host; ln -sf ../cpu-bf16/plan $@
plan: ## the fastest layout of a run that fits, without a GPU;  build/host/plan --help lists its options
plan: build/host/plan
calibrate: #: fit a profile to measured steps, and judge it:  SWEEP=my.csv GPU=a100-megatron OPTIONS='--recompute full'
calibrate: plan
	@python3 07_combined_5d/plan/calibrate.py build/host/plan "$(SWEEP)" $(GPU) "$(or $(TO),build/gpu.json)" $(OPTIONS)
GPUS ?= $(RANKS)
MODEL ?= smollm-1.7b
SWEPT := build/$(BACKEND)-bf16$(filter -mpi,$(SUFFIX))/07_combined_5d
sweep: ## the planner's ten fastest, on GPUs or in virtual time:  GPUS=8 MODEL=smollm-1.7b
sweep: plan $(SWEPT)
	@python3 common/report/sweep.py $(dir $(REPORT))sweep.csv build/host/plan $(SWEPT) $(GPUS) --model $(MODEL) \
	  --seq-len 2048 --global-batch-size 64 $(ARGS) $(if $(filter cpu,$(BACKEND)),--dry-run)
# To look for the reason of an error:  SCALE='memory_achievable=0.5' of the profile, ADD='--recompute full'.
published: ## runs of others, and what a dry run of them says:  W='Llama'
published: build/cpu-bf16/07_combined_5d build/cpu-fp8/07_combined_5d
	@python3 common/report/published.py common/report/published.txt build $(if $(W),'$(W)') $(SCALE:%=--scale %) \
	  $(if $(ADD),--add='$(ADD)')

tokens: #: tokens.bin and tokenizer.json of a text:  TEXT=FILE VOCAB=4096, or TOKENIZER=FILE; TO=FOLDER
tokens: build/python-tokens/ready
	@build/python-tokens/bin/python common/tokens.py "$(TEXT)" "$(or $(VOCAB),4096)" "$(TOKENIZER)" "$(or $(TO),.)"
text: #: what --sample prints, as text:  build/cpu-fp32/01_single_gpu --load run --sample 100 | make -s text
text: build/python-tokens/ready
	@build/python-tokens/bin/python common/tokens.py --text "$(or $(TOKENIZER),tokenizer.json)"
bench: ## the speed of kernels, of a training step, of collectives
bench: programs $(BUILD)/bench
	$(BUILD)/bench
	$(BUILD)/bench profile > $(BUILD)/gpu.json  # for --gpu of a CPU build
	$(BUILD)/01_single_gpu --layers 8 --d-model 512 --heads 8 --kv-heads 8 --d-ff 1536 --seq-len 256 \
	  --micro-batch-size 4 --global-batch-size 4 --log-every 1 --steps 3 --profile $(ARGS)
	[ $(RANKS) -lt 2 ] || mpirun -n $(RANKS) $(BUILD)/collectives

# ---- Look ------------------------------------------------------------------------------------------------------------
# The page asks the planner, with the options PLAN, and 07 for dry runs of pipelines; it has the lessons' runs, too.
REPORT := build/report.html
RUNS := $(LOGS)
build/cpu-bf16/lessons/01.jsonl: build/cpu-bf16/07_combined_5d
	@$(LESSONS) --table > /dev/null
report: ## build/report.html: losses, memory, timelines of runs;  RUNS='a.jsonl b.jsonl'; PLAN='--tokens 2T'
report: $(OF_REPORT)
	@build/python-report/bin/python common/report/report.py $(REPORT) build '$(PLAN)' $(RUNS)
book: ## the notes as a book with figures: build/book.html;  make pictures: those of the notes
book pictures: build/cpu-fp32/05_pipeline_parallel $(addprefix build/cpu-bf16/,02_data_parallel 07_combined_5d plan)
book pictures: build/python-book/ready
	@$(if $(filter book,$@),NO_MKDOCS_2_WARNING=1 build/python-book/bin/mkdocs build -q --strict -f common/report/book.yml)
	@$(if $(filter book,$@),echo "build/book/index.html and build/book.html",build/python-book/bin/python common/report/pictures.py)
build/python-%/ready: common/build/venv.sh
	@common/build/venv.sh $*
endif
