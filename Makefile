# make demo   install, serve on this machine, ask, show acceptance and speed beside plain decoding
# make chat   the same, asked by you
# make test   install and run every test that this machine can run
# make smoke  serve every family of the recipes on this machine's GPU: starts, exact, step time
VENV   ?= .venv
PYTHON ?= python3
BIN    := $(VENV)/bin

# a Python that has SGLang, this package and a GPU serves there; otherwise ours, on the CPU. -P: the
# package must be installed there, not just lie here, or SGLang would not find it
HAS_GPU := import sys, torch, importlib.util as u; \
  sys.exit(not (torch.cuda.is_available() and u.find_spec("sglang") and u.find_spec("sglang_dflash")))
RUN = if $(PYTHON) -P -c '$(HAS_GPU)' 2>/dev/null; then python=$(PYTHON); \
  else $(MAKE) --no-print-directory venv && python=$(BIN)/python; fi && $$python

.PHONY: demo chat test smoke lint venv clean

demo:
	@$(RUN) launch/demo.py

chat:
	@$(RUN) launch/demo.py --chat

test: venv lint
	@# two files at a time: most of the time servers start, and a processor waits
	@$(BIN)/python -m pytest -n 2 --dist loadfile --durations=15
	@$(BIN)/python tests/smoke/since.py

# with the Python that has SGLang and a GPU, at most 8 minutes; SMOKE="--families gemma4" runs a part
smoke:
	@$(PYTHON) tests/smoke/run.py $(SMOKE)

lint: venv
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

venv: $(VENV)/.installed

# no CUDA package: torch and torchvision are pinned together, SGLang comes without its own pins
$(VENV)/.installed: requirements-cpu.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --progress-bar on -r requirements-cpu.txt
	$(BIN)/pip install --no-deps sglang==0.5.17
	$(BIN)/pip install --no-deps --no-build-isolation -e .
	@# this venv is for a CPU: put the stand-ins for what SGLang lacks there on its path
	@echo $(CURDIR)/sglang_dflash/glue/cpu/path > \
	  $$($(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/sglang_dflash_cpu.pth
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info
