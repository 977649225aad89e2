# Every command of this project. They need python3 (3.10 or newer) and make;
# the rest is installed into .venv on the first use.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
HAS_GPU := 'from gpu_pool.devices import discover; raise SystemExit(not discover().devices)'

# Sizes of the GPU kernels that `make lab` and `make demo` install into .venv.
KERNELS := 2% 10% 50% 1
# Modules that those of `make lab` have imported when they start, as far as .venv has them.
PRELOAD := numpy pandas torch
FOUND := 'import sys; from importlib.util import find_spec; print(*filter(find_spec, sys.argv[1:]), sep=",")'
# Options for JupyterLab: make lab LAB_ARGS="--no-browser --port 9999"
LAB_ARGS ?=
# Options for JupyterHub: make hub HUB_ARGS="--debug"
HUB_ARGS ?=
# Options for pytest: make test TEST_ARGS="-k parser"
TEST_ARGS ?=
# How many processes run them: twice as many as small machines have cores, since most tests wait most of the time.
WORKERS ?= 4
# The oldest JupyterHub that is supported, for make test-hub.
OLD_HUB ?= jupyterhub==5.4.*
# Options for the benchmarks: make bench BENCH_ARGS="--quick kernels growth"
BENCH_ARGS ?=
# For make chaos: for how long. For make soak: how many steps. And the number that both follow from.
MINUTES ?= 30
STEPS ?= 100000
SEED ?= $(shell date +%s)
# Options for nox: make matrix MATRIX_ARGS="-s oldest"
MATRIX_ARGS ?=
# Options for mutmut: make mutation MUTATION_ARGS="gpu_pool.policy.placement*"
MUTATION_ARGS ?=
# Options for make images, see --help of examples/kubernetes/images/build.py.
IMAGES_ARGS ?=
# Options for make lock: make lock LOCK_ARGS="--upgrade service"
LOCK_ARGS ?=
PACKAGES := kernels/gpu_pool_kernels pool/gpu_pool pool_client/gpu_pool_client provisioner/gpu_pool_provisioner spawner/gpu_pool_spawner
# The Python for make test-gpu. Nothing is installed into it.
GPU_PYTHON ?= python3
# Holds a file to the schema of who reads it; the program has the schemas with it.
CHECK := $(BIN)/check-jsonschema --builtin-schema vendor.
SOURCES := $(CURDIR)/kernels:$(CURDIR)/pool:$(CURDIR)/pool_client:$(CURDIR)/provisioner:$(CURDIR)/spawner

.DEFAULT_GOAL := help
.PHONY: help lab hub demo test test-all test-hub test-gpu test-cluster test-slurm test-hibernation test-images matrix soak chaos mutation lint format types labextension docs man dist version lock chart images bench clean

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

lab: $(VENV)/.ready-lab ## open JupyterLab with GPU kernels (simulated GPU where there is none)
	@$(BIN)/gpu-pool kernels install $(KERNELS) --sys-prefix --preload "$$($(BIN)/python -c $(FOUND) $(PRELOAD))"
	@if [ -z "$$GPU_POOL_DEVICES" ] && ! $(BIN)/python -c $(HAS_GPU); then \
		echo "No NVIDIA GPU was found on this machine: using one simulated 32 GB V100, marked \"simulated\" wherever it shows."; \
		export GPU_POOL_DEVICES="V100-SXM2-32GB:1"; \
	fi; \
	if [ "$$(id -u)" = 0 ]; then set -- --allow-root; else set --; fi; \
	exec $(BIN)/jupyter lab "$$@" $(LAB_ARGS)

hub: $(VENV)/.ready-hub node_modules/.bin/configurable-http-proxy ## start a JupyterHub with two courses, four users and the dashboard
	@if [ -z "$$GPU_POOL_DEVICES" ] && ! $(BIN)/python -c $(HAS_GPU); then \
		echo "No NVIDIA GPU was found on this machine: using one simulated 32 GB V100, marked \"simulated\" wherever it shows."; \
		export GPU_POOL_DEVICES="V100-SXM2-32GB:1"; \
	fi; \
	echo "Log in at http://127.0.0.1:$${PORT:-8000} as hopper, turing, ada or grace; the password is gpu."; \
	echo "The pool's dashboard: http://127.0.0.1:$${PORT:-8000}/services/gpu-pool/"; \
	PATH="$(abspath $(BIN)):$(abspath node_modules/.bin):$$PATH" exec $(BIN)/jupyterhub -f examples/jupyterhub/jupyterhub_config.py $(HUB_ARGS)

demo: $(VENV)/.ready-lab ## the same without a browser: fill a simulated GPU, and leave nothing behind
	@$(BIN)/python examples/demo.py

test: $(VENV)/.ready-test proxy-if-npm ## run the tests that need neither a GPU nor a browser (minutes)
	@$(BIN)/pytest -n $(WORKERS) --dist loadgroup --hypothesis-profile=quick -m "not long and not browser and not gpu and not cluster and not slurm and not images and not hibernation" $(TEST_ARGS)

test-all: $(VENV)/.ready-test proxy-if-npm ## run the rest: the long tests, all examples of the laws, and those in a real browser
	@$(BIN)/pytest -n $(WORKERS) --dist loadgroup -m "(long or browser or hypothesis) and not gpu and not cluster and not slurm and not images and not hibernation" $(TEST_ARGS)

test-hub: .venv-hub/.ready proxy-if-npm ## run the tests of the Hub's parts against the oldest JupyterHub that is supported
	@.venv-hub/bin/pytest tests/pool/service tests/spawner -m "not browser and not gpu" $(TEST_ARGS)

test-gpu: ## run the tests that need an NVIDIA GPU, by the Python that has PyTorch
	@$(GPU_PYTHON) -c 'import jupyter_core, psutil, pynvml, pytest, traitlets' || { \
		echo "$(GPU_PYTHON) lacks what these tests need, see docs/developer/gpu.md."; \
		echo "Name the Python that has PyTorch: make test-gpu GPU_PYTHON=/path/to/python3"; exit 1; }
	@PYTHONPATH="$(SOURCES)$${PYTHONPATH:+:$$PYTHONPATH}" $(GPU_PYTHON) -m pytest tests/gpu -m gpu $(TEST_ARGS)

test-cluster: $(VENV)/.ready-test ## run the tests in real containers on a real kubelet (as root, see docs/developer/cluster.md)
	@$(BIN)/pytest -m cluster tests/cluster/kubelet $(TEST_ARGS)

test-slurm: $(VENV)/.ready-test ## run the tests in jobs of a real Slurm on this machine (see docs/developer/slurm.md)
	@$(BIN)/python -c 'import batchspawner' 2>/dev/null || $(BIN)/python -m pip install --quiet \
		--disable-pip-version-check 'batchspawner>=1.3' || echo "Without batchspawner its tests are skipped."
	@$(BIN)/pytest -m slurm tests/slurm $(TEST_ARGS)

test-hibernation: $(VENV)/.ready-test ## put kernels to sleep on disk by a real CRIU (as root; CRIU names the program)
	@$(BIN)/pytest -m hibernation tests/provisioner tests/browser tests/benchmarks $(TEST_ARGS)

test-images: $(VENV)/.ready-test ## build the images with buildah, twice, and start them (see docs/developer/images.md)
	@$(BIN)/pytest -m images tests/images $(TEST_ARGS)

matrix: $(VENV)/.ready-matrix ## run tests with the oldest and the newest Python, Jupyter and JupyterHub (an hour)
	@$(BIN)/nox $(MATRIX_ARGS)

soak: SEED := $(SEED)
soak: $(VENV)/.ready-test ## hold every pool to its model for STEPS steps; SEED repeats a run (hours)
	@echo "To repeat this run: make soak STEPS=$(STEPS) SEED=$(SEED)"
	@GPU_POOL_MODEL_STEPS=$(STEPS) $(BIN)/pytest tests/model -s --hypothesis-seed=$(SEED) $(TEST_ARGS)

chaos: SEED := $(SEED)
chaos: $(VENV)/.ready-test ## break servers, kernels, service and disk for MINUTES; SEED repeats a run
	@echo "To repeat this run: make chaos MINUTES=$(MINUTES) SEED=$(SEED)"
	@CHAOS_MINUTES=$(MINUTES) CHAOS_SEED=$(SEED) $(BIN)/pytest tests/chaos tests/cluster/api_server/test_struck.py -s $(TEST_ARGS)

mutation: $(VENV)/.ready-mutation ## change the pure modules in small ways and see which changes no test notices (an hour)
	@rm -rf build/mutation && mkdir -p build/mutation
	@cp -r $(PACKAGES) tests docs pyproject.toml build/mutation
	@cd build/mutation && $(abspath $(BIN))/mutmut run $(MUTATION_ARGS); $(abspath $(BIN))/python tests/mutation.py

lint: $(VENV)/.ready-dev ## check style and formatting, and the files that other programs read
	@$(BIN)/ruff check --quiet . && $(BIN)/ruff format --check --quiet . && echo "Style and formatting are as they should be."
	@$(BIN)/deptry --no-ansi $(dir $(PACKAGES)) examples
	@$(CHECK)github-workflows .github/workflows/*.yml
	@$(CHECK)github-issue-forms .github/ISSUE_TEMPLATE/problem.yml .github/ISSUE_TEMPLATE/feature.yml
	@$(CHECK)github-issue-config .github/ISSUE_TEMPLATE/config.yml
	@$(CHECK)dependabot .github/dependabot.yml
	@$(CHECK)readthedocs .readthedocs.yaml
	@$(CHECK)citation-file-format CITATION.cff
	@$(BIN)/python -c 'from rattler_build import Stage0Recipe; Stage0Recipe.from_file("recipe/recipe.yaml").render()'
	@$(BIN)/bump-my-version bump patch --dry-run
	@$(BIN)/zizmor --offline --no-progress --quiet .github
	@if command -v actionlint >/dev/null; then actionlint; fi
	@if command -v helm >/dev/null; then helm lint --strict charts/gpu-pool; fi
	@[ ! -e labextension/node_modules/.bin/eslint ] || ! command -v npm >/dev/null || { \
		cd labextension && npm run --silent lint:check && echo "So are those of JupyterLab's extension."; }

format: $(VENV)/.ready-dev ## put style and formatting right where that can be done
	@$(BIN)/ruff check --quiet --fix . ; $(BIN)/ruff format .
	@[ ! -e labextension/node_modules/.bin/eslint ] || ! command -v npm >/dev/null || { \
		cd labextension && npm run --silent lint; }

types: $(VENV)/.ready-dev ## check the types and which package imports which
	@$(BIN)/mypy && $(BIN)/mypy examples && $(BIN)/lint-imports

labextension: $(VENV)/.ready-lab ## build what JupyterLab shows of slices anew, and install it into .venv (needs Node.js)
	@GPU_POOL_LABEXTENSION=required $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .

docs: $(VENV)/.ready-dev ## build the documentation, warnings being errors
	@$(BIN)/sphinx-build -q -W --keep-going -b html docs docs/_build/html
	@echo "The documentation is in docs/_build/html/index.html"

man: $(VENV)/.ready-dev ## write the manual pages anew from the program's help
	@$(BIN)/python docs/man.py

dist: $(VENV)/.ready-dev ## build the sdist and the wheel into dist/, as they are published (needs Node.js)
	@rm -rf dist
	@GPU_POOL_LABEXTENSION=required $(BIN)/python -m build
	@$(BIN)/twine check --strict dist/*

version: $(VENV)/.ready-dev ## write another version wherever it stands: make version VERSION=0.2.0
	@echo "$(VERSION)" | grep --extended-regexp --line-regexp --quiet '[0-9]+\.[0-9]+\.[0-9]+' || { \
		echo "VERSION is \"$(VERSION)\", and must be three numbers: make version VERSION=0.2.0"; exit 1; }
	@$(BIN)/bump-my-version bump --new-version "$(VERSION)" && git --no-pager diff --stat

lock: $(VENV)/.ready-lock ## write the lock files of the images anew (see docs/developer/images.md)
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python examples/kubernetes/images/lock.py $(LOCK_ARGS)

chart: ## check the chart with every file of values, and package it into dist/ (needs helm)
	@helm lint --strict charts/gpu-pool
	@for values in charts/gpu-pool/dialects/*.yaml; do \
		helm template gpu-pool charts/gpu-pool --values "$$values" >/dev/null || { echo "with $$values"; exit 1; }; \
	done
	@helm package charts/gpu-pool --destination dist

images: ## build the images of the service, and of notebooks and kernels (needs docker, podman or buildah)
	@$(PYTHON) examples/kubernetes/images/build.py $(IMAGES_ARGS)

bench: $(VENV)/.ready-bench ## print this project's speed against its yardsticks, as ratios (a quarter of an hour)
	@$(BIN)/python -m benchmarks $(BENCH_ARGS)

clean: ## remove .venv and everything built
	@rm -rf $(VENV) .venv-hub build dist docs/_build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@rm -rf labextension/node_modules labextension/lib labextension/dist labextension/build
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The tests that need JupyterHub's proxy are skipped where it is not.
.PHONY: proxy-if-npm
proxy-if-npm:
	@if command -v configurable-http-proxy >/dev/null || [ -e node_modules/.bin/configurable-http-proxy ]; then :; \
	elif command -v npm >/dev/null; then \
		$(MAKE) --no-print-directory node_modules/.bin/configurable-http-proxy || \
			echo "JupyterHub's proxy could not be installed; the tests that need it are skipped."; \
	else \
		echo "There is no npm, hence no proxy for JupyterHub; the tests that need it are skipped."; \
	fi

# JupyterHub's proxy is a program of Node.js.
node_modules/.bin/configurable-http-proxy:
	@command -v npm >/dev/null || { \
		echo "JupyterHub's proxy needs Node.js and npm, which are not here."; \
		echo "On Debian or Ubuntu: sudo apt install nodejs npm, then run make again."; exit 1; }
	@npm install --silent --no-save --no-package-lock configurable-http-proxy

.venv-hub/.ready: pyproject.toml
	@$(MAKE) --no-print-directory VENV=.venv-hub .venv-hub/.ready-test
	@.venv-hub/bin/python -m pip install --quiet --disable-pip-version-check '$(OLD_HUB)'
	@touch $@

# One stamp per extra of pyproject.toml, made again when that file changes.
$(VENV)/.ready-%: pyproject.toml | $(BIN)/python
	@echo "Installing jupyter-gpu-pool[$*] into $(VENV); this takes a minute or two, once."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$*]' || { \
		echo "pip could not install it, and says above why. It needs a package index, so a network, or a mirror"; \
		echo "that pip is configured for. Run make again once it has one."; exit 1; }
	@[ -e labextension/dist/package.json ] || { \
		echo "JupyterLab does not show slices here: building its extension needs Node.js, npm and npm's registry."; \
		echo "Everything else works without it. 'make labextension' tries again."; }
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo "jupyter-gpu-pool needs Python 3.10 or newer, and $(PYTHON) is not."; \
		echo "Name another one: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "$(PYTHON) cannot make virtual environments here."; \
		echo "On Debian or Ubuntu: sudo apt install python3-venv, then run make again."; exit 1; }
	@$(PYTHON) -m venv $(VENV)
