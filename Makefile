# make serve       a server with the bundled model on http://localhost:8000, from a fresh clone
# make test        linters, type checks and tests
# make help        everything else
#
# PORT=8001        another port;  MODEL=org/name  another model;  ARGS="--max-model-len 4k"  more flags of `octavo serve`

PORT ?= 8000
MODEL ?=
ARGS ?=
VENV ?= .venv
BIN := $(VENV)/bin
LLAMA_CPP_PYTHON ?=
OPENVINO_PYTHON ?=
GPU_PYTHON ?= python3
GPU_JOBS ?= $(shell n=$$(($$(nproc 2>/dev/null || echo 8) / 2)); echo $$((n < 1 ? 1 : n > 8 ? 8 : n)))
GPU_SITE := .gpu
GPU_NEEDS := msgspec pyzmq gguf pytest-xdist execnet

.DEFAULT_GOAL := help
.PHONY: help serve chat setup test lint format unit docs bench sanitize emulate-arm gpu-wheels gpu-site gpu-test gpu-bench gpu-bench-2 gpu-bench-invariant clean

help:
	@echo "make serve      serve the bundled model on port $(PORT) (PORT=, MODEL=, ARGS=)"
	@echo "make chat       talk to it in the terminal"
	@echo "make test       ruff, mypy and pytest"
	@echo "make lint       ruff and mypy only; make format rewrites"
	@echo "make sanitize   CPU kernel tests under ASan and UBSan; make emulate-arm runs the kernels on emulated ARM"
	@echo "make docs       write docs/configuration.md from the code"
	@echo "make bench      CPU benchmarks -> benchmarks/results (LLAMA_CPP_PYTHON=, OPENVINO_PYTHON= add peers)"
	@echo "make gpu-test   GPU tests with the python3 that is there; make gpu-bench measures"
	@echo "make gpu-bench-2  the same over two GPUs: sums between them, 8B and 70B"
	@echo "make gpu-bench-invariant  what --batch-invariant costs"
	@echo "make clean      remove the environment and caches"

# The stamps hold when the environment matches pyproject.toml and the compiled kernels their sources, so that a second run starts at once.
NATIVE := setup.py $(wildcard src/octavo/ops/cpu/native/*)

$(VENV)/.serve: pyproject.toml scripts/bootstrap.py $(NATIVE)
	@python3 scripts/bootstrap.py --venv $(VENV) --extra structured
	@touch $@

$(VENV)/.test: pyproject.toml scripts/bootstrap.py $(NATIVE)
	@python3 scripts/bootstrap.py --venv $(VENV) --extra test
	@touch $@ $(VENV)/.serve

setup: $(VENV)/.serve
	@$(BIN)/octavo models pull

# exec: signals reach the server itself, not a shell in between.
serve: setup
	@exec $(BIN)/octavo serve $(MODEL) --port $(PORT) $(ARGS)

chat: setup
	@exec $(BIN)/octavo chat $(MODEL) $(ARGS)

test: $(VENV)/.test
	@$(BIN)/octavo models pull
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory unit

lint: $(VENV)/.test
	$(BIN)/ruff check src tests benchmarks compat scripts
	$(BIN)/ruff format --check src tests benchmarks compat
	$(BIN)/mypy --strict src

format: $(VENV)/.test
	$(BIN)/ruff check --fix src tests benchmarks compat scripts
	$(BIN)/ruff format src tests benchmarks compat

unit: $(VENV)/.test
	$(BIN)/python -m pytest -m "not gpu" -n auto --maxprocesses 4 --dist worksteal $(ARGS)

docs: $(VENV)/.serve
	$(BIN)/python -m octavo.cli.docs
	$(BIN)/python scripts/models_table.py

sanitize: $(VENV)/.test
	scripts/sanitize_kernels.sh $(BIN)/python

emulate-arm:
	scripts/emulate_arm.sh

bench: $(VENV)/.test
	$(BIN)/octavo models pull
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/core_step.py
	$(BIN)/python benchmarks/kv_waste.py
	$(BIN)/python benchmarks/prefix_cache_ttft.py
	$(BIN)/python benchmarks/structured.py
	LLAMA_CPP_PYTHON="$(LLAMA_CPP_PYTHON)" OPENVINO_PYTHON="$(OPENVINO_PYTHON)" $(BIN)/python benchmarks/cpu_peers.py

# A GPU machine without network: fetch what it lacks beforehand, into a folder that travels with the tree.
gpu-wheels: $(VENV)/.serve
	$(BIN)/python -m pip install --quiet --upgrade --target $(GPU_SITE) --python-version 3.12 --only-binary=:all: --no-deps $(GPU_NEEDS)

# What the GPU's python3 lacks, unless it came along (gpu-wheels).
gpu-site:
	@PYTHONPATH=$(GPU_SITE):$$PYTHONPATH $(GPU_PYTHON) -c "import msgspec, zmq, gguf" 2>/dev/null || \
		$(GPU_PYTHON) -m pip install --quiet --upgrade --target $(GPU_SITE) --no-deps $(GPU_NEEDS)

# Tests that want all of a GPU's memory come first. Then GPU_JOBS processes share it, or one has it, where pytest-xdist is not there.
# They share the cores too: without a limit, torch takes all of them for each. 5: ARGS leave no test.
gpu-test: GPU_SPREAD = $(shell PYTHONPATH=$(GPU_SITE):$$PYTHONPATH $(GPU_PYTHON) -c "import xdist" 2>/dev/null && echo --numprocesses=$(GPU_JOBS) --dist=worksteal)
gpu-test: gpu-site
	PYTHONPATH=src:$(GPU_SITE):$$PYTHONPATH $(GPU_PYTHON) -m pytest tests/gpu -m alone $(ARGS) || [ $$? -eq 5 ]
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-4} PYTHONPATH=src:$(GPU_SITE):$$PYTHONPATH $(GPU_PYTHON) -m pytest tests/gpu tests/ops/triton tests/ops/cuda -m "not alone" $(GPU_SPREAD) $(ARGS)

gpu-bench: gpu-site
	PYTHONPATH=src:.:$(GPU_SITE) $(GPU_PYTHON) benchmarks/gpu_ops.py
	PYTHONPATH=src:.:$(GPU_SITE) $(GPU_PYTHON) benchmarks/gpu_attention.py
	PYTHONPATH=src:.:$(GPU_SITE) $(GPU_PYTHON) benchmarks/gpu_step.py
	PYTHONPATH=src:.:$(GPU_SITE) $(GPU_PYTHON) benchmarks/gpu_throughput.py $(ARGS)

# Two GPUs of one host: which way sums go, by size, and what models over both of them do.
gpu-bench-2: gpu-site
	PYTHONPATH=src:.:$(GPU_SITE) $(GPU_PYTHON) -m benchmarks.gpu_all_reduce --gpus 2 --write-table
	PYTHONPATH=src:.:$(GPU_SITE) $(GPU_PYTHON) benchmarks/gpu_throughput.py --gpus 2 --parts latency throughput start $(ARGS)

# What --batch-invariant costs: each number with and without it.
gpu-bench-invariant: COMPARE = benchmarks/gpu_throughput.py --runs 1 --compare '{"batch_invariant": true}' $(ARGS)
gpu-bench-invariant: gpu-site
	PYTHONPATH=src:.:$(GPU_SITE) $(GPU_PYTHON) $(COMPARE) --shapes qwen3-0.6b --parts throughput \
		--output benchmarks/results/gpu_batch_invariant.json
	PYTHONPATH=src:.:$(GPU_SITE) $(GPU_PYTHON) $(COMPARE) --shapes llama-3.1-8b --parts latency first \
		--output benchmarks/results/gpu_batch_invariant_8b.json

clean:
	rm -rf $(VENV) $(GPU_SITE) build dist src/*.egg-info compat/src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks compat -name __pycache__ -type d -prune -exec rm -rf {} +
