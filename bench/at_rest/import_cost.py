"""Cost of importing these modules, in this process: `python -I bench/at_rest/import_cost.py ROOT
MODULE...`, run by `bench.at_rest.imports`.

Prints [CPU in ms, PSS in MB, modules]. It is run by its path, and imports nothing that would count.
"""

import sys
import time


def main() -> None:
    """See the module's docstring."""
    sys.path.insert(0, sys.argv[1])
    begun, before = time.process_time(), len(sys.modules)
    for name in sys.argv[2:]:
        __import__(name)
    took = (time.process_time() - begun) * 1e3
    with open("/proc/self/smaps_rollup") as file:
        pss = next(int(line.split()[1]) for line in file if line.startswith("Pss:"))
    print([took, pss * 1024 / 1e6, len(sys.modules) - before])


main()
