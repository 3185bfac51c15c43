# Everything starts from an empty folder: Python 3.10+ and Java 17+ are all that has to be there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The one that comes with Python may be years old, and takes a third longer.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# What the demo writes over: remoting, or grpc.
TRANSPORT ?= remoting
# Which benchmarks run: all, or one of encode, remoting, pacing, spark, read, small, grpc.
PART ?=
# Which notebooks run: all, or names without .ipynb.
NOTEBOOK ?=
# How long the soak runs.
MINUTES ?= 30
# Spark's workers run the environment's interpreter, not whatever python3 is on PATH.
export PYSPARK_PYTHON := $(CURDIR)/$(BIN)/python
# Spark starts Python by the hundred: what is compiled once is kept, whatever the environment says.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help

.PHONY: help
help: ## Show what can be made
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1	\2/p' $(MAKEFILE_LIST) | expand -t 22

$(STAMP): setup.cfg pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "rocketmq-spark needs Python 3.10 or newer: install it, or name one: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { echo "no virtual environment could be made in $(VENV): install Python's venv module (Debian: apt install python3-venv)" >&2; exit 1; }
	@echo "installing into $(VENV) (once; one to two minutes) ..."
	@$(PIP) --upgrade pip && PYTHONWARNINGS=ignore::UserWarning $(PIP) --no-compile --editable '.[test]' || \
	  { echo "the install into $(VENV) failed: check the network and the disk (about 1.5 GB), then run make again" >&2; exit 1; }
	@touch $@

.PHONY: setup
setup: $(STAMP) ## Make the virtual environment in .venv

.PHONY: demo
demo: setup ## Write 336,776 flights to two real brokers and count them (TRANSPORT=grpc: over gRPC)
	@$(BIN)/rocketmq-spark demo --transport $(TRANSPORT)

.PHONY: test
test: setup ## Run the whole test suite, real brokers included (about 15 minutes on 2 cores)
	@$(BIN)/python -m pytest tests -m "not bench" -q -n 3 --no-loadscope-reorder

.PHONY: test-faults
test-faults: setup ## Break servers and links for as long as it takes, and print what each fault has cost (over 10 minutes)
	@$(BIN)/python -m pytest tests/faults -q --full

.PHONY: unit
unit: setup ## Run the unit tests (under a minute, no network, no Spark)
	@$(BIN)/python -m pytest tests/unit -q -n 3

.PHONY: check
check: setup ## Format, lint, types, known vulnerabilities of what is required (where a service answers), unit tests
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/python -m tests.tools.audit
	@$(BIN)/python -m pytest tests/unit -q -n 3

.PHONY: docs
docs: setup ## Make docs/options.md from the code
	@$(BIN)/python -m tests.tools.option_docs

.PHONY: site
site: setup ## Build the documentation as a site into site/ (strict: a broken link is an error)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --site-dir site

.PHONY: check-matrix
check-matrix: setup ## Try the wheel on every PYTHONS and PYSPARKS that can be had, one after the other (hours), and print a table
	@PYTHONPATH=$(CURDIR) $(BIN)/python -m tests.tools.matrix

.PHONY: dist
dist: setup ## Build sdist and wheel into dist/
	@$(BIN)/python -m build --outdir dist .

.PHONY: jars
jars: setup ## Fetch the jars from Maven Central without a check, and write the lists of their SHA-256 again
	@PYTHONPATH=$(CURDIR) $(BIN)/python -m tests.tools.jar_lists

.PHONY: proto
proto: setup ## Generate the gRPC messages from proto/
	@$(BIN)/python -m grpc_tools.protoc -I proto --python_out=. --pyi_out=. proto/rocketmq_spark/protocol/grpc/_pb/*.proto

.PHONY: notebooks
notebooks: setup ## Run the notebooks, and keep their outputs and pictures (3 minutes)
	@PYTHONPATH=$(CURDIR) $(BIN)/python -m tests.notebooks.execute $(NOTEBOOK)

.PHONY: bench
bench: setup ## Measure against the official clients, Spark's Kafka sink and the wire (about 40 minutes)
	@PYTHONPATH=$(CURDIR) $(BIN)/python -m tests.benchmarks $(PART)

.PHONY: soak
soak: setup ## Write for MINUTES (30) while brokers are restarted: nothing missing, nothing grows
	@PYTHONPATH=$(CURDIR) $(BIN)/python tests/tools/soak.py --minutes $(MINUTES)

.PHONY: clean
clean: ## Remove the virtual environment and what tools left behind
	rm -rf $(VENV) build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis spark-warehouse
