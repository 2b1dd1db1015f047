"""`python -P -m tests.fuzz FUZZER SECONDS [SEED]`: a fuzzer for so long; see `make fuzz`."""

from __future__ import annotations

import sys

from tests.fuzz.connections import protocol_fuzzer, strangers
from tests.fuzz.damage import file_fuzzer
from tests.fuzz.gateway import kafka_fields, kafka_fuzzer
from tests.fuzz.program import program_fuzzer

FUZZERS = {
    "protocol": protocol_fuzzer.main,
    "files": file_fuzzer.main,
    "kafka": kafka_fuzzer.main,
    "kafka-fields": kafka_fields.main,
    "strangers": strangers.main,
    "programs": program_fuzzer.main,
}

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in FUZZERS:
        sys.exit(f"usage: python -P -m tests.fuzz {{{'|'.join(FUZZERS)}}} SECONDS [SEED]")
    sys.exit(FUZZERS[sys.argv[1]](sys.argv[2:]))
