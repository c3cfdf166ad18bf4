# Two commands matter: `make demo` and `make test`. Both make .venv first if it is not there.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
# A process that measures itself must not share its cores with a pool of math threads.
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: demo stack test lint types unit bench docs clean

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[torch]' $$(cat requirements-dev.txt)
	touch $(STAMP)

# With STACK=1 into a real collector and Prometheus.
demo: $(STAMP)
	$(BIN)/$(if $(STACK),python -m tools.stack,otel-ddp) demo --inject backward:1:30ms

stack: $(STAMP)
	$(BIN)/python -m tools.stack

test: lint types unit

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .

types: $(STAMP)
	$(BIN)/mypy --no-error-summary

unit: $(STAMP)
	$(BIN)/python -m pytest

bench: $(STAMP)
	$(BIN)/python bench/bench.py

docs: $(STAMP)
	$(BIN)/python tools/docs.py

clean:
	rm -rf .venv
