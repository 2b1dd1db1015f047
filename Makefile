# The whole set-up of a fresh machine with Python 3.11+ and a POSIX shell. A second run does no
# set-up again.
SHELL := /bin/sh
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Compiled once at set-up: 21,000 lines cost 112 ms uncompiled, 29 ms compiled.
PACKAGES := tailrace shm workers netfront appliance spark_bridge

# The compiled kernel, where a C compiler is; made again when its source or the version changes
# (docs/adr/0021).
KERNEL := tailrace/kernel/.made
BUILD_KERNEL = $(BIN)/python -P tailrace/kernel/build.py; touch $(KERNEL) 2>/dev/null || true
PURE_TESTS := tests/tailrace/kernel tests/conformance \
	tests/tailrace/batch/test_arrow_codec.py tests/tailrace/client/records/test_partitioners.py \
	$(addprefix tests/tailrace/producer/test_,fast_send.py send_at_once.py partition_queue.py filling_while_busy.py) \
	$(addprefix tests/system/clients/test_,produce_and_consume.py callbacks.py fork.py aio.py bad_input.py) \
	$(addprefix tests/system/topics/test_,sparse_batches.py \
	hash_slots.py::test_adding_partitions_under_load_keeps_the_order_of_every_key delays.py::test_records_come_when_they_are_due_in_due_order_and_never_early)

.PHONY: deb rpm wheels packaging demo test test-all test-loaded test-pure check verify services lakes kernel simulate simulate-transactions simulate-compaction torture torture-delays torture-groups torture-transactions torture-spark fuzz load bench bench-peers bench-scale bench-delays bench-transactions bench-awaited-send bench-groups bench-rebalance bench-pairs bench-wakeups bench-kafka bench-kafka-records bench-idle bench-compaction bench-security bench-restarts bench-restore bench-scan bench-spark bench-spark-sink bench-spark-streaming lint java prepare-spark clean

demo: $(KERNEL) java
	@$(BIN)/python -P -m bench.demo

# Tests that share a fixture stay in one process; each other one goes to the process that is free
# (tests/conftest.py). Four processes for two cores: a test waits for disks, timers and other
# processes over half of its time. Six in `make test`, whose tests are short: four of them left
# about a sixth of the CPU idle.
PROCESSES := 4
# Each starts hundreds of interpreters: bytecode is kept though the environment may say otherwise.
PYTEST = PYTHONDONTWRITEBYTECODE= $(BIN)/python -P -m pytest -n $(PROCESSES) --dist loadgroup --no-loadscope-reorder

# The suites that go through the kernel, with the same functions in Python.
test-pure: $(KERNEL)
	TAILRACE_PURE=1 $(PYTEST) -m "not long" $(PURE_TESTS)

kernel: $(STAMP)
	@rm -f $(KERNEL) tailrace/kernel/_native.*.so 2>/dev/null || true
	@$(BUILD_KERNEL)

# 8 minutes on 2 idle cores: fixed seeds, one case of each long matrix, Spark's main paths.
test: PROCESSES := 6
test: verify java services
	$(PYTEST) -m "not long"

# Before an issue is called done: everything, with new seeds, which are printed; SEED=1 takes those
# of an earlier run.
test-all: verify java services lakes packaging
	SEED=$(SEED) $(PYTEST)
	PYTHONPATH=$(LAKES) $(BIN)/python -P -m pytest tests/system/scans/test_export_tables.py
	$(MAKE) test-pure

# RUNS=10 times beside processes that burn all cores: no test may depend on the machine's speed.
# TESTS=tests/shm: only these.
test-loaded: PROCESSES := 6
test-loaded: verify java services
	@$(BIN)/python -P tools/loaded_runs.py $(or $(RUNS),10) env $(PYTEST) -q -m "not long" $(TESTS)

# Under a minute: what a change can break at once. BASE=main: what this branch has changed since it
# left there.
check: verify
	$(PYTEST) -q -m "not long and not spark" $$($(BIN)/python -P tools/changed_tests.py $(BASE))

verify: $(KERNEL)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	@$(BIN)/lint-imports & imports=$$!; $(BIN)/mypy; types=$$?; wait $$imports && exit $$types

lint: $(KERNEL)
	$(BIN)/ruff format . && $(BIN)/ruff check --fix . && $(BIN)/mypy && $(BIN)/lint-imports

simulate: $(KERNEL)
	@$(BIN)/python -P -m tests.sim $(or $(SECONDS),60) $(SEED)

simulate-transactions: $(KERNEL)
	@$(BIN)/python -P -m tests.sim --transactions $(or $(SECONDS),60) $(SEED)

simulate-compaction: $(KERNEL)
	@$(BIN)/python -P -m tests.sim --compaction $(or $(SECONDS),60) $(SEED)

torture: $(KERNEL)
	@$(BIN)/python -P -m tests.crash.torture $(or $(SECONDS),60) $(SEED)

torture-delays: $(KERNEL)
	@$(BIN)/python -P -m tests.crash.delay_torture $(or $(SECONDS),60) $(SEED)

torture-groups: $(KERNEL)
	@$(BIN)/python -P -m tests.crash.group_torture $(or $(SECONDS),60) $(SEED)

torture-transactions: $(KERNEL)
	@$(BIN)/python -P -m tests.crash.transaction_torture $(or $(SECONDS),60) $(SEED)

# A Spark stream into a topic, killed at random, each row counted.
torture-spark: $(KERNEL) java
	@$(BIN)/python -P -m tests.crash.spark_sink --kills $(or $(KILLS),50) --seed $(or $(SEED),1)

# FUZZ=files, FUZZ=kafka, FUZZ=kafka-fields, FUZZ=strangers, FUZZ=programs: the other fuzzers.
# FUZZ=protocol: what clients send; ARGS='--strict --lines 4' also times the acks of the client
# beside it, for a machine that does nothing else.
fuzz: $(KERNEL)
	@$(BIN)/python -P -m tests.fuzz $(or $(FUZZ),protocol) $(or $(SECONDS),60) $(SEED) $(ARGS)

load: $(KERNEL)
	@$(BIN)/python -P -m bench.load $(or $(USERS),20) $(or $(SECONDS),10)

PEERS_CLIENTS = $(BIN)/python -m pip install --quiet --disable-pip-version-check -r bench/peers/requirements.txt || echo "the peers' Python clients cannot be had"

# ROUNDS=1 ONLY=send-100,ack: a look at some rows; TOUCH=0: without touching memory first.
bench-peers: $(KERNEL)
	@$(PEERS_CLIENTS)
	@$(BIN)/python -P -m bench.peers

bench: $(KERNEL)
	@$(BIN)/python -P -m bench.suite

# Transactions beside the same work without them: ROUNDS=1 ONLY=commits,ids: a look at some parts;
# TOUCH=0.
bench-transactions: $(KERNEL)
	@$(BIN)/python -P -m bench.transactional.transactions

# What an awaited send costs beside a plain one: ROUNDS=2 RECORDS=50000 for a look.
bench-awaited-send: $(KERNEL)
	@$(BIN)/python -P -m bench.awaited_send

bench-delays: $(KERNEL)
	@$(BIN)/python -P -m bench.delays

# PARTS='commits queue': only these parts.
bench-groups: $(KERNEL)
	@$(PEERS_CLIENTS)
	@$(BIN)/python -P -m bench.members.groups $(PARTS)

# A member of a large group dies, ours and Kafka's: the first part of bench-groups alone.
# ARGS='--json --members 20 --partitions 100'
bench-rebalance: $(KERNEL)
	@$(PEERS_CLIENTS)
	@$(BIN)/python -P -m bench.members.rebalance $(ARGS)

# PAIRS=2 CASES="sends acks": a look at some. And of bench-scale: BASE=COMMIT: the budget of that
# commit beside; WRITE_DOCS=1: into docs; PARTS="budget model breadth": only these.
bench-pairs: $(KERNEL)
	@$(BIN)/python -P -m bench.pairs $(or $(BASE),HEAD~1)

bench-scan: $(KERNEL)
	@$(BIN)/python -P -m bench.reads.scan
	@$(BIN)/python -P -m bench.reads.scan_latest

# Micro-batches beside Spark's rate source, and how fresh a streaming query is; BATCHES and RECORDS
# make it shorter.
bench-spark-streaming: $(KERNEL) java
	@$(BIN)/python -P -m bench.with_spark.spark_streaming

# Spark reads a topic, and beside it Parquet files and Kafka, where Maven has it. ROWS=300000
# TOUCH=0 for a look; PARTS="starts reads executors": only these; WRITE_DOCS=1: a whole run into
# docs/measurements.md.
bench-spark: $(KERNEL) java
	@$(BIN)/python -P -m bench.with_spark.spark

# Spark writes a topic, beside its noop sink and one that drops what it is given: ROWS=1000000 for a
# look, ARGS=--parts without Spark, ARGS=--batches for micro-batches.
bench-spark-sink: $(KERNEL) java
	@$(BIN)/python -P -m bench.with_spark.spark_sink $(ARGS)

# Who wakes whom for one ack, and what it costs each thread; counts hold on a busy machine too.
bench-wakeups: $(KERNEL)
	@$(BIN)/python -P -m bench.stages.wakeups $(ARGS)

# Cleaning, acknowledgements beside it, small batches. MB=500 ONLY=cleaning,foreground,small
# KAFKA=1.
bench-compaction: $(KERNEL)
	@$(BIN)/python -P -m bench.compaction

# Encryption, users and rules against none, in pairs. ONLY=curve,rules,login,catalog,strangers
# ROUNDS=5 MB=32.
bench-security: $(KERNEL)
	@$(BIN)/python -P -m bench.security

# CPU and wake-ups of each thread of an appliance whose clients are silent. ARGS='--seconds 30
# --clients 1 --partitions 1000 --json'.
bench-idle: $(KERNEL)
	@$(BIN)/python -P -m bench.at_rest.idle $(ARGS)

# Kafka's clients against the gateway and against Kafka, in turns.
# ONLY=producers,java,acks,connections,start,members,migrate ROUNDS=5 MB=1000.
bench-kafka: $(KERNEL)
	@$(BIN)/python -P -m bench.peers.kafka_gateway

# Kafka's record batches to ours and back, a core.
bench-kafka-records: $(KERNEL)
	@$(BIN)/python -P -m bench.stages.kafka_records $(ARGS)

# Longest time without an acknowledgement while an appliance is restarted under load. ARGS='5
# rolling': rounds, kinds.
bench-restarts: $(KERNEL)
	@$(BIN)/python -P -m bench.at_rest.restart_gap $(ARGS)

# A restore of GB=10 beside dd, and what a running backup costs producers; for a machine that does
# nothing else.
bench-restore: $(KERNEL)
	@$(BIN)/python -P -m bench.at_rest.restore $(or $(GB),10) $(or $(ROUNDS),3)

bench-scale: $(KERNEL)
	@$(BIN)/python -P -m bench.stages.scale

$(STAMP): pyproject.toml requirements.lock examples/clients/javascript/package-lock.json
	@echo "tailrace: setting up $(VENV) (once; about a minute)"
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "tailrace needs Python 3.11 or newer; run make PYTHON=python3.11")'
	@$(PYTHON) -m venv $(VENV) || { echo "tailrace: python3-venv is missing; install it (apt-get install python3-venv)" >&2; exit 1; }
	@echo "tailrace: installing the locked packages"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@$(BIN)/python -m compileall -qq $(PACKAGES) || true
	@command -v npm >/dev/null && npm ci --silent --prefix examples/clients/javascript || echo "tailrace: without npm the JavaScript example is not tested"
	@touch $(STAMP)

$(KERNEL): $(STAMP) tailrace/kernel/build.py tailrace/kernel/_native.pyx $(wildcard tailrace/kernel/native/*.pxi) tailrace/__init__.py
	@$(BUILD_KERNEL)

java:
	@sh tools/ensure_java.sh

services:
	@sh tools/ensure_services.sh

# Packages that only the tests of Delta and Iceberg tables need, beside the environment.
LAKES := $(VENV)/lakes
lakes: $(LAKES)/.installed

$(LAKES)/.installed: $(STAMP) tests/lakes.txt
	@echo "tailrace: installing deltalake and pyiceberg for the tests"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(LAKES) -r tests/lakes.txt
	@touch $@

# Spark's classes kept for this user's later sessions (docs/spark.md). Not part of demo and test:
# one session, or a suite's eight, gain no more than it takes.
prepare-spark: $(KERNEL) java
	@echo "tailrace: keeping Spark's classes for later sessions (half a minute, 160 MB)"
	@$(BIN)/python -P -c "import spark_bridge; print('tailrace: they are in', spark_bridge.prepare())"

# A Debian package, an RPM, wheels: into build/ (docs/install.md). The packages need the
# distribution's own Python 3.11.
deb rpm:
	@sh tools/build_package.sh $@

wheels: $(STAMP)
	@PYTHON=$(BIN)/python sh tools/build_wheels.sh

# What the long tests of packages need, where it may be installed.
packaging:
	@sh tools/ensure_packaging.sh

clean:
	rm -rf $(VENV) $(KERNEL) tailrace/kernel/*.so
