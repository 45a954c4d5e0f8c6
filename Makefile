# Targets for users (serve) and contributors (test, lint, ...); `make help` lists them.
# Needs Python 3.11 or newer with venv, and nothing else: the rest is installed into .venv from uv.lock.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV ?= .venv
PORT ?= 8000
MANIFEST ?= examples/smollm2.yaml
TESTS ?= tests
ARGS ?=
SEEDS ?= 500
SEED ?=
SECONDS ?= 600
NODES ?= 2
TARGETS ?= operator router runtime

BIN := $(VENV)/bin
SYNC := UV_PROJECT_ENVIRONMENT=$(VENV) UV_PYTHON=$(BIN)/python UV_PYTHON_DOWNLOADS=never \
	UV_HTTP_TIMEOUT=$${UV_HTTP_TIMEOUT:-120} $(BIN)/uv sync --locked --inexact

.PHONY: help serve test test-tools lint format docs crds sim sim-full chaos bench install install-dev clean
.PHONY: images images-offline images-lock
.PHONY: cluster-up cluster-env cluster-load cluster-down e2e e2e-full

help: ## show this list
	@echo "usage: make TARGET [PORT=$(PORT)] [PYTHON=$(PYTHON)]"
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

serve: install ## install, fetch the demo model, serve examples/smollm2.yaml on 127.0.0.1:PORT; Ctrl-C stops all
	@exec $(BIN)/kvferry up $(MANIFEST) --port $(PORT)

test: install-dev ## install what the tests need, then run them (TESTS=path, ARGS="pytest options")
	$(BIN)/python -m $(if $(filter tests,$(TESTS)),tests,pytest $(TESTS)) $(ARGS)

test-tools: ## build what tests on a Kubernetes API server need (kube-apiserver, etcd, kubectl, Helm) with Go, once
	e2e/tools/build.sh apiserver helm

images: ## build TARGETS (operator router runtime) with Docker; docs/images.md tells the arguments
	@images/build.sh $(TARGETS)

images-offline: install-dev ## the same where Docker reaches no network; needs root
	@PYTHON=$(BIN)/python images/offline.sh $(TARGETS)

images-lock: install-dev ## write what images install, from uv.lock
	$(BIN)/python images/lock.py

cluster-up: install-dev ## make a kind cluster of NODES nodes with our images; needs Docker, or root on Debian (e2e/README.md)
	@PYTHON=$(BIN)/python e2e/cluster/cluster.sh up $(NODES)

cluster-env: ## print what a shell needs for that cluster, to be evaluated
	@e2e/cluster/cluster.sh env

cluster-load: install-dev ## make our images anew and load them into that cluster
	@PYTHON=$(BIN)/python e2e/cluster/cluster.sh load

cluster-down: ## delete that cluster
	@e2e/cluster/cluster.sh down

e2e: install-dev ## test on that cluster, or on one made for the run, or on KUBECONFIG's (ARGS="pytest options")
	@PYTHON=$(BIN)/python NODES=$(NODES) e2e/run.sh -m "not full" $(ARGS)

e2e-full: install-dev ## the same, and faults of pods, nodes and the API server
	@PYTHON=$(BIN)/python NODES=$(NODES) e2e/run.sh $(ARGS)

lint: install-dev ## ruff, formatting, import layers, mypy strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

format: install-dev ## format the code and fix what ruff can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: install-dev ## write the documentation that is generated from the code
	$(BIN)/python -m kvferry_operator.api.reference > docs/manifest.md

crds: install-dev ## write the CRDs that are generated from the manifest's types, into crds/ and the chart
	$(BIN)/python -m kvferry_operator.api.crds crds charts/kvferry/files/crds

sim: install-dev ## simulate SEEDS fault schedules of router, prefill and decode in one process
	KVFERRY_SIM_SEEDS=$(SEEDS) $(BIN)/python -m pytest tests/simulation $(ARGS)

sim-full: install-dev ## simulate 5000 fault schedules; a failing seed is shrunk and printed
	$(BIN)/python -m tests.simulation --seeds 5000 $(ARGS)

chaos: install-dev ## 10 minutes of faults on real processes in network namespaces, with a report (SECONDS, SEED); needs root
	$(BIN)/python -m tests.chaos --seconds $(SECONDS) $(if $(SEED),--seed $(SEED)) $(ARGS)

bench: install-dev ## run every benchmark; benchmarks/README.md explains the figures
	@set -e; for script in benchmarks/[a-z]*.py; do echo "== $$script"; $(BIN)/python $$script; done

install: $(VENV)/.stamp-runtime ## create .venv with what serving needs
install-dev: $(VENV)/.stamp-dev ## create .venv with what tests and checks need

clean: ## remove .venv and caches; models and state folders stay
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# ---- environment ----

$(VENV)/.stamp-python:
	@command -v $(PYTHON) >/dev/null 2>&1 || { \
		echo "kvferry needs Python 3.11 or newer; there is no '$(PYTHON)'. Say which with: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "kvferry needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) -V 2>&1). Say which with: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
		echo "'$(PYTHON)' has no venv module; install it (on Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.stamp-uv: $(VENV)/.stamp-python
	$(BIN)/python -m pip install --disable-pip-version-check 'uv>=0.8'
	@touch $@

$(VENV)/.stamp-runtime: $(VENV)/.stamp-uv pyproject.toml uv.lock
	$(SYNC) --extra runtime --extra router
	@touch $@

$(VENV)/.stamp-dev: $(VENV)/.stamp-uv pyproject.toml uv.lock
	$(SYNC) --extra dev
	@touch $@ $(VENV)/.stamp-runtime
