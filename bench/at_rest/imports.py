"""Cost of imports of each process of the appliance, alone and in the zygote's image: `python -m
bench.at_rest.imports [repetitions]`.

CPU in ms (the least of the repetitions: what else the machine does only adds), memory as PSS in MB,
and how many modules there are then.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

from appliance.supervise.processes.child_processes import MODULES
from appliance.supervise.processes.zygote import MODULE, SHARED

ROOT = pathlib.Path(__file__).resolve().parents[2]


def import_cost(*modules: str) -> tuple[float, float, int]:
    """(CPU ms, MB, modules) of one interpreter that imports them and nothing else."""
    done = subprocess.run(
        [sys.executable, "-I", str(ROOT / "bench/at_rest/import_cost.py"), str(ROOT), *modules],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    took, pss, count = json.loads(done.stdout)
    return took, pss, count


def main() -> int:
    repetitions = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    processes = {"an interpreter alone": (), "supervisor": ("appliance.supervise.supervisor",)}
    processes |= {role.name.lower(): (module,) for role, module in MODULES.items()}
    processes["zygote: " + ", ".join(name.rpartition(".")[2] for name in SHARED)] = (
        "appliance.supervise.supervisor",
        MODULE,
        *SHARED,
    )
    print("| process | CPU, ms | PSS, MB | modules |\n|---|---|---|---|")
    for name, modules in processes.items():
        rows = [import_cost(*modules) for _ in range(repetitions)]
        print(
            f"| {name} | {min(row[0] for row in rows):.0f} | {min(row[1] for row in rows):.1f} | "
            f"{rows[0][2]} |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
