# moejax: `make help` lists the targets.
PYTHON ?= python3
EXTRAS ?= train,dev,docs
VENV := .venv
RUN := $(VENV)/bin/python
GIN ?= configs/tiny_cpu.gin
ARGS ?=
SPREAD := -n 2 --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help setup train dry-run lint format test test-fast test-all bench aot-wheels peers trackers docs clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 12

$(VENV)/.stamp: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; \
	    sys.exit(0 if v[:2] == (3, 12) else "moejax needs Python 3.12, and $(PYTHON) is %d.%d: install 3.12, " \
	    "then say where it is: make $(MAKECMDGOALS) PYTHON=python3.12" % v[:2])'
	@echo "making $(VENV) (once; a minute or three)"
	@rm -rf $(VENV) && $(PYTHON) -m venv $(VENV)
	@$(RUN) -m pip install -q --no-compile --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

setup: $(VENV)/.stamp  ## the virtual environment alone (EXTRAS=train,dev,cuda13 on a GPU machine)

train: $(VENV)/.stamp  ## train the main job (GIN=configs/tiny_cpu.gin ARGS='--fresh')
	@$(RUN) train/main.py --gin_file=$(GIN) $(ARGS)

dry-run: $(VENV)/.stamp  ## parameters, bytes per device, FLOPs per token and plan of GIN; runs nothing
	@$(RUN) train/main.py --gin_file=$(GIN) --dry_run $(ARGS)

lint: $(VENV)/.stamp  ## ruff (format, rules), import layers and circles
	@$(VENV)/bin/ruff format --check --quiet . || (echo "lint: make format rewrites these files"; exit 1)
	@$(VENV)/bin/ruff check --quiet .
	@$(VENV)/bin/lint-imports --no-cache > .lint-imports.log || (cat .lint-imports.log; exit 1)
	@rm -f .lint-imports.log; echo "lint: ok"

format: $(VENV)/.stamp  ## let ruff rewrite what it can
	@$(VENV)/bin/ruff format --quiet . && $(VENV)/bin/ruff check --fix --quiet .

test: lint  ## every check and test (8 minutes on two idle cores with cold caches)
	@$(RUN) -m pytest $(SPREAD) $(ARGS)

test-fast: $(VENV)/.stamp  ## the tests that take seconds (a minute and a half)
	@$(RUN) -m pytest $(SPREAD) -m 'not slow and not long' $(ARGS)

test-all: lint  ## with the long repetitions (kills, corruptions)
	@$(RUN) -m pytest $(SPREAD) -m '' $(ARGS)

bench: $(VENV)/.stamp  ## one MoE layer against its baselines
	@$(RUN) tools/bench/moe_layer.py $(ARGS)

docs: $(VENV)/.stamp  ## the site of the documentation, in site/
	@NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --quiet --strict $(ARGS)
	@echo "docs: open site/index.html"

AOT := .aot
$(AOT)/.stamp: constraints.txt | $(VENV)/.stamp
	@echo "installing JAX's CUDA plugin in $(AOT) (once; 142 MB)"
	@rm -rf $(AOT)
	@$(RUN) -m pip install -q --no-compile --disable-pip-version-check --target $(AOT) -c constraints.txt jax-cuda13-plugin
	@touch $@

aot-wheels: $(AOT)/.stamp  ## JAX's CUDA plugin, for tools/aot.py; needs no GPU

PEERS := .peers
PEER_WHEELS := tokamax einshape immutabledict pydantic pydantic-core annotated-types typing-inspection qwix typeguard
$(PEERS)/.stamp: constraints.txt | $(VENV)/.stamp
	@echo "installing tokamax in $(PEERS) (once; 27 MB)"
	@rm -rf $(PEERS)
	@$(RUN) -m pip install -q --no-compile --disable-pip-version-check --no-deps --target $(PEERS) -c constraints.txt $(PEER_WHEELS)
	@touch $@

peers: $(PEERS)/.stamp  ## tokamax in .peers, for tools/bench/grouped_dot.py

TRACKERS := .trackers
$(TRACKERS)/.stamp: constraints.txt | $(VENV)/.stamp
	@echo "installing Weights & Biases and MLflow in $(TRACKERS) (once; 215 MB)"
	@rm -rf $(TRACKERS)
	@$(RUN) -m pip install -q --no-compile --disable-pip-version-check --target $(TRACKERS) -c constraints.txt \
	    wandb mlflow-skinny alembic SQLAlchemy
	@touch $@

trackers: $(TRACKERS)/.stamp  ## Weights & Biases and MLflow in .trackers, for --track=wandb,mlflow

clean:  ## remove the environment, .aot, .peers, .trackers and the compilation cache, never a run
	@rm -rf $(VENV) $(AOT) $(PEERS) $(TRACKERS) .cache *.egg-info
