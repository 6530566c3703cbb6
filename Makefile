# Two commands do everything:  make demo   and   make test
# Both make the environment in .venv first. llama.cpp is compiled once (about ten minutes on two cores); pip keeps the
# built wheel in its cache, so the next environment on this machine takes seconds.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ready

# The image tools of llama.cpp are a third of its compile and unused here. Set CMAKE_ARGS yourself for a GPU build, for
# example CMAKE_ARGS="-DGGML_CUDA=on -DLLAVA_BUILD=OFF".
export CMAKE_ARGS ?= -DLLAVA_BUILD=OFF

# The tests start hundreds of nodes; without bytecode on disk each compiles its modules anew for most of a second.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test natlab lint format lock dist bench clean

demo: $(STAMP)
	$(BIN)/swarmnode demo --tokens 120 --temperature 0.6 --seed 2

# Three at once also on two cores: a third of the time is waiting, for processes, links and time-outs.
test: $(STAMP)
	$(BIN)/python -m pytest -n 3 --dist loadgroup tests

# Every kind of NAT against every other, in network namespaces (as root): what connects, how, and how fast.
natlab: $(STAMP)
	$(BIN)/python -m tests.natlab.matrix

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Every version with its hashes; made for any platform from the bounds in pyproject.toml. The images of deploy/ have the
# same versions.
COMPILE := $(BIN)/uv pip compile --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-annotate \
  --custom-compile-command "make lock" --quiet
lock: $(STAMP)
	$(COMPILE) --extra dev --output-file requirements.lock pyproject.toml
	$(COMPILE) -c requirements.lock --output-file deploy/relay/requirements.txt deploy/relay/requirements.in
	$(COMPILE) -c requirements.lock --output-file deploy/node/requirements.txt pyproject.toml

# The source distribution and the wheel, in dist/.
dist: $(STAMP)
	$(BIN)/uv build --no-build-isolation --python $(BIN)/python --out-dir dist

bench: $(STAMP)
	$(BIN)/swarmnode bench engine
	$(BIN)/swarmnode bench transport

$(STAMP): requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python tools/install.py requirements.lock
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
