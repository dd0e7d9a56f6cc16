.PHONY: run test check bench setup clean

PYTHON ?= python3
BIN := .venv/bin
export PYTHONUNBUFFERED := 1

setup: .venv/installed

.venv/installed: pyproject.toml requirements.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

run: setup
	$(BIN)/elastic prepare examples/frozenlake.toml
	$(BIN)/elastic run examples/frozenlake.toml --providers serving,spot

# Tests that only compute share the cores; those with processes and clocks of their own come after them, one by one.
COMPUTING := $(addprefix tests/,core envs model policies report sim traces trainer weights)

test: setup check
	$(BIN)/python -m pytest -n 2 $(COMPUTING)
	$(BIN)/python -m pytest $(addprefix --ignore=,$(COMPUTING))

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

bench: setup
	@for file in benchmarks/*.py; do echo "$$file"; $(BIN)/python $$file --quick --json || exit 1; done

clean:
	rm -rf .venv .cache runs
