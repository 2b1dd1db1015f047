"""`make load USERS=20 SECONDS=10`: locust without its web page, against an appliance of its own, or
the one that TAILRACE_BOOTSTRAP names.

Writes bench/results/load.html; prints locust's table and where the generator saturates. Exit status
1 when requests failed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack

from bench.measure import RESULTS
from tailrace.embedded_appliance import start_embedded

REPORT = str(RESULTS / "load.html")


def main() -> int:
    users, seconds = (
        sys.argv[1] if len(sys.argv) > 1 else "20",
        sys.argv[2] if len(sys.argv) > 2 else "10",
    )
    with ExitStack() as stack:
        address = os.environ.get("TAILRACE_BOOTSTRAP")
        if address is None:
            appliance = start_embedded(auto_create_topics=False)
            stack.callback(appliance.stop)
            address = appliance.address
        # Not imported here: locust patches the standard library for gevent, which the appliance's
        # own starter must not see.
        command = [
            sys.executable, "-m", "locust", "-f", "bench/locustfile.py", "--headless", "--users",
            users, "--spawn-rate", users, "--run-time", f"{seconds}s",
            "--html", REPORT, "--only-summary", "--stop-timeout", "10",
        ]  # fmt: skip
        code = subprocess.run(
            command, env={**os.environ, "TAILRACE_BOOTSTRAP": address}, check=False
        ).returncode
    print(f"report: {REPORT}")
    return code


if __name__ == "__main__":
    sys.exit(main())
