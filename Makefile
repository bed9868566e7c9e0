# Everything a fresh machine with Python 3.11+, Java 17+ and make needs is set up by these.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Test processes side by side; they share a broker and a PostgreSQL. Much of a test is waiting.
JOBS ?= 3
# Compiled modules are kept: a run starts hundreds of Python processes, some images say otherwise.
unexport PYTHONDONTWRITEBYTECODE
PYTEST = $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

.PHONY: help setup demo quick test proof long models models-deep check bench audit-truth storm simulate docs format clean

help: ## Show what there is to make
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | sort | expand -t 14

setup: $(READY) ## Make .venv with pinned dependencies, fetch the jars of Kafka and its Spark connector

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Oncely needs Python 3.11 or later; $(PYTHON) is older. Try: make PYTHON=python3.11"; exit 1; }
	@echo "Setting up $(VENV) (once; the downloads are about 600 MB, and pip is silent meanwhile)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable '.[dev]'
	@$(BIN)/python -m oncely.artifacts
	@touch $@

demo: $(READY) ## Run pipelines into a table and files, hurt them, and prove that nothing was lost or doubled
	@$(BIN)/python -m demo

quick: $(READY) ## Run the tests that need no server: unit, properties, contracts on SQLite and in memory
	@$(PYTEST) --no-servers tests/unit tests/properties tests/contracts

test: $(READY) ## Run the tests against real servers, in twenty minutes (make proof: those that need longer)
	@$(BIN)/python -m tests.class_archives
	@$(PYTEST)

proof: JOBS = 4
proof: $(READY) ## Run the long tests: every kind at every crash point, takeovers, expiry, the servers (CI does, too)
	@$(BIN)/python -m tests.class_archives
	@$(PYTEST) -m long

long: proof ## Run the long tests, and let hypothesis search for new examples
	@$(PYTEST) --hypothesis-profile search tests/properties tests/unit

models: $(READY) ## Check the TLA+ models of the protocols, and that each mistake is found
	@$(BIN)/python -m models.check

models-deep: $(READY) ## Check the models in larger sizes, which takes hours
	@$(BIN)/python -m models.check --deep

check: $(READY) ## Lint, format, types, import layers
	@$(BIN)/ruff check src tests demo bench truth storm simulate models docs packaging
	@$(BIN)/ruff format --check src tests demo bench truth storm simulate models docs packaging
	@$(BIN)/mypy
	@$(BIN)/lint-imports

bench: $(READY) ## Measure against Spark's sinks and joins, quixstreams and Kafka Streams (30 minutes)
	@$(BIN)/python -m bench

audit-truth: $(READY) ## Throw 10,000 damages at tables, files, topics and Delta tables; the audit must find each
	@$(BIN)/python -m truth

storm: $(READY) ## Workers join, leave, are killed and paused for five minutes; nothing may be lost or doubled
	@$(BIN)/python -m storm

simulate: $(READY) ## Run the worker against a scripted broker and ledger, 20,000 seeds, and find each mistake
	@$(BIN)/python -m simulate

docs: $(READY) ## Write the documentation as a site: build/docs/index.html
	@$(BIN)/python -c 'import material' 2>/dev/null || $(BIN)/python -m pip install --quiet \
		--disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet
	@echo "build/docs/index.html"

format: $(READY) ## Format the code
	@$(BIN)/ruff check --fix-only --quiet src tests demo bench truth storm simulate models docs packaging
	@$(BIN)/ruff format src tests demo bench truth storm simulate models docs packaging

clean: ## Remove what was built; downloads in the cache stay
	rm -rf build dist .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
