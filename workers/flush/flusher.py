"""Flusher process of one data directory: writes batches from rings to segment files and makes them
durable. It builds its agent (`workers.flush.flusher_agent`) from shared memory, and runs it.

Owner, crash: see the agent.

Run it with `python -P -m workers.flush.flusher`.
"""

from __future__ import annotations

import sys

from shm.memory.layout import ProcessWord, RegionKind, Role
from shm.queues.doorbell import Doorbell
from shm.queues.ring import Ring
from shm.queues.settled_notifications import SettledNotifications
from shm.runtime.agent_runner import (
    EXIT_DATA_UNUSABLE,
    ProcessContext,
    configure_logging,
    run,
    start,
)
from shm.tables.partition_table import PartitionTable
from workers.flush.flusher_agent import Flusher, Links
from workers.flush.flusher_settings import FlusherSettings
from workers.log.log_set import RunFacts
from workers.segment.directory_watch import DirectoryWatch
from workers.segment.files import DiskFiles, Files, is_shortage
from workers.segment.freeing_files import FreeingFiles


def build(context: ProcessContext, files: Files) -> Flusher:
    """Build the flusher of this process and request its feed from the controller."""
    spec, settings, clock = context.spec, context.spec.settings, context.clock
    flusher = Flusher(
        data_dir=spec.data_dirs[spec.index],
        files=files,
        table=context.table(spec.index),
        feed=context.lane_reader("controller"),
        generation=spec.generation,
        facts=RunFacts(settings["run"], bool(settings["lost_memory"])),
        links=_links(context),
        slot=context.slot,
        settings=FlusherSettings.of(settings),
        on_ready=context.report_ready,
        now_us=clock.wall_us,
        start_ns=clock.monotonic_ns(),
        watch=DirectoryWatch(spec.data_dirs[spec.index]) if isinstance(files, DiskFiles) else None,
    )
    # The controller feeds a process that asks: readiness comes only after recovery, so asking has a
    # word of its own.
    context.ask_for_feed()
    return flusher


def _links(context: ProcessContext) -> Links:
    """Attach the rings, also those of an earlier run, and the doorbells."""
    spec, settings = context.spec, context.spec.settings
    followed = [w for w, data_dir in enumerate(settings["worker_dirs"]) if data_dir == spec.index]
    for w in settings["spare_workers"]:
        spare = context.control.process(Role.WORKER, w)
        if (
            spare.load(ProcessWord.GENERATION)
            and spare.load(ProcessWord.DEDICATED_DIR) == spec.index + 1
        ):
            followed.append(w)  # a predecessor followed it

    def connect(worker: int) -> tuple[Ring, Doorbell]:
        return Ring(context.attach(f"ring-{worker}", RegionKind.RING)), context.bell(
            Role.WORKER, worker
        )

    def ring_cleaner() -> None:
        context.bell(Role.SUPERVISOR, 0).ring()
        context.bell(Role.CLEANER, spec.index).ring()

    return Links(
        rings={w: connect(w)[0] for w in followed},
        old_rings=[
            (
                Ring(context.attach_named(old["ring"], RegionKind.RING)),
                PartitionTable(context.attach_named(old["table"], RegionKind.TABLE)),
            )
            for old in spec.recover
        ],
        workers={w: context.bell(Role.WORKER, w) for w in followed},
        connect_worker=connect,
        fronts=SettledNotifications(
            [
                (
                    context.bell(Role.FRONT, f),
                    context.control.process(Role.FRONT, f).cell(ProcessWord.NOTIFICATIONS_OFF),
                )
                for f in range(int(settings["fronts"]))
            ]
        ),
        controller=context.bell(Role.CONTROLLER, 0),
        scheduler=context.bell(Role.SCHEDULER, 0),
        cleaner=context.control.process(Role.CLEANER, spec.index),
        ring_cleaner=ring_cleaner,
    )


def main() -> None:
    """Run the flusher process."""
    context = start()
    configure_logging(context)
    try:
        flusher = build(context, FreeingFiles())
    except OSError as error:
        if is_shortage(error):
            raise  # the supervisor tries again
        sys.stderr.write(
            "tailrace: cannot read or write "
            f"{error.filename or context.spec.data_dirs[context.index]}: {error.strerror}; "
        )
        sys.stderr.write(
            "what it holds may be acknowledged: repair it, or move it away to give that up, then "
            "start again.\n"
        )
        sys.exit(EXIT_DATA_UNUSABLE)
    run(flusher, context, apply=flusher.apply_settings)
    flusher.close()


if __name__ == "__main__":
    main()
