# Every target does its own set-up: .venv is made on first use, and again when pyproject.toml or constraints.txt change. What runs
# needs less than what is developed (no transformers, no linters), and is installed in two thirds of the time.
PYTHON ?= python3
VENV := .venv
WORKERS ?= 2
SUM := $(shell cat pyproject.toml constraints.txt | cksum | tr -d ' ')
RUNTIME := $(VENV)/.runtime-$(SUM)
STAMP := $(VENV)/.installed-$(SUM)
# Without --no-compile pip compiles 14,000 modules on one core; what is imported is compiled then.
INSTALL = $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e
PY := $(VENV)/bin/python
PYTEST := $(PY) -m pytest
export OMP_NUM_THREADS := 1
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo demo-short test test-submit test-full check lint setup pictures wheel clean

demo: $(RUNTIME)
	$(PY) examples/train_gpt.py

demo-short: $(RUNTIME)
	$(PY) examples/train_gpt.py --short

# What a submission runs besides: whole folders about what is beside the compiler (commands, other software, reports), about private
# interfaces of torch, and those that prove by random draws, faults, further models, a second backend or a second way (the checker)
# what other tests prove.
SUBMIT := $(addprefix tests/,capture/mathematics checker cli docs dryrun e2e/compiled e2e/control_flow e2e/elastic e2e/models e2e/packed \
	fuzz integrations machine_report report runtime/compat runtime/faults runtime/report runtime/tensors runtime/transfer software \
	solve/processes validate verification)
# A worker takes half of the tests, in order, so that what the tests of a room share is made once; one that is done takes over half of
# what another has left.
FAST := -m "not slow" -n $(WORKERS) --dist worksteal --durations=10

test: $(STAMP)
	$(PYTEST) $(FAST) $(addprefix --ignore=,$(SUBMIT))

test-submit: $(STAMP)
	$(PYTEST) $(FAST) $(SUBMIT)

# One run a folder of tests, each of which ends: a test of more than three hours writes the stacks of all threads and ends its run.
PART ?= $(filter-out benchmarks data support __pycache__,$(patsubst tests/%/,%,$(wildcard tests/*/)))
ENDS := -o faulthandler_timeout=10800 -o faulthandler_exit_on_timeout=true

test-full: $(STAMP)
	@failed=; for part in $(PART); do \
	    echo "-- tests/$$part"; $(PYTEST) tests/$$part --durations=30 $(ENDS) || failed="$$failed $$part"; \
	done; test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

check: lint
	$(PYTEST) tests/architecture

lint: $(STAMP)
	$(VENV)/bin/ruff check autopar passes cost_models tests examples
	$(VENV)/bin/mypy autopar passes cost_models

setup: $(STAMP)

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "autopar needs Python 3.11 or later: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "no venv module: on Debian, apt-get install python3-venv"; exit 1; }

$(RUNTIME): | $(PY)
	$(INSTALL) .
	@rm -f $(VENV)/.runtime-* $(VENV)/.installed-*
	@touch $@

$(STAMP): | $(PY)
	$(INSTALL) '.[dev]'
	@rm -f $(VENV)/.runtime-* $(VENV)/.installed-*
	@touch $@ $(RUNTIME)

# The pictures of docs/report.md and the README; they need Chromium.
pictures: $(STAMP)
	@mkdir -p build
	$(PY) -m autopar plan llama3-70b --cluster dgx-h100:8 --batch 128 --seq 8192 --dtype bf16 -o build/llama3-70b.json
	cd tests && ../$(PY) -m support.pictures ../build/llama3-70b.json ../docs/pictures

wheel: $(STAMP)
	$(PY) -m pip wheel --quiet --no-deps -w dist .

clean:
	rm -rf $(VENV) build dist *.egg-info
