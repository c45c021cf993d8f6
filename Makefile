# Two commands on a fresh machine with Python 3.11 or newer:
#   make search   makes .venv, installs autotune, runs the main job
#   make test     the same with the development tools, then every check that CI runs

PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(addprefix --constraint ,$(CONSTRAINTS))
SOURCES := autotune alembic tests studies

.PHONY: search test dist run-tests test-whole test-clients test-faults test-browser test-ray test-deepspeed test-gpu test-versions bench docs docs-serve docs-reference install install-dev install-bench lint clean help

help:
	@echo "make search          install and run the main job"
	@echo "make test            install the development tools and run every check"
	@echo "make test-whole      run the tests of which make test runs a sample: more samplers, worlds and models"
	@echo "make test-clients    search scripts on TRL, PEFT, sentence-transformers, accelerate, Hydra, Lightning and plain PyTorch"
	@echo "make test-faults     inject every fault there is into searches, and count what was lost"
	@echo "make test-service    measure a service under load, under faults and at the start of a search, beside the aims"
	@echo "make test-browser    use the pages of a service in a real Chromium"
	@echo "make test-deepspeed  run trials with DeepSpeed's ZeRO on the CPU"
	@echo "make test-ray        search on a Ray cluster of two nodes on this machine, which are killed"
	@echo "make test-gpu        run the tests that need an NVIDIA GPU"
	@echo "make test-versions   run the core of the tests against the oldest and the newest libraries promised"
	@echo "make bench           the search against Optuna's samplers on recorded landscapes and in 10,000 random worlds; predicted and measured steps; no GPU needed"
	@echo "make docs            build the documentation in site/, strictly"
	@echo "make docs-serve      show the documentation at http://localhost:8000"
	@echo "make dist            build the wheel and the sdist, and test them in empty environments"
	@echo "make clean           remove the virtual environment and caches"

# The marks are newer than what they were made from exactly when there is nothing to install.
# With torch pinned, pip takes a build for the CPU where one is at hand. An environment that has its own
# torch is used, and left as it is otherwise, with: make search VENV=/path/to/environment CONSTRAINTS=
$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "autotune needs Python 3.11 or newer; name one with make PYTHON=…")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	@echo "Installing torch, transformers and others into $(VENV); the first time that takes a minute or more."
	$(INSTALL) --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(INSTALL) --editable '.[dev]'
	@touch $@

$(VENV)/.installed-bench: $(VENV)/.installed
	$(INSTALL) --editable '.[bench]'
	@touch $@

install: $(VENV)/.installed
install-dev: $(VENV)/.installed-dev
install-bench: $(VENV)/.installed-bench

search: install
	@if $(BIN)/autotune devices --json 2>/dev/null | grep -q '"kind": "cuda"'; then \
	  set -x; $(BIN)/autotune search --model bert-large-uncased --effective-batch 64; \
	else \
	  echo "No GPU here, so the small model stands in: bert-tiny at 128 tokens, on the CPU. A shared CPU is noisy,"; \
	  echo "so that the fastest so far is the answer however wide its interval is (AUTOTUNE_ACCEPT_NOISE=1)."; \
	  set -x; AUTOTUNE_ACCEPT_NOISE=1 $(BIN)/autotune search --model bert-tiny --effective-batch 64 --seq-len 128; \
	fi

lint: install-dev
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/weight.py

# One more than the cores that the tests are meant for, since some wait for a time limit. Each has a process of its own
# from which others are forked (tests/warm.py): 1 GiB together.
PROCESSES ?= 3

# Compiled modules are kept: each test process would else compile the package and the tests anew.
unexport PYTHONDONTWRITEBYTECODE

# The checks run beside the tests, which leave a core free now and then.
test: install-dev
	@$(MAKE) --no-print-directory --jobs 2 lint run-tests

run-tests: install-dev
	$(BIN)/python -m pytest --numprocesses $(PROCESSES) --dist worksteal -m "not gpu and not faults and not whole and not clients and not service and not browser and not ray and not deepspeed and not dist"

test-whole: install-dev
	$(BIN)/python -m pytest --numprocesses $(PROCESSES) --dist worksteal -m whole

test-faults: install-dev
	$(BIN)/python -m pytest tests/faults

# Scripts on other libraries (tests/clients), with those that are installed for it; make test runs some of them.
test-clients: install-dev
	$(INSTALL) --editable '.[dev,clients]'
	$(BIN)/python -m pytest tests/clients tests/worker/test_lightning_trials.py tests/worker/test_trl_memory.py

# Trials with DeepSpeed on two ranks of the CPU. Its kernels for GPUs are not built.
test-deepspeed: install-dev
	DS_BUILD_OPS=0 $(INSTALL) --editable '.[dev,deepspeed]'
	$(BIN)/python -m pytest -m deepspeed

# Measures a service, and prints one table of figures and aims: the start of a search on a warm device; 50 devices, 5,000
# jobs of a stand-in trial and 200 listeners, on SQLite and on PostgreSQL; 1,100 half-sent requests; 28 kills during 2,000
# searches; 133 faults, the PostgreSQL server's among them; the load on the databases alone. FIGURES= takes options:
# --part chaos --part crowd, --faults 20 --database sqlite
test-service: install-dev
	$(INSTALL) --editable '.[dev,generated-client]'
	$(BIN)/python tests/service/figures.py $(FIGURES)

# The pages of a service in the system's Chromium; skipped where there is none.
test-browser: install-dev
	$(INSTALL) --editable '.[dev,browser]'
	$(BIN)/python -m pytest -rs tests/service/test_browser.py

# A Ray cluster of two nodes on this machine, with an environment of its own: Ray's packages are nobody else's.
test-ray:
	@$(MAKE) --no-print-directory install-dev VENV=.venv-ray
	.venv-ray/bin/python -m pip install --quiet --disable-pip-version-check $(addprefix --constraint ,$(CONSTRAINTS)) \
	  --editable '.[dev,ray]'
	.venv-ray/bin/python -m pytest -rs -m ray tests/engine

test-gpu: install-dev
	$(BIN)/python -m pytest -m gpu

# The core of the suite: what is used of the libraries, real trials and one whole search, all on the CPU. Beside it,
# searches of scripts on TRL (supervised, preferences, reward model, judgements, rollouts).
CORE := tests/contracts tests/training tests/results/test_dashboard.py tests/tuning/test_search_optuna.py::TestOptunasSamplers \
	$(addprefix tests/worker/test_,fake_allocator.py own_trials.py reading.py worker_facts.py worker_trials.py) \
	tests/cli/test_cli_reuse.py::test_repeated_under_another_name_no_process_is_started
VERSIONS ?= oldest newest
# Both with the torch whose CPU build is at hand; another comes with CUDA, some gigabytes: make test-versions TORCH=2.11.0
TORCH ?= $(shell sed -n 's/^torch==//p' constraints.txt)

test-versions: $(foreach version,$(VERSIONS),.venv-versions/$(version)-$(TORCH)/.installed)
	@for version in $(VERSIONS); do \
	  python=.venv-versions/$$version-$(TORCH)/bin/python; \
	  echo "== $$version: $$($$python -m pip list --format freeze | grep -E '^(torch|transformers|accelerate|optuna|trl)==' | tr '\n' ' ')"; \
	  $$python -m pytest $(CORE) || exit 1; \
	  $$python -m pytest -m clients tests/clients tests/worker/test_trl_memory.py -k trl || exit 1; \
	done

.venv-versions/%-$(TORCH)/.installed: pyproject.toml constraints-%.txt
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints-$*.txt \
	  'torch==$(TORCH)' --editable . 'trl>=0.29.1' 'pytest>=8' 'pytest-timeout>=2.3' 'hypothesis>=6.100' 'setuptools>=77'
	@touch $@

bench: install-bench
	$(BIN)/python studies/ranking.py
	$(BIN)/python studies/step_times.py compare
	$(BIN)/python studies/bench.py
	$(BIN)/python studies/worlds.py
	$(BIN)/python studies/worlds.py --levers --worlds 1000
	$(BIN)/python studies/worlds.py --texts --worlds 1000
	$(BIN)/python studies/promised_coverage.py

# What a release publishes: built, checked, and installed into empty environments with pip and with uv.
dist: install-dev
	$(INSTALL) build twine uv
	rm -rf dist build
	$(BIN)/python -m build --outdir dist .
	$(BIN)/twine check --strict dist/*
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/python -m pytest -m dist tests/test_distribution.py

docs: install-dev
	$(BIN)/zensical build --strict

docs-serve: install-dev
	$(BIN)/zensical serve

# The pages that follow from the code; a test compares them.
docs-reference: install-dev
	$(BIN)/python tests/reference.py

clean:
	rm -rf $(VENV) .venv-ray .venv-versions build dist site .cache *.egg-info .mypy_cache .ruff_cache .pytest_cache
