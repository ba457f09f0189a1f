# Casemate: every routine command. `make help` lists them.
PYTHON ?= python3
UV := .boot/bin/uv
BIN := .venv/bin
STORAGE ?= runs
STAMP := .venv/.installed
# The image: `make image BASE=... BUILDER=docker BUILD_FLAGS=... SOURCE=<address of this repository>`
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
REVISION = $(shell git rev-parse HEAD)$(if $(shell git status --porcelain),-dirty)
IMAGE ?= casemate:$(VERSION)
BUILDER ?= $(notdir $(firstword $(shell for name in buildah podman docker; do command -v $$name; done)))
IMAGE_ARGS = VERSION=$(VERSION) REVISION=$(REVISION) $(if $(BASE),BASE=$(BASE)) $(if $(SOURCE),SOURCE=$(SOURCE))
# Tests with Ray that need no finished flow: they run beside the others, which take as long.
BESIDE := tests/e2e/test_additions.py tests/e2e/test_own_code.py tests/e2e/test_replications.py \
  tests/e2e/test_import_weights.py tests/e2e/test_remote_data.py tests/ray
# Tests without Ray. Folders are named: a run imports every test module that it looks at.
FAST := tests/unit tests/recipes tests/golden
UNIT := not ray and not e2e and not cluster

.DEFAULT_GOAL := help
.PHONY: help setup demo smoke test test-fast test-cluster check fix lock audit sbom bench docs image ui clean browser postgres

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv with the pinned dependencies and this project
	@echo "setup: .venv is ready"

.boot/bin/uv:
	@echo "setup: bootstrapping uv into .boot"
	@$(PYTHON) -m venv .boot
	@.boot/bin/pip install --quiet --disable-pip-version-check uv 2>/dev/null || .boot/bin/pip install uv

$(STAMP): requirements.lock pyproject.toml | .boot/bin/uv
	@echo "setup: installing the locked packages into .venv (about 6 GB, a minute or two)"
	@test -x $(BIN)/python || $(UV) venv --quiet --python $(PYTHON) .venv
	@$(UV) pip sync --quiet --python .venv --compile-bytecode requirements.lock
	@$(UV) pip install --quiet --python .venv --no-deps --editable .
	@touch $(STAMP)

demo: setup ## run the demo recipe end to end into $(STORAGE)
	@echo "demo: casemate run demo --storage $(STORAGE)"
	@$(BIN)/casemate run demo --storage $(STORAGE)

smoke: setup ## run every ready recipe, shrunk, on images made on the spot
	@$(BIN)/python -m tests.benchmarks.smoke

test: setup browser ## run every test (unit, ray, e2e)
	@echo "test: the command line; beside it stages on Ray and unit tests, both shown at the end"
	@logs=$$(mktemp -d); export OMP_NUM_THREADS=1; unset PYTHONDONTWRITEBYTECODE; \
	  $(BIN)/python -m pytest -q $(BESIDE) -m "not cluster" >$$logs/ray 2>&1 & ray=$$!; \
	  nice -n 19 $(BIN)/python -m pytest -q -n auto $(FAST) -m "$(UNIT)" >$$logs/unit 2>&1 & unit=$$!; \
	  trap "kill $$ray $$unit" INT TERM; \
	  $(BIN)/python -m pytest -q tests/e2e tests/golden/test_keys.py -m "not cluster" $(BESIDE:%=--ignore=%); failed=$$?; \
	  wait $$ray || failed=1; cat $$logs/ray; \
	  wait $$unit || failed=1; cat $$logs/unit; rm -rf $$logs; exit $$failed

test-fast: setup ## run the unit tests only
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto $(FAST) -m "$(UNIT)"

test-cluster: setup postgres ## run the longer tests: servers, several Ray nodes, real kills
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m cluster

browser: # a system Chromium for the tests that look at the report; they skip without one
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || \
	  { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && { \
	    echo "test: installing chromium from the system's packages"; \
	    apt-get update -qq >/dev/null 2>&1 && apt-get install -y -qq chromium >/dev/null 2>&1; }; } || \
	  echo "test: no chromium here; the browser tests will be skipped"

postgres: # a system Postgres for the tests with an MLflow server; they skip without one
	@ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || \
	  { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && { \
	    echo "test-cluster: installing postgresql from the system's packages"; \
	    apt-get update -qq >/dev/null 2>&1 && apt-get install -y -qq postgresql >/dev/null 2>&1; }; } || \
	  echo "test-cluster: no Postgres here; the tests with an MLflow server will be skipped"

check: setup ## lint, format check, types, import contracts, recipes
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/casemate lint --all

fix: setup ## format and apply safe lint fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lock: .boot/bin/uv ## resolve pyproject.toml into requirements.lock, without index URLs
	$(UV) pip compile --quiet --upgrade --universal --python-version 3.11 --no-emit-index-url \
	  --generate-hashes --extra dev pyproject.toml --output-file requirements.lock

audit: setup ## look up known vulnerabilities of the locked packages; fails if it could not
	@$(BIN)/python infra/supply_chain/audit.py

sbom: setup ## list the packages of the runtime environment: dist/casemate.cdx.json (CycloneDX)
	@$(BIN)/python infra/supply_chain/sbom.py

bench: setup ## measure what we promise, beside peers: one table of limit, peer, ours, ratio
	@$(BIN)/python -m tests.benchmarks $(BENCH)

docs: setup ## write the reference pages anew and build all pages as a site: build/site/index.html
	@$(BIN)/python -m infra.docs.reference
	@$(BIN)/python -m infra.docs.site

image: ## build the container image $(IMAGE) with buildah, podman or docker
	@test -n "$(BUILDER)" || { echo "image: needs buildah, podman or docker"; exit 2; }
	$(BUILDER) build --file infra/image/Dockerfile --tag $(IMAGE) \
	  $(if $(findstring buildah,$(BUILDER)),--layers) $(IMAGE_ARGS:%=--build-arg %) $(BUILD_FLAGS) .

ui: setup ## open the MLflow pages of $(STORAGE)
	$(BIN)/mlflow ui --backend-store-uri "sqlite:///$(abspath $(STORAGE))/mlflow.db"

clean: ## remove caches and the virtualenv (results in $(STORAGE) stay)
	rm -rf build .venv .boot .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
