# Every verb sets up what it needs first (see .ci/setup); once set up, that costs nothing.
# The text after ## is what `make help` prints.

PYTHON := .venv/bin/python
.DEFAULT_GOAL := help
.PHONY: help setup run test bench claims lab campaign nightly arm64 deploy engines fmt lint types rooms clean wheels
.PHONY: set-up-to-run set-up-to-test set-up-to-deploy compiled

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: set-up-to-test ## install everything: Debian packages (root or sudo), .venv, pinned dependencies

set-up-to-run:
	@.ci/setup run

set-up-to-test:
	@.ci/setup test

set-up-to-deploy:
	@.ci/setup deploy

# Where it fails g35 is run interpreted, and what failed has been said.
compiled: set-up-to-run ## machine code of the hot modules, where it is not of these sources
	@$(PYTHON) .ci/compile || true

run: compiled ## enclosures, agent, mount, a verified replay: all of it; TRACE=FILE, TRANSPORT=tcp
	@.venv/bin/g35 run $(if $(TRACE),--trace '$(TRACE)') $(if $(TRANSPORT),--transport '$(TRANSPORT)') $(ARGS)

test: set-up-to-test $(if $(filter-out unit% pair% sim% rules%,$(RUNG)),compiled) ## ruff, mypy, import rules, all tests but the nightly ones; RUNG=unit (pair sim rules system lab) for one rung
ifdef RUNG
	@$(PYTHON) -m pytest tests/$(RUNG) $(ARGS)
else
	@$(PYTHON) -m tests.support.rungs.all_rungs $(ARGS)
endif

bench: set-up-to-test compiled ## the numbers, with their floors, into build/bench.json
	@mkdir -p build
	@.venv/bin/g35 bench --json build/bench.json $(ARGS)
ifndef ARGS
	@$(PYTHON) -m tests.support.rungs.bench_more build/bench.json
endif

claims: set-up-to-test compiled ## the tables and plots of docs/claims.md, from the trace of the Mooncake paper; minutes
	@$(PYTHON) -m tests.support.rungs.claims_page --plots $(ARGS)

lab: set-up-to-test compiled ## boot a Debian kernel in QEMU and let it judge (tests/lab)
	@.venv/bin/g35 lab $(ARGS)

campaign: set-up-to-test compiled ## every door and policy under every fault, for SECONDS=120; SEED=35; prints a table
	@$(PYTHON) -m tests.support.campaign --seconds $(or $(SECONDS),120) --seed $(or $(SEED),35) $(ARGS)

nightly: set-up-to-test compiled ## before a release: a million fuzzed packets, random and all seeds, long hypothesis runs, slow tests, the lab
	@$(PYTHON) -m tests.support.rungs.nightly $(ARGS)

arm64: set-up-to-deploy ## unit and pair tests on a Debian of aarch64, emulated; every dependency is there for it
	@$(PYTHON) -m tests.support.deploy.arm64 $(ARGS)

deploy: set-up-to-deploy ## the container file step by step, the systemd units under a systemd of their own
	@$(PYTHON) -m tests.support.deploy.deploy_trial $(ARGS)

engines: ## engines for tests/system/engines into .cache/engines, gigabytes each; ENGINES='vllm nixl' for some
	@.ci/engines $(ENGINES)

fmt: set-up-to-test ## format the code
	@.venv/bin/ruff format .
	@.venv/bin/ruff check --fix .

lint: set-up-to-test ## ruff
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .

types: set-up-to-test ## mypy, strict
	@.venv/bin/mypy

rooms: set-up-to-test ## which room may import which
	@.venv/bin/lint-imports

wheels: set-up-to-test ## both wheels, g35 and g35-host-shim, into dist/
	@mkdir -p dist
	@$(PYTHON) -m pip wheel -q --no-deps --no-build-isolation -w dist . ./host_shim
	@rm -rf build/lib build/bdist.* host_shim/build
	@ls -1 dist

clean: ## remove the virtual environment, caches and everything built (downloads in .cache/ stay)
	rm -rf .venv build dist run *.egg-info host_shim/*.egg-info host_shim/build
	rm -rf .cache/compiled .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find agent emulator host_shim nvmeof tests -name __pycache__ -type d -prune -exec rm -rf {} +
