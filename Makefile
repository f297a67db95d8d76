.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help
help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

.PHONY: install
install: $(STAMP)  ## make .venv with brim and what its development needs

.PHONY: demo
demo: $(STAMP)  ## fine-tune, evaluate and predict on real data, in minutes on two cores
	$(BIN)/python examples/demo.py

.PHONY: lint
lint: style types  ## lint, format check, strict types

.PHONY: style
style: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m tools.sizes --quiet

.PHONY: types
types: $(STAMP)
	$(BIN)/mypy

.PHONY: sizes
sizes: $(STAMP)  ## modules, code lines and faces of each package, beside its budget
	$(BIN)/python -m tools.sizes

.PHONY: walks
walks: $(STAMP)  ## modules, functions and calls between packages that brim check, memory, train and predict run
	$(BIN)/python -m tools.walks

.PHONY: same
same: $(STAMP)  ## whether this checkout does the same as COMMIT (default: the one before), to the bit
	$(BIN)/python -m tools.same $(COMMIT)

.PHONY: format
format: $(STAMP)  ## format and sort imports
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.PHONY: test
test: style  ## the whole suite: lint, types, tests
	$(MAKE) --no-print-directory --jobs=2 types tests

# Three workers on two cores, since tests wait for processes that they start; types are checked beside them, on a single
# core. Without bytecode on the disk, each worker compiles brim and the tests anew, and each of these processes brim.
.PHONY: tests
tests: $(STAMP)
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 3

.PHONY: test-ray
test-ray: $(STAMP)  ## two actors on a Ray cluster of this machine's own; installs ray
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,ray]'
	$(BIN)/python -m pytest -m ray

.PHONY: fuzz
fuzz: SEED := $(or $(SEED),$(shell od -An -N4 -tu4 /dev/urandom | tr -d " "))
fuzz: $(STAMP)  ## the property tests on fresh examples, ten times as many; SEED=… repeats a run
	@echo "make fuzz SEED=$(SEED) draws these again"
	$(BIN)/python -m pytest -n 3 -m hypothesis --hypothesis-profile=fuzz --hypothesis-seed=$(SEED)

.PHONY: docs
docs: $(STAMP)  ## write docs/configuration.md and docs/figures.md anew
	$(BIN)/python -m docs.generate

.PHONY: rehearse
rehearse: $(STAMP)  ## build, install in a fresh environment, upgrade an older brim with its run: some minutes
	$(BIN)/python -m tools.release

.PHONY: faults
faults: $(STAMP)  ## kills, full disks, damaged files, bad input: some minutes; writes docs/reliability.md's table
	$(BIN)/python -m faults --workers 2

.PHONY: bench-loss
bench-loss: $(STAMP)  ## losses across micro-batches, and against transformers' and TRL's trainers
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,peers]'
	$(BIN)/python -m benchmarks.loss_equality

.PHONY: bench-batching
bench-batching: $(STAMP)  ## epochs and searches against other trainers, losses under limits, padding, planning
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,peers]'
	$(BIN)/python -m benchmarks.batching
	$(BIN)/python -m benchmarks.batching_search

.PHONY: bench-inference
bench-inference: $(STAMP)  ## predictions against transformers' generate, under memory limits, killed; about an hour
	$(BIN)/python -m benchmarks.inference

.PHONY: bench-schedules
bench-schedules: $(STAMP)  ## a batch that moves: planned over 1e12 tokens, time of steps, killed and resumed
	$(BIN)/python -m benchmarks.schedules
	$(BIN)/python -m benchmarks.noise_scale
	$(BIN)/python -m benchmarks.schedule_kills
	$(BIN)/python -m benchmarks.ramp_memory
	$(BIN)/python -m benchmarks.batch_schedules

.PHONY: bench-memory-gpu
bench-memory-gpu: $(STAMP)  ## memory on the GPU at hand, measured against predicted; under ten minutes
	$(BIN)/python -m benchmarks.memory_gpu
	$(BIN)/python -m benchmarks.memory_gpu --compare

.PHONY: bench-gpu
bench-gpu: $(STAMP)  ## is it right, as large as predicted and how fast on the GPU at hand; docs/gpu.md; under half an hour
	$(BIN)/python -m benchmarks.gpu correct
	$(BIN)/python -m benchmarks.gpu memory
	$(BIN)/python -m benchmarks.gpu speed

.PHONY: bench-memory-cpu
bench-memory-cpu: $(STAMP)  ## peak resident memory on this CPU, measured against predicted
	$(BIN)/python -m benchmarks.memory_cpu

.PHONY: bench-memory
bench-memory: $(STAMP)  ## predicted memory against public measurements, known figures, one card's answer; no GPU needed
	$(BIN)/python -m benchmarks.memory_public
	$(BIN)/python -m benchmarks.memory_known
	$(BIN)/python -m benchmarks.memory_cards

.PHONY: bench-loop
bench-loop: $(STAMP)  ## the loop's cost over a bare PyTorch loop, and the start-up times
	$(BIN)/python -m benchmarks.loop_overhead
	$(BIN)/python -m benchmarks.startup
