# Everything starts from a bare clone: each target builds the environment it needs (.venv) and keeps it until
# pyproject.toml or constraints.txt change.

PYTHON ?= python3
PYTHON312 ?= python3.12
BIN := .venv/bin
PIP_QUIET := --quiet --quiet --disable-pip-version-check
PIP_FLAGS := $(PIP_QUIET) --config-settings editable_mode=compat
# Exactly one version: an open range may pull several GB of GPU libraries.
TORCH := $(shell grep '^torch==' constraints.txt)
# Of the second only a constant is needed; its dependencies are an emulation platform.
CYBORG := $(shell grep '^csle-cyborg==' constraints.txt)
SCENARIO := --no-deps $(shell grep '^gym-csle-cyborg==' constraints.txt)
EXTRAS := dev,classic,mujoco,video,onnx,tensorboard,wandb,bench
# The core and the packages beside it, each with what it can use.
EDITABLE := $(addprefix --editable ,'.[$(EXTRAS)]' 'packages/watch[dash]' 'packages/lab[plot]' 'packages/ray[ray]' 'packages/cage2[cyborg,workflow]' packages/drone)
PROJECTS := pyproject.toml $(wildcard packages/*/pyproject.toml)
ONE_BENCH := bench-straggler bench-burn bench-trace-cost bench-lag bench-startup bench-checkpoint bench-versus bench-lag-learning bench-storm bench-solves bench-discrete bench-versus-sac bench-cyborg-rates \
	bench-cage2-rates bench-cage2-learns bench-workflow-synthetic bench-workflow-cage2 bench-first-day bench-tune-error bench-inverted-pendulum bench-compare-ranks bench-watch-cost bench-adapt bench-crowd bench-learners bench-random-configs \
	bench-ray-costs bench-ray-straggler bench-ray-cyborg bench-cluster-model

.DEFAULT_GOAL := help
.PHONY: help demo cyborg wheel walk readme browser test test-all test-changed test-durations torture mutants test-cluster quick-benches test312 \
	test-isaac soak chaos check format bench $(ONE_BENCH) clean
.DELETE_ON_ERROR:

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-10s  %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.venv312/.ready: PYTHON := $(PYTHON312)
.venv/.ready .venv312/.ready: %/.ready: $(PROJECTS) constraints.txt freewheel/rollout/_kernel.c freewheel/rollout/_watch.c
	@echo "setting up $* (once; a few minutes)"
	@$(PYTHON) -m venv $*
	@$*/bin/python -m pip install $(PIP_FLAGS) --constraint constraints.txt $(TORCH)
	@$*/bin/python -m pip install $(PIP_FLAGS) --constraint constraints.txt $(EDITABLE)
	@$*/bin/python -m pip install $(PIP_FLAGS) $(SCENARIO)
	@touch $@

# Isaac Lab pins what it needs, torch among it, and wants Python 3.12.
.venv-isaac/.ready: $(PROJECTS)
	@echo "setting up .venv-isaac (once; a few minutes and 8 GB)"
	@$(PYTHON312) -m venv .venv-isaac
	@.venv-isaac/bin/python -m pip install $(PIP_FLAGS) isaaclab==3.0.0
	@.venv-isaac/bin/python -m pip install $(PIP_FLAGS) --editable . --editable packages/drone hypothesis pytest pytest-timeout
	@touch $@

.venv/.bench: .venv/.ready
	@$(BIN)/python -m pip install $(PIP_FLAGS) --constraint constraints.txt --editable '.[bench]'
	@touch $@

demo: .venv/.ready ## train a cyber-defender for about a minute, tell the story of one of its games, and say how good it is
	@n=1; while [ -e runs/demo-$$n ]; do n=$$((n + 1)); done; set -ex; \
	$(BIN)/freewheel train freewheel/Cage2-v0 --preset cage2 --steps 3000000 --minutes 2 --seed 1 --run demo-$$n; \
	$(BIN)/freewheel play demo-$$n --render ansi; \
	$(BIN)/freewheel eval demo-$$n --episodes 500

# What the extra brings is in .venv already; this repairs it, and shows that the simulator starts.
cyborg: .venv/.ready ## install the real CAGE 2 simulator (PyPI's fork of CybORG) into .venv, and try it
	$(BIN)/python -m pip install $(PIP_FLAGS) --constraint constraints.txt $(CYBORG)
	$(BIN)/python -m pip install $(PIP_FLAGS) $(SCENARIO)
	$(BIN)/freewheel train cyborg:Scenario2 --mode episodes --dry-run

# One thread a process: the same sums in the same order, and no fight for the cores.
TESTS := test test-all test-changed test-durations torture mutants test-cluster quick-benches test312 test-isaac soak chaos
$(TESTS): export OMP_NUM_THREADS := 1
$(TESTS): export OPENBLAS_NUM_THREADS := 1

# The page of `freewheel watch` is tested in a real browser: it is installed where it is missing and this may be done.
browser:
	@if command -v chromium > /dev/null && command -v chromedriver > /dev/null; then exit 0; fi; \
	if [ "$$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then \
	echo "chromium and chromedriver are missing, and only root can install them: tests of the live page will not run"; exit 0; fi; \
	echo "installing chromium and chromium-driver (once)"; export DEBIAN_FRONTEND=noninteractive; \
	{ apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium chromium-driver; } > /dev/null \
	|| echo "they could not be installed: tests of the live page will not run"

PYTEST := $(BIN)/python -m pytest -q -n 2 --dist loadfile
TIMES ?= 200

test: .venv/.ready ## the unit tier: every decision, one training of each mode and algorithm, one fault of each kind (docs/testing.md)
	$(PYTEST) -m unit

test-all: .venv/.ready browser ## all three tiers, every benchmark in its quick form, and a new user's first five minutes
	$(PYTEST)
	@$(MAKE) --no-print-directory walk

test-changed: .venv/.ready ## the unit tests nearest to what differs from the last commit, in less than a minute
	$(BIN)/python scripts/changed.py

torture: .venv/.ready ## TEST=tests/... (-m and other words of pytest too), TIMES=200 times, beside a program that burns one and a half cores
	$(BIN)/python scripts/beside_load.py 1.5 $(BIN)/python -m pytest -q --maxfail 3 --times $(TIMES) $(TEST)

mutants: .venv/.ready ## plant forty defects, one by one, and see which test catches each (half an hour, while the nearest tests catch them)
	$(BIN)/python scripts/mutants.py

# Fixtures and causes too; the records are kept with the benchmarks, the seconds of every file where the scheduler reads them.
test-durations: .venv/.ready browser ## run all three tiers, and record what every test takes, and for what
	rm -f .test-durations.jsonl
	$(PYTEST) --record-durations .test-durations.jsonl
	$(BIN)/python scripts/durations.py .test-durations.jsonl --by-file tests/durations.json > benchmarks/results/test_durations.md
	gzip -9 -n -c .test-durations.jsonl > benchmarks/results/test_durations.jsonl.gz

# Not part of `make test-all`: three nodes and a training each, which are killed, leave and join.
test-cluster: export FREEWHEEL_CLUSTER := 1
test-cluster: .venv/.ready ## trainings on a real cluster of three Ray nodes: some are killed in the middle, some leave, some join
	$(BIN)/python -m pytest packages/ray/tests/cluster

quick-benches: .venv/.ready ## every published benchmark in its quick form: it still runs, and keeps its promises
	$(PYTEST) tests/test_benchmarks.py

wheel: ## the core and its packages as files that pip installs, in dist/; any Python with pip will do
	@rm -rf dist build packages/*/build
	@$(PYTHON) -m pip wheel $(PIP_QUIET) --no-deps --wheel-dir dist . ./packages/*
	@ls dist/*.whl

walk: ## what the README tells a new user, word for word, in an empty virtual environment elsewhere
	$(PYTHON) scripts/walk.py

readme: .venv/.ready ## the table of the README from the rows of the benchmarks
	$(BIN)/python -m benchmarks.headlines

test312: .venv312/.ready browser ## every test under Python 3.12 (PYTHON312 says where it is)
	.venv312/bin/python -m pytest -q -n 2 --dist loadfile

# A package that comes with Isaac Lab has a plugin for pytest that warns, and warnings are errors.
test-isaac: export PYTEST_DISABLE_PLUGIN_AUTOLOAD := 1
test-isaac: .venv-isaac/.ready ## the adapter against the real Isaac Lab 3.0, on the CPU (PYTHON312 says where Python is)
	.venv-isaac/bin/python -m pytest -p pytest_timeout tests/isaac

soak: export FREEWHEEL_LONG := 1

soak: .venv/.ready ## twenty minutes of training that must not grow, then every test in its long form (hours)
	$(BIN)/python -m benchmarks.soak
	$(BIN)/python -m pytest -p no:cacheprovider --timeout 3600

chaos: .venv/.ready ## faults done to real trainings, hundreds of times, and one table of what survived (an hour and a half)
	$(BIN)/python -m benchmarks.chaos

check: .venv/.ready ## style, types, floors and the size table
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python scripts/sizes.py

format: .venv/.ready ## mend what can be mended by machine
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: .venv/.bench ## every benchmark, one after the other (7 hours), and README's table from their rows; fails at the end if a target was missed
	@missed=; for name in versus_sb3 defaults learns straggler burn lag startup checkpoint versus_modes lag_learning storm solves discrete versus_sac cyborg_rates cage2_rates cage2_learns workflow_synthetic workflow_cage2 first_day tune_error inverted_pendulum watch_cost trace_cost adapt crowd ray_costs ray_straggler ray_cyborg cluster_model; do \
	echo "benchmarks.$$name"; $(BIN)/python -m benchmarks.$$name || missed="$$missed $$name"; \
	done; $(BIN)/python -m benchmarks.headlines; if [ -n "$$missed" ]; then echo "targets missed in:$$missed"; exit 1; fi

$(ONE_BENCH): module = $(subst -,_,$(@:bench-%=%))
bench-versus: module = versus_modes
$(ONE_BENCH): .venv/.bench # one of them (benchmarks/README.md); FLAGS=--quick shows in a minute that it works
	$(BIN)/python -m benchmarks.$(module) $(FLAGS)

clean: ## remove the environments and every cache; runs stay
	rm -rf .venv .venv312 .venv-isaac dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find freewheel packages tests benchmarks scripts -name __pycache__ -prune -exec rm -rf {} +
