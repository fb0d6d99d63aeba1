# Two commands for a fresh machine: `make demo` and `make test`. Both set up .venv by themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt
SOURCES := $(wildcard csrc/*.c csrc/*.h) csrc/build_ffi.py setup.py pyproject.toml

.PHONY: demo test test-c test-python lint model bench copy-threshold clean

demo: $(VENV)/.demo $(VENV)/.built
	$(BIN)/shmstore demo $(ARGS)

test: test-c test-python

test-c:
	$(MAKE) --no-print-directory -C tests/c check check-asan check-tsan

test-python: $(VENV)/.dev $(VENV)/.built
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.dev $(VENV)/.built
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(CC) -std=c11 -D_GNU_SOURCE -O2 -Wall -Wextra -Werror -Wshadow -fsyntax-only -Icsrc csrc/*.c

# The protocol's model; needs spin.
model:
	$(PYTHON) model/check.py

bench: $(VENV)/.dev $(VENV)/.built
	$(BIN)/python -m pytest bench --benchmark-only -o addopts= -o python_files='bench_*.py' -q \
		--benchmark-json=$(VENV)/bench.json $(ARGS) > $(VENV)/bench.log || { cat $(VENV)/bench.log; false; }
	$(BIN)/python bench/table.py $(VENV)/bench.json

copy-threshold:
	@mkdir -p build
	@$(CC) -std=c11 -D_GNU_SOURCE -O2 -Icsrc -o build/copy_threshold bench/copy_threshold.c
	@build/copy_threshold

$(VENV)/.venv:
	$(PYTHON) -m venv $(VENV)
	$(PIP) setuptools wheel cffi
	@touch $@

# torch first and by itself: the pin must be in place before anything else asks for a torch.
$(VENV)/.deps: $(VENV)/.venv constraints.txt
	$(PIP) torch
	@touch $@

$(VENV)/.built: $(VENV)/.deps $(SOURCES)
	$(PIP) --no-build-isolation --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.built pyproject.toml constraints.txt
	$(PIP) --no-build-isolation --editable '.[dev]'
	@touch $@

$(VENV)/.demo: $(VENV)/.built pyproject.toml constraints.txt
	$(PIP) --no-build-isolation --editable '.[demo]'
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info shmstore/bindings/_shmstore.*
