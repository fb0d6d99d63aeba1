# Two commands for a fresh machine: `make demo` and `make test`. Both set up .venv by themselves.
# What `python -m examples.demo --help` lists goes into ARGS: make demo ARGS="--workers 3".
PYTHON ?= python3
VENV := .venv
VLLM_VENV ?= .venv-vllm
SGLANG_VENV ?= .venv-sglang
BASE_VENV := .venv-base
DIST_VENV ?= .venv-dist
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt
SOURCES := $(wildcard csrc/*/*.[ch]) csrc/build_ffi.py setup.py pyproject.toml

# Hundreds of tests start a Python, which compiles what it imports once, or each time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo demo-announced test test-c test-python test-rust test-base test-newest test-vllm test-sglang dist test-dist lint model fuzz genmc simulate mutants storm survival coverage bench bench-sglang bench-vllm peers tiers copy-threshold docs clean

help: ## what there is to make
	@sed -n 's/^\([a-z-]*\):.* ## /\1\t/p' Makefile | expand -t 16

demo: demo-announced $(VENV)/.demo $(VENV)/.built ## photographs through a processor and a store, to two workers
	$(BIN)/python -m examples.demo $(ARGS)

demo-announced:
	@test -e $(VENV)/.demo || echo "First some minutes to fill $(VENV): about 0.3 GB of packages that pip has not cached are" \
		"fetched, most of it torch for CPUs; with torch for CUDA, pip's default on Linux, some 3 GB."
	@echo "The demo itself takes half a minute to two minutes. With options: make demo ARGS='--workers 3'"

test: test-c test-python ## the C tests, plain and under the sanitizers, then the Python tests

test-c: ## the C tests alone
	$(MAKE) --no-print-directory -j 2 -C tests/c check check-asan check-tsan

# Tests marked `alone` look at what any other may make. ARGS may leave one of the two runs without tests (status 5).
test-python: $(VENV)/.dev $(VENV)/.demo $(VENV)/.built ## the Python tests alone; ARGS='-k name' chooses some
	@$(BIN)/python -m pytest -n 2 --dist loadfile -m 'not slow and not alone' $(ARGS); most=$$?; \
	$(BIN)/python -m pytest -m 'alone and not slow' $(ARGS); \
	case "$$most $$?" in "0 0"$(if $(ARGS), | "0 5" | "5 0")) ;; *) exit 1 ;; esac

# Offline, by any cargo since 1.63; tests/test_rust.py has the tests with Python. clippy is a package of its own.
CARGO ?= cargo
test-rust: ## the Rust crates: tests, warnings, pages, packages
	cd rust && $(CARGO) test --offline --quiet
	cd rust && RUSTDOCFLAGS='-D warnings' $(CARGO) doc --offline --quiet --no-deps
	@case "$$($(CARGO) --version)" in "cargo 1.8"[4-9]*) \
	echo "the crates were not packaged: cargo 1.84 to 1.89 look for shmstore-sys in a registry" ;; \
	*) cd rust && $(CARGO) package --offline --quiet --no-verify --allow-dirty ;; esac
	@if $(CARGO) clippy --version >/dev/null 2>&1; then cd rust && $(CARGO) clippy --offline --quiet --all-targets -- -D warnings; \
	else echo "clippy did not run: it is missing"; fi
	@if $(CARGO) fmt --version >/dev/null 2>&1; then cd rust && $(CARGO) fmt --check; else echo "rustfmt did not run: it is missing"; fi

# In an environment that has only what `pip install .` brings: no torch, and at most 120 MB.
test-base: $(VENV)/.venv ## what works without torch
	$(PYTHON) -m venv --clear --without-pip $(BASE_VENV)
	PIP_PYTHON=$(BASE_VENV)/bin/python $(PIP) .
	$(BASE_VENV)/bin/python tests/without_torch.py
	@size=$$(du -sm $(BASE_VENV) | cut -f1); echo "$$size MB are installed"; test $$size -le 120

# Without constraints.txt, on the newest Python here; three minutes.
test-newest: ## what pip brings today, on the newest Python
	$(PYTHON) tests/newest.py $(ARGS)

# In a real vLLM, with an environment of its own; some 4 GB and, once it is there, 6 minutes.
# Another version than CI's: make test-vllm VLLM=0.33.0 VLLM_VENV=.venv-vllm-0.33.0
test-vllm: $(VLLM_VENV)/.made ## the tests in a real vLLM; 4 GB
	$(VLLM_VENV)/bin/python -m pytest tests/vllm -o addopts=-ra -p no:cacheprovider --timeout 900 $(ARGS)

$(VLLM_VENV)/.made: tests/vllm/environment.py pyproject.toml $(SOURCES)
	$(PYTHON) tests/vllm/environment.py $(VLLM_VENV) $(VLLM)

# In a real SGLang, with an environment of its own of some 3 GB.
test-sglang: $(SGLANG_VENV)/.made ## the tests in a real SGLang; 3 GB
	$(SGLANG_VENV)/bin/python -m pytest tests/sglang -o addopts=-ra -p no:cacheprovider --timeout 900 $(ARGS)

$(SGLANG_VENV)/.made: tests/sglang/environment.py tests/sglang/requirements.txt pyproject.toml $(SOURCES)
	$(PYTHON) tests/sglang/environment.py $(SGLANG_VENV)

# What a release consists of, into dist/, from the last commit. Without the GIL:
# make dist PYTHON=python3.14t DIST_VENV=.venv-dist-3.14t
dist: $(DIST_VENV)/.made ## the sdist and the wheels, into dist/
	$(DIST_VENV)/bin/python -m release.build

# Each artefact in dist/ in an empty environment. All of it: make test-dist ARGS=--whole
test-dist: $(DIST_VENV)/.made ## each file of dist/ in an empty environment
	$(DIST_VENV)/bin/python -m release.check $(if $(wildcard $(VLLM_VENV)/.made),--vllm $(VLLM_VENV)) $(ARGS)

$(DIST_VENV)/.made: constraints.txt
	$(PYTHON) -m venv $(DIST_VENV)
	$(DIST_VENV)/bin/python -m pip --disable-pip-version-check install --quiet -c constraints.txt \
		setuptools wheel cffi ziglang auditwheel abi3audit
	@touch $@

lint: $(VENV)/.dev $(VENV)/.built ## ruff, mypy, clang-format, the warnings of the C compiler
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror csrc/*/*.[ch] tests/c/*.[ch] tests/fuzz/*.c tests/simulate/*.[ch] tests/genmc/*.[ch] bench/*.c examples/c/*.c
	$(CC) -std=c11 -D_GNU_SOURCE -O2 -Wall -Wextra -Werror -Wshadow -fsyntax-only -Icsrc csrc/*/*.c

# The protocol's model; needs spin.
model: ## the protocol's model; needs spin
	$(PYTHON) model/check.py

# The core's C code in all executions that C11 allows, and each memory order made weaker. Needs GenMC, a program:
# make genmc GENMC=/path/to/genmc. Some minutes; ARGS='pin_evict' chooses programs.
genmc: ## all executions of small programs of the core; needs GenMC
	@if [ -x "$(GENMC)" ]; then $(PYTHON) -m tests.genmc "$(GENMC)" $(ARGS); else \
		echo "nothing was checked: GENMC=/path/to/genmc names the checker"; fi

# Bytes that nobody wrote, for all that reads bytes; needs clang, with libFuzzer. 10^7 runs of each: make fuzz ARGS='--runs 10000000'
fuzz: $(VENV)/.fuzz $(VENV)/.built ## bytes that nobody wrote; needs clang
	$(BIN)/python -m tests.fuzz $(ARGS)

# Schedules and deaths from a seed, without processes; 10^8 steps: make simulate STEPS=100000000
STEPS ?= 10000000
simulate: ## schedules and deaths from a seed
	$(PYTHON) -m tests.simulate --steps $(STEPS) $(ARGS)

# Lines of C that no test of C runs, which takes some minutes; then N changes of the others, some 10 seconds each, and
# what notices them.
N ?= 100
mutants: ## changes of a line that no C test notices
	$(MAKE) --no-print-directory -C tests/c coverage
	nice $(PYTHON) -m tests.mutants --count $(N) $(ARGS)

# Processes of one store that are killed and stopped; an hour: make storm MINUTES=60
MINUTES ?= 1
storm: $(VENV)/.dev $(VENV)/.built ## processes that are killed and stopped
	$(BIN)/python -m tests.storm --minutes $(MINUTES) $(ARGS)

bench: $(VENV)/.dev $(VENV)/.built ## times of single calls
	$(BIN)/python -m pytest bench --benchmark-only -o addopts= -o python_files='bench_*.py' -q \
		--benchmark-json=$(VENV)/bench.json $(ARGS) > $(VENV)/bench.log || { cat $(VENV)/bench.log; false; }
	$(BIN)/python bench/table.py $(VENV)/bench.json

# The caches of a real vLLM compared; some 15 minutes.
bench-vllm: $(VLLM_VENV)/.made ## the caches of a real vLLM
	$(VLLM_VENV)/bin/python -m bench.vllm $(ARGS)

# Encoder outputs of real SGLang servers; some 5 minutes.
bench-sglang: $(SGLANG_VENV)/.made ## stored encoder outputs of a real SGLang
	$(SGLANG_VENV)/bin/python -m bench.sglang_encoder $(ARGS)

# Compared with what people use today; writes docs/contributing/benchmarks.md, its plots, and tables into
# docs/guides/pipelines.md and docs/guides/programs.md. Some minutes.
peers: $(VENV)/.bench $(VENV)/.built ## the same work by other libraries, into a page
	$(BIN)/python -m bench.peers $(ARGS)
	$(BIN)/python -m bench.peers.pipelines
	$(BIN)/python -m bench.peers.caches
	$(BIN)/python -m bench.peers.queues

# Back ends of a tier compared with what they are built on; writes its table into docs/guides/beyond-one-host.md. A minute.
tiers: $(VENV)/.dev $(VENV)/.built ## the back ends of a tier, into a page
	$(BIN)/python -m bench.tiers

# What a killed process costs, with what people use today; writes a table into docs/concepts/reliability.md. Some 15
# minutes, and more without `make test-vllm` before it: two ways are vLLM's.
survival: $(VENV)/.bench $(VENV)/.dev $(VENV)/.built ## what a kill costs, and what it costs with other libraries, into a page
	VLLM_VENV=$(VLLM_VENV) $(BIN)/python -m bench.survival $(ARGS)
	$(BIN)/python -m bench.survival.queues

# Lines and branches of the core and of the Python package that no test runs, if tests/c/not_run.txt does not say why; without
# the plug-ins, which their engines import. Some 15 minutes. The next `make` builds the extension anew.
coverage: export COVERAGE_ROOT := $(CURDIR)
coverage: export COVERAGE_FILE := $(CURDIR)/build/coverage/data
coverage: $(VENV)/.coverage $(VENV)/.demo $(VENV)/.built ## lines that no test runs
	rm -rf build/coverage $(VENV)/.built
	mkdir -p -m 1777 build/coverage  # tests become other users
	CC="sh -c 'exec cc \"\$$@\" -O0 --coverage' cc" $(BIN)/python setup.py -q build_clib -b build/coverage -t build/coverage \
		build_ext --inplace --force -t build/coverage
	$(MAKE) --no-print-directory -C tests/c built-for-coverage
	-$(BIN)/python -m coverage run -m pytest -n 2 --dist loadfile -m 'not slow and not alone' $(ARGS)
	-$(BIN)/python -m coverage run -m pytest -m 'alone and not slow' $(ARGS)
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage json --quiet -o build/coverage/python.json
	$(BIN)/python -m coverage report --format=total --precision=1
	$(BIN)/python tests/c/coverage.py build/coverage

copy-threshold: ## from which size on non-temporal stores pay
	@mkdir -p build
	@$(CC) -std=c11 -D_GNU_SOURCE -O2 -Wall -Wextra -Werror -pthread -Icsrc -o build/copy_threshold bench/copy_threshold.c
	@build/copy_threshold

$(VENV)/.venv:
	$(PYTHON) -m venv $(VENV)
	$(PIP) setuptools wheel cffi
	@touch $@

# torch before what asks for one, and by itself: the pin must be in place.
$(VENV)/.torch: $(VENV)/.venv constraints.txt
	$(PIP) torch
	@touch $@

$(VENV)/.built: $(VENV)/.venv $(SOURCES)
	$(PIP) --no-build-isolation --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.torch $(VENV)/.built pyproject.toml constraints.txt
	$(PIP) --no-build-isolation --editable '.[dev]'
	@touch $@

$(VENV)/.bench: $(VENV)/.torch $(VENV)/.built pyproject.toml constraints.txt
	$(PIP) --no-build-isolation --editable '.[bench]'
	@touch $@

$(VENV)/.fuzz: $(VENV)/.dev
	$(PIP) atheris
	@touch $@

$(VENV)/.coverage: $(VENV)/.dev
	$(PIP) 'coverage>=7.10'
	@touch $@

# What the extra `docs` names, without shmstore: the pages are made from its sources.
$(VENV)/.docs: $(VENV)/.venv pyproject.toml constraints.txt
	$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], \
		sep="\n")' > $(VENV)/docs.txt
	$(PIP) -r $(VENV)/docs.txt
	@touch $@

$(VENV)/.demo: $(VENV)/.torch $(VENV)/.built pyproject.toml constraints.txt
	$(PIP) --no-build-isolation --editable '.[demo]'
	@touch $@

# Into site/; a link that leads nowhere is an error.
docs: $(VENV)/.docs ## the pages, into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict --clean $(ARGS)

clean: ## remove all that these commands have made here
	rm -rf $(VENV) $(VLLM_VENV) $(SGLANG_VENV) $(BASE_VENV) .venv-newest $(DIST_VENV) build dist site *.egg-info shmstore/bindings/_shmstore.* shmstore/include shmstore/lib
