# `make demo` and `make test` set everything up themselves on a fresh machine; see README.md.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
UNAME  := $(shell uname -s)
# MLX's back end: nothing to choose on macOS; on Linux CUDA where a driver answers, else the CPU build.
EXTRA  ?= $(if $(filter Darwin,$(UNAME)),,$(if $(shell command -v nvidia-smi 2>/dev/null),cuda,cpu))
comma  := ,
DEPS   := dev$(if $(EXTRA),$(comma)$(EXTRA))
STAMP  := $(VENV)/.installed-$(or $(EXTRA),metal)
# MLX's CPU wheel carries reference BLAS; OpenBLAS in front of it makes float32 products 15 times faster.
PRELOAD   = $(if $(filter cpu,$(EXTRA)),$(foreach f,$(firstword $(wildcard /usr/lib/*/openblas-pthread/libopenblas.so.0 /usr/lib64/libopenblasp.so.0)),LD_PRELOAD=$(f)))

# Tests run in as many processes as there are cores (8 at most), with one thread of BLAS each; JOBS=0: in one. Whole files, the longest first: tests/conftest.py.
JOBS   ?= $(shell getconf _NPROCESSORS_ONLN)
SPREAD  = -n $(JOBS) --maxprocesses 8 --dist loadfile --no-loadscope-reorder
PYTEST  = $(PRELOAD) OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest $(SPREAD)

.PHONY: setup system demo test test-all lint format reach frontier off-domain foreign-calibration self-calibration passkeys live transfer clean

setup: system $(STAMP)

system:
	@sh .ci/system.sh "$(EXTRA)"

$(STAMP): pyproject.toml CMakeLists.txt $(wildcard veloxquant_mlx/native/src/*)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[$(DEPS)]'
	@touch $@

demo: setup
	$(BIN)/kvtool demo

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: setup lint
	$(PYTEST) -m "not slow"

test-all: setup lint
	$(PYTEST)

# The figures of the README, from a real model; a miss fails.
reach: setup
	$(PRELOAD) $(BIN)/python -m tests.smollm2.reach

# Quality against bits of every codec, and the targets; an interrupted run goes on.
frontier: setup
	$(PRELOAD) $(BIN)/python -m tests.smollm2.frontier

# What a calibration without texts of a prompt's kind costs.
off-domain: setup
	$(PRELOAD) $(BIN)/python -m tests.smollm2.off_domain

# What one model's calibration is worth in another.
foreign-calibration: setup
	$(PRELOAD) $(BIN)/python -m tests.smollm2.foreign_calibration

# What tables learnt from the cache itself cost, in bits.
self-calibration: setup
	$(PRELOAD) $(BIN)/python -m tests.smollm2.self_calibration

# How many passkeys the caches of every codec still answer, on the shipped models.
passkeys: setup
	$(PRELOAD) $(BIN)/python -m tests.passkeys

# What living on codes costs and saves: decode steps, bytes, forks, passkeys.
live: setup
	$(PRELOAD) $(BIN)/python -m tests.smollm2.live

# What a cache is worth in a fine-tuned sibling of its model.
transfer: setup
	$(PRELOAD) $(BIN)/python -m tests.smollm2.transfer

clean:
	rm -rf $(VENV) .cache build dist .pytest_cache .mypy_cache .ruff_cache
