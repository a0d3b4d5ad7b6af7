# `make help` lists the targets. CPU and CI live in .venv with pinned versions; GPU targets use the
# python given by PYTHON=..., with its own torch.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH := torch==2.13.0
# an index of CPU builds of torch, used only if it answers
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# uv with pip's configured indexes
UV := $(PYTHON) tools/uv.py
INSTALL = TORCH_INDEX=$(TORCH_INDEX) $(UV) pip install
# what a run needs, and what tests and documentation need
STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev
# the real SGLang server lives in a venv of its own: it pins other versions than the trainer
SGLANG_VENV ?= .venv-sglang
SGLANG_STAMP := $(SGLANG_VENV)/.installed
# environments of the verifiers package live in a venv of their own: its pins exclude SGLang's
VERIFIERS_VENV ?= .venv-verifiers
VERIFIERS_STAMP := $(VERIFIERS_VENV)/.installed
# two versions of Transformer Engine's Python code, for tests that compute nothing
TE_HOME ?= .venv-te
TE_STAMPS := $(TE_HOME)/oldest/.installed $(TE_HOME)/newest/.installed
# the newest megatron-core; it asks for Python 3.12, its code runs on 3.11
MCORE_HOME ?= .venv-mcore
MCORE_STAMP := $(MCORE_HOME)/.installed
# the wheel in a venv of its own, beside the dependencies of .venv
WHEEL_VENV ?= .venv-wheel
# Python 3.12 and 3.13, where they are
find_python = $(shell for python in python$(1) \
	$${PYENV_ROOT:-$$HOME/.pyenv}/versions/$(1).*/bin/python$(1); do \
	$$python -c '' 2>/dev/null && { echo $$python; break; }; done)
PYTHON312 ?= $(call find_python,3.12)
PYTHON313 ?= $(call find_python,3.13)
# fresh virtual environments, runs and a checkout with a space in its path
STRANGER ?= .venv-stranger
NO_TORCH := omegaconf pyyaml cloudpickle xxhash aiohttp packaging rich pydantic starlette uvicorn \
	orjson numpy jinja2 huggingface_hub "ray[default]" psutil
NO_TORCH_TESTS := test_config*.py test_launcher_*.py test_rpc.py test_help.py
TORCH_TESTS := test_config*.py test_launcher_*.py test_recover.py test_load_bytes.py test_security.py
RUN_TESTS := pytest pytest-timeout pytest-xdist
# the word by which test-drawn draws
DRAW ?= $(shell git rev-parse --short HEAD 2>/dev/null || date +%F)
CPU := MEGARL_DEVICE=cpu
# a test's processes read what was compiled before
unexport PYTHONDONTWRITEBYTECODE
PYTEST := $(CPU) OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest
# over several processes, each file in one of them, in their order here: the long ones of recipes
# come before many short ones
FILES := --dist=loadfile --no-loadscope-reorder
SPREAD := --numprocesses=logical --maxprocesses=4 $(FILES)
# over two, for tests that wait for other processes most of the time
PAIRED := --numprocesses=2 $(FILES)
# over three, for tests of which some wait for clusters and servers
TRIPLED := --numprocesses=3 $(FILES)
CODE := megarl examples benchmarks tests docs/hooks.py setup.py $(wildcard tools/*.py)

.DEFAULT_GOAL := help
.PHONY: help install quickstart quickstart-ppo demo-smollm2 lint format house docs unit dist e2e test \
	test-all test-system test-drawn test-slurm slurm install-sglang install-verifiers test-sglang test-te \
	test-mcore test-stranger stranger-quickstart stranger-space stranger-312 stranger-313 \
	install-stranger-312 find-312 find-313 test-wheel worlds test-gpu first-day test-realmodel constraints clean pair \
	bench-train bench-layouts bench-sync bench-data-plane bench-gateway bench-server bench-grpo \
	bench-convert bench-gpu bench-client bench-rollout-workers bench-controller bench-tries bench-slices

help:  ## list the targets
	@grep -E '^[a-z0-9-]+:.*##' $(firstword $(MAKEFILE_LIST)) | sed -E 's/:[^#]*## */\t/' | expand -t 20

install: $(DEV_STAMP)  ## create .venv with the pinned CPU versions, and what tests need

$(STAMP): setup.py pyproject.toml constraints/cpu.txt
	test -x $(BIN)/python || $(UV) venv --seed $(VENV)
	$(INSTALL) --python $(VENV) -c constraints/cpu.txt -e .
	@touch $@

$(DEV_STAMP): $(STAMP)
	$(INSTALL) --python $(VENV) -c constraints/cpu.txt -e ".[dev]"
	@touch $@

install-sglang: $(SGLANG_STAMP)  ## create .venv-sglang: the real SGLang server on CPU (3 GB)

$(SGLANG_STAMP): constraints/sglang-cpu.txt $(shell find tests/sglang/stubs -name '*.py')
	test -x $(SGLANG_VENV)/bin/python || $(UV) venv $(SGLANG_VENV)
	$(INSTALL) --python $(SGLANG_VENV) -c constraints/cpu.txt "$(TORCH)"
	$(INSTALL) --python $(SGLANG_VENV) --no-deps -r constraints/sglang-cpu.txt
	cp -R tests/sglang/stubs/. \
		"$$($(SGLANG_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	@touch $@

install-verifiers: $(VERIFIERS_STAMP)  ## create .venv-verifiers: the verifiers package (600 MB)

$(VERIFIERS_STAMP): constraints/verifiers.txt
	test -x $(VERIFIERS_VENV)/bin/python || $(UV) venv $(VERIFIERS_VENV)
	$(UV) pip install --python $(VERIFIERS_VENV) --no-deps -r constraints/verifiers.txt
	@touch $@

$(TE_HOME)/%/.installed: constraints/te-%.txt $(DEV_STAMP)
	rm -rf $(@D)
	$(UV) pip install --python $(VENV) --no-deps --only-binary :all: --target $(@D) -r $<
	@touch $@

$(MCORE_STAMP): constraints/mcore-newest.txt $(DEV_STAMP)
	rm -rf $(@D)
	$(UV) pip install --python $(VENV) --no-deps --only-binary :all: --target $(@D) \
		--python-version 3.12 -r $<
	@touch $@

quickstart: $(STAMP)  ## SFT, then GRPO on CPU: minutes, ends with an HTML report
	$(CPU) $(BIN)/python examples/quickstart.py $(QUICKSTART)

quickstart-ppo: $(STAMP)  ## the same task by PPO with a critic
	$(CPU) $(BIN)/python examples/quickstart.py --recipe ppo --root runs/quickstart_ppo

demo-smollm2: install  ## GRPO on SmolLM2-135M-Instruct with reasoning-gym tasks, on CPU
	$(CPU) $(BIN)/python examples/smollm2.py

lint: install  ## ruff, mypy, import-linter, docstrings
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy megarl $(if $(wildcard tools/*.py),tools)
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/python tools/house.py --min-docs 90 --gate

format: install  ## let ruff fix and format
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

house: install  ## code, tokens and docs by package (ARGS="--rev REV")
	$(BIN)/python tools/house.py $(ARGS)

docs: install  ## build the site into site/, warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

unit: install  ## fast tests
	$(PYTEST) $(SPREAD) -m "not full and not realmodel" tests/unit

worlds: install  ## tests over several gloo processes
	$(PYTEST) -m "not realmodel" tests/dist

dist: install  ## build the wheel into dist/
	rm -rf build dist
	$(UV) build --quiet --wheel --out-dir dist
	rm -rf build

e2e: install  ## recipes with real servers and launchers
	$(PYTEST) tests/e2e

# The tiers of CI. A test is in the first tier whose budget it fits; a slow test is marked, not
# thinned.

test: install  ## 30 minutes: lint, docs, units, layouts over processes, recipes
	@status=0; TIER="make test: 15" $(MAKE) --keep-going --jobs=2 --output-sync lint docs unit || status=1; \
	TIER="make test: 15" $(PYTEST) $(PAIRED) -m "not full and not realmodel and not system" tests/e2e tests/dist \
		|| status=1; exit $$status

test-system: install  ## 20 minutes: launchers, recovery, failures, servers that are killed
	@$(MAKE) --no-print-directory slurm || echo "Slurm could not be installed; its tests are skipped"
	TIER="make test-system: 15" $(PYTEST) $(TRIPLED) -m "system and not full" tests/system tests/dist tests/e2e

test-all: lint docs install-verifiers  ## everything that runs without a GPU
	MEGARL_VERIFIERS_PYTHON=$(abspath $(VERIFIERS_VENV))/bin/python $(PYTEST) -m "not realmodel" --timeout=3600 tests/unit tests/dist tests/e2e tests/system

test-drawn: install  ## 3 minutes: rows of the invariance table's full product, drawn by the commit (DRAW=its hash)
	TIER="make test-drawn: 3" MEGARL_DRAW=$(DRAW) $(PYTEST) --numprocesses=2 \
		tests/dist/test_invariance.py::test_the_full_product

test-slurm: install slurm  ## the Slurm launcher on a real Slurm: nodes are killed, jobs queue again
	$(PYTEST) tests/system/test_slurm.py

slurm:  ## install Debian's Slurm and munge where they are missing
	@export PATH="$$PATH:/usr/sbin"; \
	if command -v slurmctld >/dev/null && command -v munged >/dev/null; then exit 0; fi; \
	install="timeout 120 apt-get install -y --no-install-recommends slurm-wlm munge"; \
	$$install >/dev/null 2>&1 || { timeout 120 apt-get update >/dev/null && $$install >/dev/null; }

test-sglang: install install-sglang  ## 10 minutes: megarl against the real SGLang server, on CPU
	TIER="make test-sglang: 10" MEGARL_SGLANG_PYTHON=$(abspath $(SGLANG_VENV))/bin/python $(PYTEST) $(PAIRED) -m "$(or $(MARK),not full)" tests/sglang

test-te: install $(TE_STAMPS)  ## 3 minutes: Transformer Engine's layers and calls, its Python alone
	TIER="make test-te: 3" MEGARL_TE_HOME=$(abspath $(TE_HOME)) $(PYTEST) $(PAIRED) tests/te

test-mcore: install $(MCORE_STAMP)  ## 5 minutes: engine, checkpoints, LoRA, syncs and layouts with the newest megatron-core
	TIER="make test-mcore: 5" MEGARL_MCORE_HOME=$(abspath $(MCORE_HOME)) MEGARL_DRAW=$(DRAW)-newest \
		PYTHONPATH=$(abspath $(MCORE_HOME)):$(CURDIR) $(PYTEST) $(PAIRED) \
		-m "(drawn or not full) and not realmodel" \
		tests/mcore $(addprefix tests/dist/,test_engine.py test_checkpoint.py test_lora.py \
		test_stored_checkpoints.py test_weight_sync.py test_invariance.py::test_the_full_product)

# each leg installs from nothing. Interpreters that are missing are named in the last line.
test-stranger:  ## 6 minutes: quickstart from nothing, a path with a space, Python 3.12 and 3.13
	@status=0; for leg in quickstart space 312 313; do \
		$(MAKE) --no-print-directory stranger-$$leg || { status=1; red="$$red $$leg"; }; done; \
	missing="$(if $(PYTHON312),,PYTHON312 )$(if $(PYTHON313),,PYTHON313)"; \
	echo "make test-stranger: failed:$${red:- none}; interpreters that are missing here:" \
		"$${missing:-none}"; exit $$status

find-312 find-313:
	@echo $(PYTHON$(patsubst find-%,%,$@))

stranger-quickstart:
	rm -rf $(STRANGER)/quickstart
	$(MAKE) --no-print-directory quickstart VENV=$(STRANGER)/quickstart \
		QUICKSTART="--root $(STRANGER)/runs/quickstart --sft total_train_steps=20 total_train_steps=2"

stranger-space: install
	rm -rf "$(STRANGER)/a space"
	mkdir -p "$(STRANGER)/a space"
	git ls-files -z | tar --null -cf - -T - | tar -xf - -C "$(STRANGER)/a space"
	cd "$(STRANGER)/a space" && $(CPU) OMP_NUM_THREADS=1 "$(abspath $(BIN))/python" -m pytest tests/unit/test_launcher_job.py

# on Python 3.12 a run is saved and continued
stranger-312: $(if $(PYTHON312),install-stranger-312)
ifneq ($(PYTHON312),)
	$(CPU) OMP_NUM_THREADS=1 $(STRANGER)/312/bin/python -m pytest $(SPREAD) \
		tests/stranger $(addprefix tests/unit/,$(TORCH_TESTS))
endif

install-stranger-312:
	rm -rf $(STRANGER)/312
	$(MAKE) --no-print-directory PYTHON=$(PYTHON312) VENV=$(STRANGER)/312 $(STRANGER)/312/.installed
	$(PYTHON312) tools/uv.py pip install --quiet --python $(STRANGER)/312 -c constraints/cpu.txt $(RUN_TESTS) "ray[default]"

# on Python 3.13 what imports no torch
stranger-313:
ifneq ($(PYTHON313),)
	rm -rf $(STRANGER)/313
	$(PYTHON313) tools/uv.py venv $(STRANGER)/313
	$(PYTHON313) tools/uv.py pip install --quiet --python $(STRANGER)/313 -c constraints/cpu.txt \
		$(NO_TORCH) $(RUN_TESTS)
	$(CPU) $(STRANGER)/313/bin/python -m pytest $(SPREAD) $(addprefix tests/unit/,$(NO_TORCH_TESTS))
endif

test-wheel: dist  ## 5 minutes: the wheel in a clean venv; what the Dockerfile's pip would install
	rm -rf $(WHEEL_VENV)
	$(BIN)/python -m venv $(WHEEL_VENV)
	-$(WHEEL_VENV)/bin/python -m pip install --upgrade pip  # newer ones resolve without whole wheels
	$(WHEEL_VENV)/bin/python -m pip install --no-deps dist/*.whl
	$(BIN)/python -c "import sys; print(*(p for p in sys.path if 'site-packages' in p), sep='\n')" \
		> "$$($(WHEEL_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/beside.pth"
	TIER="make test-wheel: 5" MEGARL_WHEEL_VENV=$(abspath $(WHEEL_VENV)) $(PYTEST) $(PAIRED) tests/wheel

test-gpu:  ## tests that need GPUs: PYTHON's own torch, nothing installed or pinned
	$(PYTHON) -m pytest tests/gpu

test-realmodel: install  ## the engine beside transformers on SmolLM2-135M-Instruct, fetched once
	$(PYTEST) -m realmodel tests/dist

pair: install  ## this tree beside another revision, in turns (BENCH=quickstart REV=... ARGS="--turns 20")
	$(CPU) $(BIN)/python benchmarks/pair.py $(BENCH) $(if $(REV),--rev $(REV)) $(ARGS)

bench-train: install  ## train_batch beside transformers + torch AdamW (docs/benchmarks.md)
	$(CPU) $(BIN)/python benchmarks/train_batch.py

bench-layouts: install  ## every parallel layout of up to 4 processes beside transformers
	$(CPU) $(BIN)/python benchmarks/layouts.py

bench-tries: install  ## steps that compute shared prefixes once beside flat ones, in turns
	$(CPU) $(BIN)/python benchmarks/prefix_tries.py

bench-sync: install  ## a weight sync beside one plain broadcast
	$(CPU) $(BIN)/python benchmarks/weight_sync.py

bench-slices: install install-sglang  ## syncs by slices beside whole tensors, into SGLang at tp 2
	$(CPU) MEGARL_SGLANG_PYTHON=$(abspath $(SGLANG_VENV))/bin/python $(BIN)/python benchmarks/slices.py

bench-data-plane: install  ## a batch's way to its ranks beside one plain gloo send
	$(CPU) $(BIN)/python benchmarks/data_plane.py

bench-controller: install  ## what a step costs under a single controller, beside one loop on every rank
	$(CPU) $(BIN)/python benchmarks/controller.py
	$(CPU) $(BIN)/python benchmarks/controller.py --calls

bench-client: install  ## what a request costs the client, and what each way to pause costs generation
	$(CPU) $(BIN)/python benchmarks/client.py
	$(CPU) $(BIN)/python benchmarks/client.py --pauses

bench-rollout-workers: install  ## episodes per second and event-loop lag by rollout.workers
	$(CPU) $(BIN)/python benchmarks/rollout_workers.py

bench-gateway: install  ## what the gateway for agents adds to a request, samples per episode
	$(CPU) $(BIN)/python benchmarks/gateway.py

bench-server: install  ## the embedded server beside model.generate
	$(CPU) $(BIN)/python benchmarks/server_throughput.py

bench-grpo: install  ## a GRPO step beside TRL's
	$(CPU) $(BIN)/python benchmarks/grpo_vs_trl.py

bench-convert: install  ## converting checkpoints beside copying them
	$(CPU) $(BIN)/python benchmarks/convert.py

first-day:  ## all probes of one GPU, by PYTHON's own torch (SECONDS=560 PROBES="adam head" ARGS=--again)
	PYTHONPATH=. $(PYTHON) benchmarks/first_day.py $(PROBES) $(if $(SECONDS),--seconds $(SECONDS)) $(ARGS)

bench-gpu:  ## how much of a GPU train_batch uses: PYTHON's own torch, as for test-gpu
	PYTHONPATH=. $(PYTHON) benchmarks/gpu_train.py

constraints:  ## pin what Python 3.11 to 3.13 install as constraints/cpu.txt (ARGS=--upgrade: newest)
	UV_FIND_LINKS= $(UV) pip compile --quiet --universal --python-version 3.11.0 --no-header \
		--no-annotate --no-emit-index-url --extra dev \
		--upgrade-package "$(TORCH)" $(ARGS) \
		pyproject.toml --output-file constraints/cpu.txt

clean:  ## remove what the targets made, except runs/ and downloaded models
	rm -rf $(VENV) $(SGLANG_VENV) $(VERIFIERS_VENV) $(TE_HOME) $(MCORE_HOME) $(WHEEL_VENV) $(STRANGER) .venv-uv
	rm -rf build dist site *.egg-info
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
