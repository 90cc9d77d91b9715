# `make` lists what there is. Everything runs in .venv, which is made from constraints.txt when it is missing.
SHELL := bash
VENV ?= .venv
PYTHON ?= python3
INSTALLED := $(VENV)/.installed
# What `make demo` and `make lab` need of it; once one that has more is there, it is taken.
FOR_LAB := $(firstword $(wildcard $(INSTALLED)) $(VENV)/.installed-lab)
FOR_DEMO := $(firstword $(wildcard $(INSTALLED) $(VENV)/.installed-lab) $(VENV)/.installed-demo)
export VENV

.DEFAULT_GOAL := help
.PHONY: help install demo lab quick test test-all soak versions platforms docs site-notebooks floors gpu-report check coverage fix fuzz bench bench-core notebooks dist clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*  ## ' $(MAKEFILE_LIST) | sed -E 's/:.*  ## /\t/' | expand -t 12

install: $(INSTALLED)  ## the virtual environment, with everything that development needs

$(INSTALLED): EXTRAS := dev
$(INSTALLED): COURSE := -e ./course
$(VENV)/.installed-lab: EXTRAS := demo,lab
$(VENV)/.installed-demo: EXTRAS := demo
# Python compiles what is imported; to compile all of torch takes longer than the demo.
$(VENV)/.installed-demo $(VENV)/.installed-lab: COMPILE := --no-compile
$(INSTALLED) $(VENV)/.installed-lab $(VENV)/.installed-demo: pyproject.toml course/pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "axon_nb needs Python 3.11 or newer: make PYTHON=python3.12 install")'
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(COMPILE) "$$(grep '^torch==' constraints.txt)"
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(COMPILE) -c constraints.txt -e '.[$(EXTRAS)]' $(COURSE)
	touch $@

demo: $(FOR_DEMO)  ## run the quickstart on 4 ranks and save it, outputs and all, under out/
	$(VENV)/bin/python scripts/run_notebook.py examples/01_quickstart.py --out out

lab: $(FOR_LAB)  ## open the examples in JupyterLab
	$(VENV)/bin/jupyter lab examples

quick: check  ## the checks, and the tests that start no ranks
	scripts/test quick

test: check  ## the quick tests but the longest, a real path for every promise, and what changed; CI runs it
	CHANGED_LIMIT_S=$${CHANGED_LIMIT_S:-300} scripts/test --changed

test-all: check  ## everything, before a part is called done
	scripts/test all

soak: check fuzz  ## hours: 1,000 random faults, all notebooks and exports, hundreds of interrupts
	scripts/test soak

floors:  ## the fast tests and the quickstart with the lowest versions that pyproject.toml allows, then with the newest
	scripts/dependencies.sh

check: $(INSTALLED)  ## lint, format, types, import layers, paired notebooks; of JavaScript too, where npm is
	scripts/check

fix: $(INSTALLED)  ## mend what `check` can mend by itself
	scripts/check --fix

coverage: $(INSTALLED)  ## what `make quick` runs of each file, by coverage
	$(VENV)/bin/python -m coverage erase
	$(VENV)/bin/python -m coverage run -m pytest -q -m "quick and not slow"
	$(VENV)/bin/python -m coverage combine --quiet
	$(VENV)/bin/python -m coverage report

FAULTS ?= 1000
SEED ?= 1
fuzz: $(INSTALLED)  ## random faults on live models: FAULTS=1000 SEED=1, or ONLY=38 for one round again; HOSTS=1: on two hosts
	$(VENV)/bin/python -m tests.fuzz --faults $(FAULTS) --seed $(SEED) $(if $(ONLY),--only $(ONLY)) $(if $(HOSTS),--hosts)

bench-core: $(INSTALLED)  ## cells, starts and memory against the last landing and %%px, in 8 minutes; BASE=COMMIT: another one
	$(VENV)/bin/python -m benchmarks.core $(if $(BASE),--base $(BASE))

bench: $(INSTALLED)  ## measure against stock ipyparallel and plain Gloo; the tables go to benchmarks/results
	$(VENV)/bin/python -m benchmarks.core
	$(VENV)/bin/python -m benchmarks.main_job
	$(VENV)/bin/python -m benchmarks.overhead
	$(VENV)/bin/python -m benchmarks.collectives
	$(VENV)/bin/python -m benchmarks.shared_memory
	$(VENV)/bin/python -m benchmarks.recovery
	$(VENV)/bin/python -m benchmarks.protection
	$(VENV)/bin/python -m benchmarks.undo
	$(VENV)/bin/python -m benchmarks.numbers
	$(VENV)/bin/python -m benchmarks.encryption
	$(VENV)/bin/python -m benchmarks.pipeline
	$(VENV)/bin/python -m benchmarks.sharded
	$(VENV)/bin/python -m benchmarks.tensor
	$(VENV)/bin/python -m benchmarks.data
	$(VENV)/bin/python -m benchmarks.advice
	$(VENV)/bin/python -m benchmarks.views
	$(VENV)/bin/python -m benchmarks.scale
	$(VENV)/bin/python -m benchmarks.assistance
	$(VENV)/bin/python -m benchmarks.planner_time
	$(VENV)/bin/python -m benchmarks.planner

notebooks: $(INSTALLED)  ## write examples/*.ipynb and course/student/*.ipynb from their .py
	$(VENV)/bin/python scripts/pair_notebooks.py
	$(VENV)/bin/python -m scripts.build_course

TORCH ?= 2.11.0 2.12.0 2.13.0 2.14.1 2.15.0
versions: $(INSTALLED)  ## test with several versions of torch: TORCH="2.14.1 newest", PYTHON=python3.13; writes docs/versions.md
	$(VENV)/bin/python scripts/versions.py $(TORCH) --python $(PYTHON)

platforms:  ## try hosted platforms' packages, with this Python and a small torch, and print a table: ONLY="colab kaggle"
	$(PYTHON) scripts/platforms.py $(ONLY)

gpu-report:  ## on a machine with GPUs, with the Python that is there: tests, drills and figures, into docs/gpu_reports
	$(PYTHON) scripts/gpu_box.py --out out/gpu_report; status=$$?; \
	test $$status = 1 || $(PYTHON) -m scripts.gpu_status --add out/gpu_report/report.json; exit $$status

docs: $(INSTALLED)  ## the site, under out/site; with outputs of notebooks that `make site-notebooks` has run
	$(VENV)/bin/python -m sphinx -q -E -W --keep-going -b html docs out/site

site-notebooks: $(INSTALLED)  ## run the examples and the solved course for the site: out/notebooks; many minutes
	$(VENV)/bin/python -m scripts.build_course --edition solved out/solved
	$(VENV)/bin/python scripts/run_notebook.py --out out/notebooks examples/*.py out/solved/*.ipynb

dist: $(INSTALLED)  ## build the source archive and the wheel under dist/, and check them
	rm -rf dist
	$(VENV)/bin/python -m build --no-isolation --outdir dist .
	$(VENV)/bin/python -m twine check --strict dist/*

clean:  ## remove the environment, caches and results
	rm -rf $(VENV) node_modules out build dist .coverage .coverage.* .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
