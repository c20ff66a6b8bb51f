# make demo   install, serve here, show plain decoding and DFLASH side by side, speed and acceptance
# make chat   the same, with your own questions
# make test   install and run the tests that this machine can run, but for the longest, and some of
#             them on the oldest SGLang that is served
# make test-long   the tests that make test leaves out: those marked long
# make smoke  serve every recipe family on this machine's GPU: start-up, exactness, step time
# make release   the wheel, and the pairs' weights as a file of their own, into dist/
# the newest and the oldest release of SGLang that are served (sglang_dflash/glue/release.py)
NEWEST := 0.5.23
OLDEST := 0.5.17
# the release that VENV has: make venv SGLANG=0.5.17 VENV=.venv-0.5.17
SGLANG ?= $(NEWEST)
VENV   ?= .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
OLDEST_VENV := $(VENV)-$(OLDEST)
REQUIREMENTS := requirements-cpu-$(SGLANG).txt
COMMANDS := doctor launch offline pd_launch router_launch start
# what runs on the oldest release: the contract, all that attaches to SGLang but the commands,
# servers of a Gemma 4, and weight updates, in which the releases differ most
ON_OLDEST := tests/unit/test_contract_is_complete.py tests/glue tests/e2e/test_start.py \
  tests/e2e/test_families.py --families gemma4 tests/e2e/test_weight_updates.py \
  $(COMMANDS:%=--ignore=tests/glue/test_%.py)
# torch from PyPI is the CUDA build with 2.2 GB of CUDA libraries; this index has CPU wheels
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

# use PYTHON if it has SGLang, this package and a GPU, otherwise our venv on the CPU. -P: the
# package must be installed, not just in the current folder, or SGLang would not find it
HAS_GPU := import sys, torch, importlib.util as u; \
  sys.exit(not (torch.cuda.is_available() and u.find_spec("sglang") and u.find_spec("sglang_dflash")))
RUN = if $(PYTHON) -P -c '$(HAS_GPU)' 2>/dev/null; then python=$(PYTHON); \
  else $(MAKE) --no-print-directory venv && python=$(BIN)/python && if command -v nvidia-smi \
  >/dev/null; then echo "$(PYTHON) has no SGLang for the GPU here: this runs on the CPU"; fi; \
  fi && $$python

# a one-line error before anything is installed
VERSION := import platform, sys; \
  sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)) and "$(PYTHON) is Python " + \
  platform.python_version() + ", this needs 3.11 or 3.12: make PYTHON=python3.12 ...")
RIGHT_PYTHON = if ! command -v $(PYTHON) >/dev/null; then \
  echo "There is no $(PYTHON). Name a Python 3.11 or 3.12: make PYTHON=python3.12 ..."; exit 1; fi; \
  $(PYTHON) -c '$(VERSION)'
INSTALL = $(PYTHON) -m launch.install_cpu $(VENV) --sglang $(SGLANG) --torch-index $(TORCH_INDEX)

.PHONY: demo chat test test-oldest test-long smoke lint venv venv-oldest environment release clean

demo:
	@$(RUN) launch/demo.py

chat:
	@$(RUN) launch/demo.py --chat

# three files at a time, on two cores: starting servers takes most of the time, and leaves cores
# idle. One thread each: OpenMP spins at barriers, and teams on the same cores stall each other
# Files in the order of their names, which has the servers first: xdist would start with those that
# have the most tests, and end with a long one
PYTEST := -m pytest -n 3 --dist loadfile --no-loadscope-reorder --durations=15
OLDEST_LOG := $(OLDEST_VENV)/install.log

# both releases are installed at the same time
test:
	@mkdir -p $(OLDEST_VENV)
	@$(MAKE) --no-print-directory venv-oldest >$(OLDEST_LOG) 2>&1 & installing=$$!; \
	  trap 'kill $$installing 2>/dev/null' INT TERM; \
	  { $(MAKE) --no-print-directory lint && OMP_NUM_THREADS=1 $(BIN)/python $(PYTEST); } || \
	    { kill $$installing 2>/dev/null; exit 1; }; \
	  wait $$installing || { cat $(OLDEST_LOG); \
	    echo "SGLang $(OLDEST) was not installed, so nothing was tested on it: see above"; exit 1; }
	@$(MAKE) --no-print-directory test-oldest
	@$(BIN)/python tests/smoke/since.py

test-oldest: venv-oldest
	@OMP_NUM_THREADS=1 $(OLDEST_VENV)/bin/python $(PYTEST) $(ON_OLDEST)

test-long: venv
	@OMP_NUM_THREADS=1 $(BIN)/python $(PYTEST) --long -m long

venv-oldest:
	@$(MAKE) --no-print-directory venv SGLANG=$(OLDEST) VENV=$(OLDEST_VENV)

# needs a PYTHON with SGLang and a GPU, about 6 minutes; SMOKE="--families gemma4 --out FILE" runs a
# subset
smoke:
	@$(PYTHON) -m tests.smoke.run $(SMOKE)

lint: venv
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

venv: $(VENV)/.installed
	@:

$(VENV)/.installed: requirements-cpu.txt $(REQUIREMENTS) pyproject.toml
	@$(RIGHT_PYTHON)
	@$(INSTALL)
	@touch $@

# the part before the packages of PyPI: a CPU venv, even on a GPU machine, with torch's CPU wheels if
# their index is reachable
environment:
	@$(RIGHT_PYTHON)
	@$(INSTALL) --only-torch

# setuptools would add what an earlier build has left
release: venv
	rm -rf build dist
	$(BIN)/pip wheel --no-deps --no-build-isolation --wheel-dir dist .
	$(BIN)/python -m sglang_dflash.pairs.release_file pack dist

clean:
	rm -rf $(VENV) $(OLDEST_VENV) build dist *.egg-info
