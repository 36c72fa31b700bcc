# Everything a person needs: `make help`.

SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
RUN_DIR := runs/tiny_lm

# Tests train on the CPU, one thread a rank, and build nothing.
export DS_ACCELERATOR ?= cpu
export OMP_NUM_THREADS ?= 1
export PYTHONDONTWRITEBYTECODE := 1

# $(call part,NAME,COMMAND): run a part of the tests and print how long it took.
define part
@started=$$(date +%s); echo "== $(1)"; ( $(2) ); status=$$?; \
echo "== $(1): $$(( $$(date +%s) - started )) s"; exit $$status
endef

PYTEST := $(BIN)/coverage run -m pytest -q
# Tests of commands that need the checkpoints that DeepSpeed wrote, which are made once a part.
ABOUT_CHECKPOINTS := tests/cli/test_consolidate.py tests/cli/test_verify.py

.PHONY: help
help: ## show this
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | column -t -s '|'

$(INSTALLED): setup.cfg pyproject.toml constraints.txt
	@test ! -L $(VENV) || { \
		echo "error: $(VENV) is a link; installing would change the environment of another checkout"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { \
		echo "error: $(PYTHON) cannot make a virtual environment; on Debian: apt-get install python3-venv"; exit 2; }
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo "error: $(BIN)/python is older than Python 3.10; remove $(VENV) and set PYTHON=python3.X"; exit 2; }
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	@touch $@

.PHONY: install
install: $(INSTALLED) ## make .venv with the project and its pinned dependencies

.PHONY: quickstart
quickstart: $(INSTALLED) ## config in, weights out, and a killed run in between: the whole tour in one go
	$(BIN)/python examples/tiny_lm/quickstart.py --run-dir "$(RUN_DIR)"

.PHONY: check
check: $(INSTALLED) ## formatting, lint, types, import rules: seconds
	$(BIN)/ruff format --check -q
	$(BIN)/ruff check -q
	$(BIN)/mypy
	$(BIN)/lint-imports

.PHONY: format
format: $(INSTALLED) ## put the code into its format
	$(BIN)/ruff format -q
	$(BIN)/ruff check -q --fix

.PHONY: test
test: test-packages test-static test-foundation test-config test-consolidate test-resilience test-doctor test-quickstart coverage ## all that CI runs

.PHONY: test-packages
test-packages:
	@.ci/packages

.PHONY: test-static
test-static: $(INSTALLED)
	$(call part,static,$(MAKE) -s check)
	@rm -f .coverage .coverage.*

.PHONY: test-foundation
test-foundation: $(INSTALLED)
	$(call part,foundation,$(PYTEST) tests/foundation tests/cli tests/docs tests/contract \
		$(addprefix --ignore=,$(ABOUT_CHECKPOINTS)))

.PHONY: test-config
test-config: $(INSTALLED)
	$(call part,config,$(PYTEST) tests/config tests/env tests/plan tests/advise)

.PHONY: docs
docs: $(INSTALLED) ## write the pages that come from the code
	$(BIN)/python docs/generate.py

.PHONY: bench
bench: $(INSTALLED) ## measure linting, logs, consolidating, the guard's work and stall; tables go to docs/ (20 GB of disk, an hour)
	$(BIN)/python benchmarks/lint.py
	$(BIN)/python benchmarks/diagnose.py
	@for size in 340M 1.5B; do for stage in 2 3; do for ranks in 2 8; do \
		$(BIN)/python benchmarks/consolidate.py --size $$size --stage $$stage --ranks $$ranks || failed=1; \
	done; done; done; \
	$(BIN)/python benchmarks/step_overhead.py || failed=1; \
	$(BIN)/python benchmarks/stall.py || failed=1; exit $${failed:-0}

.PHONY: corpus
corpus: $(INSTALLED) ## compare the linter with DeepSpeed's parser on the configs of a folder: CORPUS=folder
	@test -d "$(CORPUS)" || { echo "error: say which folder: make corpus CORPUS=path/to/configs"; exit 2; }
	$(BIN)/python tests/corpus.py "$(CORPUS)"

.PHONY: test-consolidate
test-consolidate: $(INSTALLED)
	$(call part,consolidate,$(PYTEST) tests/checkpoint tests/convert $(ABOUT_CHECKPOINTS))

.PHONY: test-resilience
test-resilience: $(INSTALLED)
	$(call part,resilience,$(PYTEST) tests/guardian tests/resilience tests/integrations)

.PHONY: chaos
chaos: $(INSTALLED) ## kill jobs in every way, rows go to docs/chaos.csv: SHARD=k/n (hours; ends and continues at will)
	$(BIN)/python tests/chaos.py --shard "$(or $(SHARD),1/1)" --minutes "$(or $(MINUTES),inf)"

.PHONY: cycles
cycles: $(INSTALLED) ## start and kill CYCLES=200 runs and count what is left; a row goes to docs/cycles.csv
	$(BIN)/python tests/cycles.py --cycles "$(or $(CYCLES),200)"

.PHONY: test-doctor
test-doctor: $(INSTALLED)
	$(call part,doctor,$(PYTEST) tests/doctor)

.PHONY: test-quickstart
test-quickstart: $(INSTALLED)
	$(call part,quickstart,$(PYTEST) tests/examples)

.PHONY: coverage
coverage: $(INSTALLED)
	@$(BIN)/coverage combine -q && $(BIN)/coverage report

.PHONY: clean
clean: ## remove what was built and run; .venv stays
	rm -rf build dist *.egg-info runs .coverage .coverage.* .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
