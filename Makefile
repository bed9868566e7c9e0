# Everything a fresh machine with Python 3.11+, Java 17+ and make needs is set up by these.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Test processes side by side, each with servers of its own: much of a test is waiting.
JOBS ?= 3

.PHONY: help setup demo test proof long models models-deep check bench format clean

help: ## Show what there is to make
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | sort | expand -t 14

setup: $(READY) ## Make .venv with pinned dependencies, fetch the jars of Kafka and its Spark connector

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Oncely needs Python 3.11 or later; $(PYTHON) is older. Try: make PYTHON=python3.11"; exit 1; }
	@echo "Setting up $(VENV) (once; the downloads are about 600 MB)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable '.[dev]'
	@$(BIN)/python -m oncely.artifacts
	@touch $@

demo: $(READY) ## Run pipelines into a table and files, hurt them, and prove that nothing was lost or doubled
	@$(BIN)/python -m demo

test: $(READY) ## Run the tests against real servers (make long: those that wait for minutes)
	@$(BIN)/python -m tests.class_archives
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

proof: $(READY) ## Run the Kafka sink's crash points: a kill before and after every call (CI does, too)
	@$(BIN)/python -m tests.class_archives
	@$(BIN)/python -m pytest -m long -n $(JOBS) --dist loadfile \
		tests/scenarios/test_kafka_*.py tests/scenarios/test_files_crash_points.py

long: $(READY) ## Run the tests that wait for minutes (the Kafka sink's crash points, lost frames, expiry)
	@$(BIN)/python -m tests.class_archives
	@$(BIN)/python -m pytest -m long -n $(JOBS) --dist loadfile
	@$(BIN)/python -m pytest -n $(JOBS) --hypothesis-profile search tests/properties tests/unit

models: $(READY) ## Check the TLA+ models of the protocols, and that each mistake is found
	@$(BIN)/python -m models.check

models-deep: $(READY) ## Check the models in larger sizes, which takes hours
	@$(BIN)/python -m models.check --deep

check: $(READY) ## Lint, format, types, import layers
	@$(BIN)/ruff check src tests demo bench models
	@$(BIN)/ruff format --check src tests demo bench models
	@$(BIN)/mypy
	@$(BIN)/lint-imports

bench: $(READY) ## Measure against Spark's JDBC, Kafka and Avro sinks, quixstreams and Kafka Streams (20 minutes)
	@$(BIN)/python -m bench

format: $(READY) ## Format the code
	@$(BIN)/ruff check --fix-only --quiet src tests demo bench models
	@$(BIN)/ruff format src tests demo bench models

clean: ## Remove what was built; downloads in the cache stay
	rm -rf build dist .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
