# Everything a fresh machine with Python 3.11+, Java 17+ and make needs is set up by these.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Test processes side by side; they share a broker and a PostgreSQL. Much of a test is waiting.
JOBS ?= 4
# Seeds of workers that are simulated, and an eighth as many of runs in batches.
SEEDS ?= 3000
# Where long tests and those of either runtime are: each process need not collect the others.
LONG := tests/scenarios tests/contracts tests/unit/decode
# A cargo of rustup without a toolchain only prints how to get one.
CARGO := cargo --version >/dev/null 2>&1
NATIVE_TESTS := tests/properties/test_native_decoders.py tests/properties/test_native_rows.py \
	tests/contracts/test_native_gather.py tests/contracts/test_kafka_columns.py \
	tests/contracts/test_exact_ranges.py tests/contracts/test_group_consumer.py
LIBASAN = $(shell gcc -print-file-name=libasan.so)
FUZZ = PYTHONPATH=. $(BIN)/python native/fuzz/corpus.py
SECONDS ?= 1800
# Seconds of one input, of which two suffice by far, and megabytes of the process and of one allocation.
FUZZ_BOUNDS = -timeout=10 -report_slow_units=2 -rss_limit_mb=1024 -malloc_limit_mb=16
PYTHON_LIBRARY = $(shell $(BIN)/python -c 'import sysconfig; print(sysconfig.get_config_var("LIBDIR"))')
RUST_HOST = $(shell rustc +nightly -vV | sed -n 's/host: //p')
# Compiled modules are kept: a run starts hundreds of Python processes, some images say otherwise.
unexport PYTHONDONTWRITEBYTECODE
# What tests need beside the packages, made once.
PREPARE = $(BIN)/python -m tests.class_archives & $(BIN)/python -m tests.s3tools; wait
PYTEST = $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

.PHONY: help setup demo quick test proof long spark-versions models models-deep check bench audit-truth storm simulate docs native native-sanitized native-fuzz wheels format clean

help: ## Show what there is to make
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | sort | expand -t 14

setup: $(READY) ## Make .venv with pinned dependencies and, where cargo is, oncely-native; fetch Kafka and PostgreSQL's driver

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Oncely needs Python 3.11 or later; $(PYTHON) is older. Try: make PYTHON=python3.11"; exit 1; }
	@echo "Setting up $(VENV) (once; the downloads are about 600 MB, and pip is silent meanwhile)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable '.[dev]'
	@$(BIN)/python -m oncely.artifacts
	@touch $@
	@if $(CARGO); then $(MAKE) --no-print-directory native || echo "Going on without oncely-native, which is optional"; \
		else echo "Not built: oncely-native, the optional native code (make native, which needs cargo)"; fi

demo: $(READY) ## Run pipelines into a table and files, hurt them, and prove that nothing was lost or doubled
	@$(BIN)/python -m demo

quick: $(READY) ## Run the tests that need no server: unit, properties, contracts on SQLite and in memory
	@$(PYTEST) --no-servers tests/unit tests/properties tests/contracts

test: $(READY) ## Run the tests against real servers, in half an hour on two cores (make proof: those that need longer)
	@$(PREPARE)
	@$(PYTEST)

proof: JOBS = 5
proof: export ONCELY_NATIVE = off
proof: $(READY) ## Run without oncely-native the long tests (every crash point, servers that have changed), and a run, a kill and a transform a kind on Spark
	@$(PREPARE)
	@unchanged="$$($(BIN)/python -m tests.embedded_servers)" && \
		$(PYTEST) -m "(long or both) and not deep $$unchanged" --runtime spark $(LONG)
	@$(BIN)/python -m tests.embedded_servers --record

long: proof ## Run the long tests, those of the servers and at every step, too, and let hypothesis search for new examples
	@$(PYTEST) -m "deep or embedded" $(LONG)
	@$(PYTEST) --hypothesis-profile search tests/properties tests/unit

spark-versions: $(READY) ## Run the main scenarios on the oldest and on the newest supported Spark (20 minutes)
	@$(BIN)/python -m tests.spark_versions 3.5.9 4.3.0

models: $(READY) ## Check the TLA+ models of the protocols that have changed, and that each mistake is found
	@$(BIN)/python -m models.check

models-deep: $(READY) ## Check all models again, and in larger sizes, which takes hours
	@$(BIN)/python -m models.check --deep

check: $(READY) ## Lint, format, types, import layers, and the size of the code
	@$(BIN)/ruff check src tests demo bench truth storm simulate models docs packaging native/fuzz
	@$(BIN)/ruff format --check src tests demo bench truth storm simulate models docs packaging native/fuzz
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python -m tests.size

bench: $(READY) ## Measure against Spark's sinks and joins, quixstreams and Kafka Streams (30 minutes)
	@$(BIN)/python -m bench

audit-truth: $(READY) ## Throw 10,000 damages at tables, files, topics and Delta tables; the audit must find each
	@$(BIN)/python -m truth

storm: $(READY) ## Workers join, leave, are killed and paused for five minutes; nothing may be lost or doubled
	@$(BIN)/python -m storm

simulate: $(READY) ## Run workers and batches against a scripted broker and ledger, and find each mistake (SEEDS=12000: more)
	@$(BIN)/python -m simulate --seeds $(SEEDS)

docs: $(READY) ## Write the documentation as a site: build/docs/index.html
	@$(BIN)/python -c 'import material' 2>/dev/null || $(BIN)/python -m pip install --quiet \
		--disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet
	@echo "build/docs/index.html"

native: $(READY) ## Build and install oncely-native, which reads and decodes several times faster (needs cargo)
	@$(CARGO) || { echo "oncely-native is not built: there is no cargo here (Rust 1.85 or later)"; exit 1; }
	@echo "Building oncely-native (a minute and a half at first)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --force-reinstall --no-deps ./native
	@$(BIN)/python -c 'import oncely_native'

# A wheel for each platform, not for each Python (abi3). With zig it is linked for glibc 2.17.
wheels: $(READY) ## Build the wheels of both packages for a release: dist/ (needs cargo)
	@$(CARGO) || { echo "The wheel of oncely-native is not built: there is no cargo here (Rust 1.85 or later)"; exit 1; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt maturin ziglang
	@$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	@PATH="$(CURDIR)/$(BIN):$$PATH" maturin build --quiet --release --manifest-path native/Cargo.toml --out dist \
		$(if $(filter Linux,$(shell uname)),--zig --compatibility manylinux2014)
	@ls dist

# Processes that tests start, also JVMs, are preloaded too: these handle SIGSEGV themselves.
native-sanitized: $(READY) ## Run the tests of oncely-native under AddressSanitizer (needs a nightly Rust and GCC's libasan)
	@cargo +nightly --version >/dev/null 2>&1 && test -e "$(LIBASAN)" \
		|| { echo "There is no nightly Rust here (rustup toolchain install nightly), or no libasan of GCC"; exit 1; }
	@RUSTFLAGS="-Zsanitizer=address -Zexternal-clangrt" cargo +nightly build --quiet --release \
		--manifest-path native/Cargo.toml --target $(RUST_HOST) --target-dir build/sanitized
	@cp build/sanitized/$(RUST_HOST)/release/liboncely_native.so build/sanitized/oncely_native.so
	@LD_PRELOAD=$(LIBASAN) ASAN_OPTIONS=detect_leaks=0:handle_segv=0 PYTHONMALLOC=malloc \
		PYTHONPATH=build/sanitized $(BIN)/python -m pytest -s -p no:xdist --timeout=0 $(NATIVE_TESTS)

native-fuzz: $(READY) ## Fuzz the decoders of oncely-native for SECONDS each, and compare the inputs with the references (needs cargo-fuzz)
	@cargo +nightly fuzz --version >/dev/null 2>&1 \
		|| { echo "There is no cargo-fuzz here (rustup toolchain install nightly; cargo install cargo-fuzz)"; exit 1; }
	@$(FUZZ) prepare build/fuzz
	@for target in json avro; do (cd native && ONCELY_GIVEN=../build/fuzz/$$target/given ASAN_OPTIONS=detect_leaks=0 \
		LD_LIBRARY_PATH=$(PYTHON_LIBRARY) PYO3_PYTHON=$(CURDIR)/$(BIN)/python cargo +nightly fuzz run \
		--target-dir ../build/fuzz/target $$target ../build/fuzz/$$target/inputs -- \
		-max_total_time=$(SECONDS) -max_len=2048 $(FUZZ_BOUNDS) -verbosity=0 -print_final_stats=1) || exit 1; done
	@$(FUZZ) compare build/fuzz

format: $(READY) ## Format the code, and record a smaller size of it
	@$(BIN)/ruff check --fix-only --quiet src tests demo bench truth storm simulate models docs packaging native/fuzz
	@$(BIN)/ruff format src tests demo bench truth storm simulate models docs packaging native/fuzz
	@$(BIN)/python -m tests.size --record

clean: ## Remove what was built; downloads in the cache stay
	rm -rf build dist native/target .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
