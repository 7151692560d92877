# The targets that people and CI use. `make help` lists them.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
FAST_TESTS := tests/unit tests/contract tests/model
ALL_TESTS := $(FAST_TESTS) tests/integration tests/multiprocess tests/web
MINUTES ?= 10

.DEFAULT_GOAL := help
.PHONY: help system setup web page web-test web-types screenshot demo test test-gpu verify fix bench soak protos surface clean

WEB := client/web
MODULES := $(WEB)/node_modules/.installed
PAGE := service/paramd_service/control/web/index.html
NPM := $(shell command -v npm 2>/dev/null)

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

system: ## what tests need of the operating system: PostgreSQL, Chromium (Debian; installs them when root)
	@if ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1; then \
		echo "PostgreSQL is installed"; \
	elif [ "$$(id -u)" = 0 ]; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
			apt-get install -y -qq --no-install-recommends postgresql; \
	else \
		echo "PostgreSQL is missing; run: sudo make system" >&2; exit 1; \
	fi
	@if command -v chromium >/dev/null 2>&1; then \
		echo "Chromium is installed"; \
	elif [ "$$(id -u)" = 0 ]; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
			apt-get install -y -qq --no-install-recommends chromium; \
	else \
		echo "Chromium is missing; run: sudo make system" >&2; exit 1; \
	fi

setup: $(STAMP) ## make .venv and install paramd with everything to build and test it

# torch is named with its version, because a bare range takes the newest build and its CUDA
# packages.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check \
		"$$(grep '^torch==' constraints.txt)" -c constraints.txt -e '.[dev]'
	touch $@

web: $(PAGE) ## build the dashboard into the package (Node 20.19 or newer)

$(MODULES): $(WEB)/package-lock.json
	cd $(WEB) && npm ci --silent && touch node_modules/.installed

$(PAGE): $(MODULES) $(WEB)/index.html $(WEB)/vite.config.ts $(shell find $(WEB)/src $(WEB)/public -type f)
	cd $(WEB) && npm run --silent build
	touch $@

page: ## the same, where npm is; without it the control plane says how to build the page
ifdef NPM
	@$(MAKE) --no-print-directory web
else
	@echo "npm is missing: the dashboard is not built, its tests are skipped"
endif

web-test: $(MODULES) ## types, unit tests of the dashboard
	cd $(WEB) && npm run --silent check && npm run --silent test

web-types: setup $(MODULES) ## write openapi.json and the dashboard's types again, after a wanted change
	$(BIN)/python -m tests.contract.openapi_document
	cd $(WEB) && npm run --silent types

screenshot: setup web ## the README's pictures, of a real training
	$(BIN)/python -m benchmarks.screenshot

demo: setup ## train a small GPT on 2 ranks and look into it
	$(BIN)/paramd demo

test: system setup page $(if $(NPM),web-test) ## all tests, with real processes (about 20 minutes on 2 cores)
	$(BIN)/pytest -q -n 2 --dist worksteal $(ALL_TESTS)

test-gpu: setup ## tests that need a CUDA device; skipped, with a reason, where there is none
	$(BIN)/pytest -q tests/gpu

verify: setup ## style, types, import rules, protos, fast tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint
	$(BIN)/buf format --diff --exit-code
	$(BIN)/python protos/generate.py --check
	$(BIN)/pytest -q $(FAST_TESTS)

fix: setup ## format, and mend what can be mended by itself
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/buf format -w

protos: setup ## write the stubs of the protos again
	$(BIN)/buf format -w
	$(BIN)/python protos/generate.py

surface: setup ## write the frozen public surface again, after a wanted change
	$(BIN)/python -m tests.contract.surface

bench: setup ## the benchmarks behind the README's table
	$(BIN)/python -m benchmarks

soak: setup ## long runs with random faults: make soak MINUTES=60 [SEED=n]
	$(BIN)/python -m tests.soak --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

clean: ## remove what was built, not the environments
	rm -rf build dist service/paramd_service/control/web .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find client service tests benchmarks examples protos -name __pycache__ -type d -prune -exec rm -rf {} +
