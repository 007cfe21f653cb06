# make help lists the targets. The work is done by scripts/.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
PORT ?= 8000
MODEL ?= examples/tiny_moe/target
QUESTION ?= What is the functools module?
ONCE ?= 0
MTP ?= 0
SERVE_ARGS ?=
PYTEST_ARGS ?=
ROSE_VLLM_033 ?= $(CURDIR)/build/vllm-0.33.0

# Without bytecode, every process of the tests would compile vLLM 0.33's sources in build/ and ours again.
unexport PYTHONDONTWRITEBYTECODE
export PYTHON ROSE_VLLM_033 PORT MODEL QUESTION ONCE MTP SERVE_ARGS

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "  variables: PYTHON=$(PYTHON) PORT=$(PORT) ONCE=$(ONCE) MTP=$(MTP) MODEL=$(MODEL) QUESTION='…' SERVE_ARGS='…' PYTEST_ARGS='…'"

.PHONY: install
install: ## Make .venv with the locked CPU dependencies and this package
	@scripts/install.sh

# With =, since a value may begin with a dash; from the environment, since it may hold quotes.
SERVE_OPTIONS = --port="$$PORT" --once="$$ONCE" --mtp="$$MTP" --model="$$MODEL" --question="$$QUESTION" --vllm-args="$$SERVE_ARGS"

.PHONY: serve
serve: ## Serve MODEL in MXFP8 on PORT and ask one question; ONCE=1 stops after the answer, MTP=1 drafts
	@scripts/check_python.sh "$(PYTHON)"
	@"$(PYTHON)" scripts/serve_example.py --check $(SERVE_OPTIONS)
	@scripts/install.sh
	@exec .venv/bin/python scripts/serve_example.py $(SERVE_OPTIONS)

# In the order of the folders: the longest files aren't the last ones.
TWO_WORKERS = -n 2 --dist loadfile --no-loadscope-reorder
# Servers and engines that use both cores of a small machine; all other tests share them.
WHOLE_MACHINE = $(patsubst %,tests/e2e/test_%.py,accuracy all_to_all_served bench_mtp_refused concurrency disaggregated mtp_data_parallel mtp_ranks stats tensor_parallel)

.PHONY: test
test: install ## Install, check style and types, run the tests
	@$(MAKE) --no-print-directory -j2 sources lint
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest $(TWO_WORKERS) $(WHOLE_MACHINE:%=--ignore %) $(PYTEST_ARGS)
	.venv/bin/python -m pytest $(WHOLE_MACHINE) $(PYTEST_ARGS)

# A download, which leaves the processor to lint.
.PHONY: sources
sources:
	@scripts/fetch_vllm_sources.sh "$(ROSE_VLLM_033)"

.PHONY: test-thorough
test-thorough: install ## Run the tests that make test leaves out for their time: further values and combinations
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest $(TWO_WORKERS) --ignore tests/e2e -m thorough $(PYTEST_ARGS)

.PHONY: lint
lint: install ## Check style and types
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

.PHONY: format
format: install ## Let ruff format the tree
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

.PHONY: lock
lock: ## Resolve requirements/cpu.in into requirements/cpu.lock again
	@scripts/lock.sh

.PHONY: clean
clean: ## Remove .venv and everything that was built
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find vllm_rose_plugin tests scripts -name __pycache__ -prune -exec rm -rf {} +
