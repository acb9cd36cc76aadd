# Every target does its own set-up; the second run of each starts at once. What set-up says goes to
# stderr, so that `make -s demo ARGS=--json` gives JSON alone.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
# Hundreds of processes import the same files; what the set-up has not compiled is compiled once.
unexport PYTHONDONTWRITEBYTECODE
BIN := .venv/bin
VLLM ?=
VLLM_BIN := .venv-vllm$(if $(VLLM),-$(VLLM))/bin
VLLM_TESTS ?= tests/vllm tests/examples/test_vllm.py
# Short ones of each integration: Ray, NIXL and torch; transformers; vLLM.
NEWEST_TESTS ?= tests/examples/test_prefill_decode.py tests/examples/test_actor_handle.py \
    tests/examples/test_transformers_generate.py tests/integrations/transformers/test_generate.py \
    tests/integrations/transformers/test_cluster.py tests/kvstore/mover
NEWEST_VLLM_TESTS ?= tests/vllm/test_answers.py tests/vllm/test_keys.py tests/vllm/test_space.py \
    tests/vllm/test_startup.py tests/vllm/test_requests.py
SERVE_BIN := .venv-serve/bin
SERVE_TESTS ?= tests/serve
ARGS ?=
MINUTES ?= 10
FRAMES ?= 20000
PROCESSES ?= 3

.PHONY: help setup demo test test-newest test-gpu mutants mutants-vllm check lint format wheel test-network test-vllm example-vllm demo-vllm test-serve demo-serve bench-serve bench bench-serving soak matrix fuzz clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-14s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup:  ## make .venv with everything that is needed
	@bash scripts/setup.sh >&2

demo: setup  ## two Ray nodes, prefill on one, decode on the other; ARGS="--json" and others are passed on
	@$(BIN)/python examples/prefill_decode.py $(ARGS)

test: setup  ## the tests, in three processes; ARGS="-k pool -x" is passed to pytest, PROCESSES=0 takes one (for -s or --pdb)
	@$(BIN)/python -m pytest -q tests -n $(PROCESSES) --dist loadfile --no-loadscope-reorder $(ARGS)

test-network: setup  ## clusters in network namespaces: cut, slow and lossy links, frozen machines, jobs; needs root and iproute2, takes minutes
	@$(BIN)/python -m pytest -q tests/network/test_*.py tests/network/long_*.py $(ARGS)

test-newest:  ## short tests with the newest releases that pyproject.toml allows and the newest vLLM, in .venv-newest and .venv-vllm-newest
	@bash scripts/setup_newest.sh >&2
	@VLLM=newest bash scripts/setup_vllm.sh >&2
	@status=0; \
	    .venv-newest/bin/python -m pytest -q -W default $(NEWEST_TESTS) $(ARGS) || status=$$?; \
	    OMP_NUM_THREADS=1 .venv-vllm-newest/bin/python -m pytest -q -W default $(NEWEST_VLLM_TESTS) $(ARGS) || status=$$?; \
	    exit $$status

test-gpu:  ## the tests that need a GPU, with PYTHON (default python3), which brings torch, CuPy, pytest and Ray
	@PYTHONPATH=.$(if $(PYTHONPATH),:$(PYTHONPATH)) $(or $(PYTHON),python3) -m pytest -q \
	    tests/kernels tests/kvstore tests/actors tests/integrations tests/examples -m gpu $(ARGS)

mutants: setup  ## put the bugs that block pools have had back one by one; the checks have to catch each
	@PYTHONPATH=tests/pool:. $(BIN)/python -m poolcheck.mutants $(ARGS)

mutants-vllm:  ## the same for the connector's bugs, in .venv-vllm
	@VLLM=$(VLLM) bash scripts/setup_vllm.sh >&2
	@PYTHONPATH=tests/pool:. $(VLLM_BIN)/python -m poolcheck.mutants --vllm $(ARGS)

lint: setup  ## formatting, ruff, mypy, clang-format; changes nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy kvstore
	@files=$$(find kernels -name '*.cu' -o -name '*.cuh'); \
	    if [ -n "$$files" ]; then $(BIN)/clang-format --dry-run -Werror $$files; fi

check: lint test  ## lint, then the tests: what CI runs

format: setup  ## write ruff's and clang-format's formatting and safe fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	@files=$$(find kernels -name '*.cu' -o -name '*.cuh'); \
	    if [ -n "$$files" ]; then $(BIN)/clang-format -i $$files; fi

wheel: setup  ## sdist and wheel into dist/, checked
	@rm -rf build dist
	@$(BIN)/python -m build --outdir dist .
	@bash scripts/check_wheel.sh

test-vllm:  ## the tests with real vLLM on the CPU, in .venv-vllm; VLLM=0.32.0 another release, in an environment of its own
	@VLLM=$(VLLM) bash scripts/setup_vllm.sh >&2
	@$(VLLM_BIN)/python -m pytest -q $(VLLM_TESTS) $(ARGS)

example-vllm:  ## real vLLM on the CPU: cold, then warm from the store
	@VLLM=$(VLLM) bash scripts/setup_vllm.sh >&2
	@$(VLLM_BIN)/python examples/vllm_cold_warm.py $(ARGS)

demo-vllm:  ## real vLLM on two Ray nodes: prefill on one, decode on the other, with unlike block sizes
	@VLLM=$(VLLM) bash scripts/setup_vllm.sh >&2
	@$(VLLM_BIN)/python examples/vllm_prefill_decode.py $(ARGS)

test-serve:  ## the tests with Ray Serve and real vLLM on the CPU, in .venv-serve
	@bash scripts/setup_serve.sh >&2
	@$(SERVE_BIN)/python -m pytest -q $(SERVE_TESTS) $(ARGS)

demo-serve:  ## an OpenAI-compatible app on Ray Serve with the store behind it, asked some questions; ARGS="--replicas 2"
	@bash scripts/setup_serve.sh >&2
	@$(SERVE_BIN)/python examples/serve_openai.py --check $(ARGS)

bench-serve:  ## routers of Ray Serve beside each other; ARGS="--requests 96 --store --json"
	@bash scripts/setup_serve.sh >&2
	@$(SERVE_BIN)/python -m benchmarks.serve_routing $(ARGS)

bench-serving:  ## real vLLM on the CPU, with the store and beside vLLM's own ways; ARGS="--rounds 3 --json"
	@VLLM=$(VLLM) bash scripts/setup_vllm.sh >&2
	@$(VLLM_BIN)/python -m benchmarks.serving $(ARGS)

bench: setup  ## measure transfers and control calls into benchmarks/results/
	@mkdir -p benchmarks/results
	@for what in transfer control; do \
	    echo "kvstore bench $$what"; \
	    $(BIN)/kvstore bench $$what --output benchmarks/results/$$what.json; \
	done

matrix: setup  ## every page size, tier, transfer, draft and number of decode workers, each beside a run without a cache
	@$(BIN)/python -m tests.matrix $(ARGS)

soak: setup  ## two nodes, clients that verify every byte, random kills; MINUTES=10, ARGS="--seed 1 --json"
	@$(BIN)/python -m tests.soak --minutes $(MINUTES) $(ARGS)

fuzz: setup  ## frames made wrong at every port of a store and a directory; FRAMES=20000, ARGS="--seed 1 --json"
	@$(BIN)/python -m tests.fuzz --frames $(FRAMES) $(ARGS)

clean:  ## remove build products and caches; environments stay (rm -rf .venv*)
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find kvstore actors kernels tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
