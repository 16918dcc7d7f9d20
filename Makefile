# Every habit is one target. `make demo` and `make test` set themselves up on a machine with Python 3.11+, make and pip.
# TORCH is what pip is asked for; to use a CPU build from another index:
#   make demo TORCH=torch PIP_TORCH_ARGS='--index-url <the CPU index that PyTorch's install page gives>'
PYTHON ?= python3
TORCH ?= torch==2.13.0
PIP_TORCH_ARGS ?=
BIN := .venv/bin
PIP := $(BIN)/pip install -q --disable-pip-version-check
XDIST ?= auto
FUZZ_INPUTS ?= 100000
FUZZ_RUNS ?= 1000000
FUZZ_CORPUS ?= .cache/fuzz

.PHONY: demo demo-vllm test test-fast test-vllm lint format typecheck bench bench-vllm fuzz fuzz-atheris wheel clean

.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(PIP) $(TORCH) $(PIP_TORCH_ARGS)
	$(PIP) -e '.[hf]'
	touch $@

.venv/ready-dev: .venv/ready
	$(PIP) -e '.[dev,hf]'
	touch $@

.venv-vllm/ready: pyproject.toml scripts/vllm-env
	PYTHON='$(PYTHON)' TORCH='$(TORCH)' PIP_TORCH_ARGS='$(PIP_TORCH_ARGS)' scripts/vllm-env

demo: .venv/ready              ## a real log diagnosed, then a real model saved from running out of memory
	@$(BIN)/python examples/demo.py

demo-vllm: .venv/ready .venv-vllm/ready   ## the real vLLM on the CPU: fails, is diagnosed, relaunched once, answers
	@$(BIN)/python examples/demo_vllm.py

test: test-fast test-vllm      ## all tests, those with the real vLLM last and one at a time

test-fast: .venv/ready-dev lint typecheck
	$(BIN)/pytest -q -n $(XDIST) -m 'not vllm'

test-vllm: .venv/ready-dev .venv-vllm/ready
	$(BIN)/pytest -q -n 0 -m vllm tests/vllm

lint: .venv/ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: .venv/ready-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

typecheck: .venv/ready-dev
	$(BIN)/mypy
	$(BIN)/mypy --strict tests/typing

.venv/ready-bench: .venv/ready-dev   ## the tools that some benchmarks run beside ours
	$(PIP) -e '.[bench]'
	touch $@

bench: .venv/ready-bench       ## the figures of the README
	$(BIN)/python benchmarks/import_time.py
	$(BIN)/python benchmarks/batch_cases.py
	$(BIN)/python benchmarks/corpus.py
	$(BIN)/python benchmarks/lookalikes.py
	$(BIN)/python benchmarks/short_log.py
	$(BIN)/python benchmarks/throughput.py
	$(BIN)/python benchmarks/plan_h100.py
	$(BIN)/python benchmarks/published_starts.py
	$(BIN)/python benchmarks/generate_peak.py
	$(BIN)/python benchmarks/healthy_logs.py

bench-vllm: .venv/ready-bench .venv-vllm/ready   ## those that need the real vLLM
	$(BIN)/python benchmarks/kv_cache.py
	$(BIN)/python benchmarks/vllm_configs.py

fuzz: .venv/ready-dev          ## hostile rule files, and 100,000 spoiled logs and rule files
	FUZZ_INPUTS=$(FUZZ_INPUTS) $(BIN)/pytest -q -n $(XDIST) tests/fuzz

fuzz-atheris: .venv/ready-dev  ## the same checks guided by coverage; FUZZ_CORPUS keeps what raised it
	$(PIP) -e '.[fuzz]'
	mkdir -p $(FUZZ_CORPUS)
	$(BIN)/python fuzz/target.py -runs=$(FUZZ_RUNS) -max_len=160 -timeout=10 $(FUZZ_CORPUS)

wheel: .venv/ready-dev
	$(BIN)/python -m build --wheel

clean:
	rm -rf .venv .venv-vllm dist build .mypy_cache .ruff_cache .pytest_cache
