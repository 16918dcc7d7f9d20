# Every habit is one target. `make demo` and `make test` set themselves up on a machine with Python 3.11+, make and pip.
# TORCH is what pip is asked for; to use a CPU build from another index:
#   make demo TORCH=torch PIP_TORCH_ARGS='--index-url <the CPU index that PyTorch's install page gives>'
PYTHON ?= python3
TORCH ?= torch==2.13.0
PIP_TORCH_ARGS ?=
BIN := .venv/bin
PIP := $(BIN)/pip install -q --disable-pip-version-check
TIMED := scripts/timed
# Many tests wait for processes: two workers a core.
XDIST ?= $(shell expr 2 "*" $$(getconf _NPROCESSORS_ONLN))
FUZZ_INPUTS ?= 100000
FUZZ_RUNS ?= 1000000
FUZZ_CORPUS ?= .sources/fuzz

.PHONY: demo demo-vllm demo-survive demo-fleet setup test test-fast test-vllm test-gpu lint format typecheck bench bench-vllm bench-strangers bench-hf vllm-versions row-independence demo-seeds demo-jobs fuzz fuzz-atheris docs docs-output wheel clean

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

demo-survive: .venv/ready .venv-vllm/ready   ## the real vLLM server: ten streams go on while a request that does not fit fails alone
	@$(BIN)/python examples/demo_survive.py

demo-seeds: .venv/ready .venv-vllm/ready   ## three questions that users asked, on the real vLLM: what fails, what of the advice helps
	@$(BIN)/python examples/seed_scoring.py
	@$(BIN)/python examples/seed_vision.py
	@$(BIN)/python examples/seed_speculative.py

demo-jobs: .venv/ready         ## three jobs of hours that users asked about, in small: papers in batches, a sweep over layers, two systems on one machine's GPUs; what of the advice helps
	@$(BIN)/python examples/seed_papers.py
	@$(BIN)/python examples/seed_layers.py
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python examples/seed_placement.py

demo-fleet: .venv/ready-dev    ## two nodes of Ray on this machine: one rank of four fails, all start again with one plan, their logs are summed up
	@$(BIN)/python examples/demo_fleet.py

setup: .venv/ready-dev .venv-vllm/ready   ## what the tests need; the first time it downloads gigabytes

test: setup                    ## the tests, each part with its minutes
	@$(TIMED) 'all of lint, types, fast tests, vLLM tests' 32 $(MAKE) --no-print-directory test-fast test-vllm

test-fast: .venv/ready-dev lint typecheck
	@$(TIMED) 'fast tests' 12 $(BIN)/pytest -q -n $(XDIST) --dist worksteal -m 'not vllm'

test-vllm: .venv/ready-dev .venv-vllm/ready   ## those with the real vLLM, one at a time
	@$(TIMED) 'vLLM tests' 19 $(BIN)/pytest -q -n 0 -m vllm tests/vllm

test-gpu: .venv/ready-dev      ## those that need a CUDA device; skipped, with the reason, where there is none
	@$(BIN)/pytest -q -n 0 -m gpu tests/cluster/placement # first, and by itself: the others use the device in pytest's own process
	@$(BIN)/pytest -q -n 0 -m gpu tests --ignore tests/cluster/placement

lint: .venv/ready-dev
	@$(TIMED) lint 0.1 sh -c '$(BIN)/ruff check . && $(BIN)/ruff format --check .'

format: .venv/ready-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

typecheck: .venv/ready-dev
	@$(TIMED) types 0.5 sh -c '$(BIN)/mypy && $(BIN)/mypy --strict tests/typing'

.venv/ready-bench: .venv/ready-dev   ## the tools that some benchmarks run beside ours
	$(PIP) -e '.[bench]'
	touch $@

# Each with the minutes it takes on 2 cores. BENCH_RESUME=FOLDER keeps the results of the long ones, case by case.
BENCHMARKS := import_time:0.1 install_size:1 plan_time:0.2 guard_overhead:0.1 guard_latency:2 short_log:0.2 published_starts:0.5 fit_constants:1 plan_h100:0.2 lookalikes:0.2 corpus:0.2 engine_messages:3 sglang_remedies:0.1 \
	throughput:1 run_throughput:3 run_start:0.2 run_cost:0.2 run_same:3 many_runs:1 kill_rounds:6 host_reserve:12 host_trend:1 generate_peak:2 batch_cases:20 healthy_logs:11
VLLM_BENCHMARKS := kv_cache:8 vllm_configs:20 vllm_device:15 step_recovery:45

bench: .venv/ready-bench       ## the figures, each beside its goal; ends with those that were missed
	@scripts/bench $(BIN)/python $(BENCHMARKS)

bench-vllm: .venv/ready-bench .venv-vllm/ready   ## those that need the real vLLM
	@scripts/bench $(BIN)/python $(VLLM_BENCHMARKS)

bench-strangers: .venv/ready-bench .venv-vllm/ready   ## vLLM configurations broken by testers: 20 commands, the lines printed to paste, 24 scripts; BENCH_RESUME=FOLDER continues an interrupted run
	@scripts/bench $(BIN)/python strangers_vllm:30 vllm_alternatives:20 guarded_vllm:30

bench-hf: .venv-hf/ready       ## 102 patterns of Hugging Face users under the guard; BENCH_RESUME=FOLDER goes on where it stopped
	@scripts/bench .venv-hf/bin/python hf_patterns:25

.venv-hf/ready: benchmarks/data/hf_patterns/requirements.txt
	$(PYTHON) -m venv .venv-hf
	.venv-hf/bin/pip install -q --disable-pip-version-check '$(TORCH)' $(PIP_TORCH_ARGS)
	.venv-hf/bin/pip install -q --disable-pip-version-check -r $< -e .
	touch $@

vllm-versions: .venv/ready-dev ## what oomguard relies on in vLLM beside the sources of its wheels, and what moved; VERSIONS=table reads all
	@$(TIMED) 'vLLM versions' 3 $(BIN)/python benchmarks/vllm_versions.py $(VERSIONS)

# The table that the guard reads, for the transformers installed: 40 minutes on 2 cores. BENCH_RESUME=FOLDER continues an interrupted run.
row-independence: .venv/ready-dev ## which model classes have rows that do not depend on each other, by running all of them small
	@OMP_NUM_THREADS=1 $(BIN)/python benchmarks/row_independence.py $(if $(BENCH_RESUME),--resume $(BENCH_RESUME)/row_independence.jsonl)

fuzz: .venv/ready-dev          ## hostile rule files, and 100,000 spoiled logs and rule files
	FUZZ_INPUTS=$(FUZZ_INPUTS) $(BIN)/pytest -q -n $(XDIST) tests/fuzz

fuzz-atheris: .venv/ready-dev  ## the same checks guided by coverage; FUZZ_CORPUS keeps what raised it
	$(PIP) -e '.[fuzz]'
	mkdir -p $(FUZZ_CORPUS)
	$(BIN)/python fuzz/target.py -runs=$(FUZZ_RUNS) -max_len=160 -timeout=10 $(FUZZ_CORPUS)

.venv/ready-docs: .venv/ready-dev
	$(PIP) -e '.[docs]'
	touch $@

docs: .venv/ready-docs         ## the site in site/, with llms.txt and each page's Markdown; a link or an anchor that leads nowhere fails
	$(BIN)/python scripts/error_messages_page.py
	$(BIN)/python scripts/docs_site.py reference
	$(BIN)/zensical build --strict --clean
	$(BIN)/python scripts/docs_site.py markdown

docs-output: .venv/ready-dev   ## write into the pages what their commands print now
	$(BIN)/python scripts/docs_output.py

wheel: .venv/ready-dev
	$(BIN)/python -m build --wheel

clean:
	rm -rf .venv .venv-vllm .venv-hf dist build site docs/reference docs/rules .mypy_cache .ruff_cache .pytest_cache
