# The two commands: `make demo` (the main job on real input) and `make test` (everything).
# They install what they need into .venv; system packages by apt where we are root, else the message names them.

BROKER ?= postgres+embedded://.cache/demo
PY := .venv/bin/python
# Three workers suit two cores: much of their time they wait. Servers are shared between them.
WORKERS ?= 3

.PHONY: demo test soak lint bench docs clean

.venv/.%: pyproject.toml scripts/setup
	scripts/setup $*
	touch $@

# BROKER=kafka, BROKER=rabbit: on a node of that server that runs as long as the demo does. Any URL: on that broker.
ifneq ($(filter kafka rabbit,$(BROKER)),)
OPTIONS_kafka := ?create_topics=true
demo: .venv/.$(BROKER)-server
	$(PY) -m tests.services.$(BROKER) run -- $(PY) -m examples.webhooks --broker '{url}$(OPTIONS_$(BROKER))'
else
demo: .venv/.$(if $(filter kafka%,$(BROKER)),kafka,$(if $(filter amqp%,$(BROKER)),rabbit,base))
	$(PY) -m examples.webhooks --broker "$(BROKER)"
endif

test: .venv/.test
	$(PY) -m pytest -n $(WORKERS) --dist loadgroup $(ARGS)

# The full fault suites; resumes where it was stopped, and writes docs/reliability/results.json.
soak: .venv/.test
	$(PY) -m tests.faults.soak $(ARGS)

lint: .venv/.test
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/pyright

bench: .venv/.bench
	$(PY) -m benchmarks $(ARGS)

# Renders what is generated from code and results; the tests check that it is up to date.
docs: .venv/.test
	$(PY) -m benchmarks render
	$(PY) scripts/render_docs.py

clean:
	rm -rf .venv .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
