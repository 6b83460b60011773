# `make` lists the targets. Each sees first to what it needs: the tools (tools/check.sh), the environment
# (tools/environment.py), the build (setup.py). Doing so again when all is there takes a second.
VENV ?= .venv
BIN := $(VENV)/bin
DEMO = all baseline sdpa --input tests/data/minilm_qkv.safetensors --prefix layer3

# A reader who names an interpreter gets it. Otherwise the environment's own will do, and on a fresh machine python3.
ifeq ($(origin PYTHON),undefined)
    PYTHON := $(shell $(BIN)/python -c '' 2>/dev/null && echo $(BIN)/python || echo python3)
else
    CHOSEN := --chosen
endif
export PIP_ARGS
export PIP_DISABLE_PIP_VERSION_CHECK := 1

STARTED := $(shell date +%s)
say = @printf '[%3d s] %s\n' $$(( $$(date +%s) - $(STARTED) )) $(1)
# Tests on all cores, neighbours on one: they share what they build. ARGS="-n 0" runs them in one process.
PARALLEL = -n auto --dist worksteal
CPP = $(shell find kernels -name '*.cu' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.h')

help:  ## print this
	@echo 'FlashAttention in CUDA, step by step. With Python 3.11 or newer, make and g++:'
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20
	@echo 'Variables:'
	@echo '  PYTHON=python3.12 the interpreter to use; a PyTorch >= 2.11 that it imports is kept'
	@echo '  PIP_ARGS="..."    more arguments for pip install, such as another index to take PyTorch from'
	@echo '  ARGS="..."        more arguments for what the target runs: make test ARGS="-k v03"'
	@echo '  VENV=.venv        where the environment is made'

ifeq ($(shell uname -s),Linux)

demo: build  ## run every version on one layer of a real model, and compare them
	$(call say,'Comparing every version on a layer of all-MiniLM-L6-v2')
	@for dtype in float32 float16; do echo; $(BIN)/flash-tutorial compare $(DEMO) --dtype $$dtype $(ARGS) || exit; done
	$(call say,'Done. Go on with: make lab')

test: build  ## run the whole test suite
	$(call say,'Testing')
	@$(BIN)/python -m pytest -q $(PARALLEL) $(ARGS)

test-full: build  ## the same over every combination of shapes, not only every pair: hours
	$(call say,'Testing every combination of shapes')
	@$(BIN)/python -m pytest -q --full $(PARALLEL) $(ARGS)

lab: build  ## open Jupyter on the notebooks
	$(call say,'Starting Jupyter. Ctrl-C twice stops it')
	@$(BIN)/python -m jupyterlab --ServerApp.root_dir=. --LabApp.default_url=/lab/tree/notebooks $(ARGS)

build: setup  ## build what has changed
	$(call say,'Building the kernels')
	@$(BIN)/python setup.py build_ext --inplace
	@test $(BIN)/flash-tutorial -nt pyproject.toml || \
	    $(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .

docs: build  ## write the tables and pictures of the README files anew
	@$(BIN)/python tools/readme.py

notebooks: build  ## run the notebooks anew, where they are
	$(call say,'Running the notebooks')
	@$(BIN)/jupyter nbconvert --to notebook --inplace --execute --ExecutePreprocessor.record_timing=False notebooks/*.ipynb

lint: setup  ## check the style
	$(call say,'Checking the style')
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/clang-format --dry-run -Werror $(CPP)

format: setup  ## mend the style
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format
	@$(BIN)/clang-format -i $(CPP)

setup: check  ## make the environment
	@$(PYTHON) tools/environment.py --venv $(VENV) --started $(STARTED) $(CHOSEN)

check:
	@sh tools/check.sh $(PYTHON)

else

demo test test-full lab build docs notebooks lint format setup:
	@echo 'This is $(shell uname -s); the kernels build and run on Linux. On macOS and Windows use Docker:'
	@echo '  docker build -t flash-tutorial .'
	@echo '  docker run --rm -it flash-tutorial make demo'
	@echo '  docker run --rm -it flash-tutorial make test'
	@echo '  docker run --rm -it -p 127.0.0.1:8888:8888 flash-tutorial make lab ARGS=--ip=0.0.0.0'
	@echo 'or open this folder in VS Code and choose "Dev Containers: Reopen in Container".'
	@echo 'Under WSL, Windows is a Linux: make works there as it is.'
	@false

endif

clean:  ## remove what was built and cached; to remove the environment too: rm -r .venv
	rm -rf build flash_tutorial/_lib flash_tutorial.egg-info .pytest_cache .ruff_cache .hypothesis
	find flash_tutorial tests tools -name __pycache__ -prune -exec rm -rf {} +

.PHONY: help demo test test-full lab build docs notebooks lint format setup check clean
