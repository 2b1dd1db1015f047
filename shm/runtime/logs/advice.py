"""Meaning and advice of each line that the appliance logs as a warning or an error.

`shm.runtime.logs.format` appends the advice to a line that brings none of its own, and docs/log.md
is made of this table. Imported with the first such line.

Invariants:
- Each event that a `logger` call of the appliance names at these levels has a row here, and each
  row such a call (tests/test_log_lines.py).
"""

from __future__ import annotations

from typing import NamedTuple

BUG = "it is a bug: report this line with those before it"
DISK = "look at the disk and its system log (journalctl -k); it is tried again"
NOTHING = "nothing"
ROOM = "free some space on that disk; it is tried again"
RESTORE = "look at the disk, and send the records again from their source if they matter"


class LogEvent(NamedTuple):
    """One kind of line."""

    meaning: str
    advice: str


LOG_EVENTS: dict[str, LogEvent] = {
    "accept_failed": LogEvent(
        "a front can accept no connection; it keeps fewer for a while",
        "raise the limit of open files (LimitNOFILE in the unit), or lower connections.max",
    ),
    "administrator_made": LogEvent(
        "there were no users; the administrator of the context that the line names was made",
        "use that context to add users, then keep it in a safe place",
    ),
    "assignor_failed": LogEvent(
        "a group's own assignor failed; the default one decided",
        "correct the assignor plugin that the line names",
    ),
    "audit_event_lost": LogEvent(
        "a login or a query of the console's page could not be reported to the audit log",
        "nothing, if a front was restarted; else look at its lines",
    ),
    "audit_not_in_journal": LogEvent(
        "a line of the audit log did not reach the journal; it is in its file", NOTHING
    ),
    "acl_damaged": LogEvent(
        "a stored rule cannot be read; its principal is denied everything of its type",
        "restore coordinator.db from a backup, or remove and add the rule (`tailrace acl`)",
    ),
    "rights_unread": LogEvent(
        "a front cannot read users and rules in the catalog; it lets nobody in and allows nothing "
        "that it has not read before, until it can",
        "look at the disk of coordinator.db; restore it from a backup if it is damaged",
    ),
    "user_damaged": LogEvent(
        "a stored user cannot be read; it is let in no more",
        "restore coordinator.db from a backup, or delete and add the user (`tailrace user`)",
    ),
    "audit_not_written": LogEvent(
        "the audit log cannot be written; administration is refused until it can",
        "free some space on its disk, or repair the directory or the key file that the line names",
    ),
    "batch_refused": LogEvent("a producer's batch was refused", "correct the producer"),
    "bin_not_purged": LogEvent("a deleted topic could not be removed from the bin", DISK),
    "bin_purged_for_space": LogEvent(
        "a disk was nearly full; its oldest deleted topic was removed for good",
        "free some space on that disk, or lower topic.delete.retention.ms",
    ),
    "bucket_damaged": LogEvent(
        "a file of delayed records is damaged; a copy or the delay log is used, if there is one",
        "look at the disk; the line delays_lost follows if records are lost",
    ),
    "cancellations_lost": LogEvent(
        "cancellations of delayed records are lost: those records will be delivered",
        "cancel them again: tailrace delay list TOPIC, tailrace delay cancel ID",
    ),
    "catalog_rebuilt": LogEvent(
        "coordinator.db was missing or damaged, and was rebuilt from the partitions' files; the "
        "old one is kept in coordinator.db.damaged-N",
        "compare tailrace topic list with the topics that you expect. For a partition that is "
        "lost for good, create an empty directory TOPIC-N",
    ),
    "catalog_rebuilt_with_a_gap": LogEvent(
        "a topic could not be rebuilt completely", "do as the reason says"
    ),
    "change_not_noted": LogEvent(
        "the catalog could not store that a change of a topic is done", ROOM
    ),
    "checkpoint_damaged": LogEvent(
        "a checkpoint of a log was damaged; more of the log was read", NOTHING
    ),
    "checkpoint_not_written": LogEvent("the next recovery reads more of the log", ROOM),
    "cleaned_files_not_removed": LogEvent(
        "files of a cleaning that was given up could not be removed",
        "none needed: the next cleaning or start removes them",
    ),
    "cleaner_report_not_read": LogEvent(
        "the report of a cleaner could not be read",
        "look at the disk; the cleaning is made again",
    ),
    "cleaning_failed": LogEvent(
        "a cleaner could not finish its job",
        "do as the reason says; it is tried again in a minute",
    ),
    "cleaning_not_begun": LogEvent(
        "a compacted partition could not be given to its cleaner",
        "free some space or repair the disk; it is tried again in a minute",
    ),
    "cleaning_not_reported": LogEvent(
        "a cleaner could not write its report; it tries again each second",
        "free some space",
    ),
    "cleaning_stopped": LogEvent(
        "a compacted partition has something that cannot be read; what follows it stays as it is",
        'look at the disk; what to do: docs/operations.md, "A partition is not compacted"',
    ),
    "cleaning_tried_again": LogEvent(
        "the cleaning of a partition failed and is tried again soon (wait_ms)",
        "do as the reason says",
    ),
    "clock_set_back": LogEvent(
        "the clock was set back; delayed records are delivered by the new time",
        "look at the host's time synchronisation (timedatectl)",
    ),
    "close_failed": LogEvent("a delay log was not closed cleanly", DISK),
    "connections_full": LogEvent(
        "a front has connections.max connections and closes new ones",
        "raise connections.max, and the limit of open files with it",
    ),
    "console_login_failed": LogEvent(
        "somebody was not let in to the console",
        "look at the name and the address of the line; `tailrace user list` shows users",
    ),
    "console_moved": LogEvent(
        "another program has the console's port; it uses a free one",
        "set http.listen to a port of its own, so that it stays",
    ),
    "console_not_bound": LogEvent(
        "the console cannot listen; it retries", "set http.listen to a free port"
    ),
    "copied_directory": LogEvent(
        "the data directory is a copy: it gets shared memory of its own, and that of the original "
        "is left alone",
        "nothing, if you copied it; never run original and copy for the same clients",
    ),
    "corruption": LogEvent(
        "records are damaged on disk; readers get CorruptBatchError for these offsets",
        "look at the disk; send the records again, or read on with tailrace consume --skip-damaged",
    ),
    "data_dir_open_to_others": LogEvent(
        "other users may enter the data directory", "chmod 0700 the directory"
    ),
    "decision_not_written": LogEvent("a partition's new settings are not on disk yet", ROOM),
    "delay_log_unreadable": LogEvent(
        "delayed records of a partition cannot be read; those after them wait",
        "look at the disk; tailrace log verify DIR shows the damage",
    ),
    "delays_interrupted": LogEvent(
        "delayed records of a partition wait after an error; it is tried again",
        "look at the reason: the disk, or a damaged file, to restore from a backup",
    ),
    "delays_lost": LogEvent(
        "delayed records are lost in a damaged file, kept as *.damaged", "send them again"
    ),
    "delays_not_opened": LogEvent(
        "delayed records of a partition are not delivered; it is tried again",
        "look at the reason: restore the file that it names from a backup",
    ),
    "delays_refused": LogEvent(
        "rows of a delay log could not be handled and were skipped; they are kept",
        "read the file that `kept` names with pyarrow.ipc.open_stream, send again those that you "
        "need, then delete it",
    ),
    "deleted_topics_found": LogEvent(
        "the bin had deleted topics that the catalog did not know; their retention begins anew",
        "see `tailrace topic list --deleted`",
    ),
    "delivery_refused": LogEvent(
        "delayed records are refused again and again by their topic",
        "run tailrace status: the disk may be full or broken, or max.message.bytes too low",
    ),
    "did_not_stop": LogEvent(
        "a process did not end within stop_timeout_ms and was killed; the next start recovers",
        "look at the disk; raise stop_timeout_ms if it is only slow",
    ),
    "directories_of_no_topic": LogEvent(
        "the catalog is older than the directories, or they were copied here",
        "if their topics are missed, move coordinator.db away: the next start rebuilds it",
    ),
    "directory_not_locked": LogEvent(
        "the file system has no locks for directories; the lock file alone protects it", NOTHING
    ),
    "directory_of_another_topic": LogEvent(
        "a partition's directory belonged to a topic that was deleted; it was put aside",
        "remove the directory that `moved_to` names, if nothing in it is needed",
    ),
    "disk_error": LogEvent(
        "a write or sync failed; it is retried once in a new file",
        "look at the disk (journalctl -k); partition_offline follows if it fails again",
    ),
    "data_dir_lost": LogEvent(
        "a data directory is gone, unmounted or unplugged: its partitions are offline",
        "mount the disk again, then run tailrace topic online for each topic, or restart",
    ),
    "disk_full": LogEvent(
        "a data directory has no room: producers get DISK_FULL and wait, readers go on",
        "free some space: tailrace topic delete-records, or a lower retention.ms or "
        "retention.bytes; writing resumes by itself",
    ),
    "drained_rings_kept": LogEvent(
        "rings of an earlier run are drained and not removed; the next start removes them", NOTHING
    ),
    "end_not_taken_up": LogEvent("a worker cannot read the end of a log", DISK),
    "ended": LogEvent(
        "a process ended unexpectedly and is started again; nothing acknowledged is lost",
        "if it comes again, read the lines before it and run tailrace doctor (memory, limits)",
    ),
    "ended_badly": LogEvent(
        "a process failed while the appliance stopped; the next start recovers",
        "read the lines before it",
    ),
    "ended_by_error": LogEvent(
        "a process ends because of an error that it cannot handle",
        "correct what the reason names; otherwise it is a bug: report the lines",
    ),
    "epoch_not_taken_up": LogEvent("a worker cannot read the end of a log", DISK),
    "few_open_files": LogEvent(
        "the limit of open files allows fewer partitions than `slots`",
        "ulimit -n 65536, or LimitNOFILE=65536 in the unit",
    ),
    "fetch_refused": LogEvent(
        "readers of a partition get an error", "look at the reason; damage has a line `corruption`"
    ),
    "formats_not_recorded": LogEvent("formats.json could not be written", ROOM),
    "front_does_not_answer": LogEvent(
        "the console got no answer of a front; a scrape is incomplete",
        "run tailrace status; while a front is being restarted: nothing",
    ),
    "gate_closed": LogEvent("a process was killed while it was started; another follows", NOTHING),
    "group_failed": LogEvent(
        "work for one group failed; its requests are refused for a second, other groups go on",
        "if it comes again, report the line",
    ),
    "groups_db_removed": LogEvent(
        "another program removed groups.db or its -wal; it is written again",
        "keep other programs (cleaners, backups) out of the data directory",
    ),
    "groups_do_not_answer": LogEvent(
        "the console got no answer about groups; a scrape is incomplete",
        "run tailrace status; while `groups` is being restarted: nothing",
    ),
    "groups_not_served": LogEvent(
        "groups.db cannot be opened: groups and transactions wait; it is tried again",
        "look at the reason: free some space, or restore groups.db from a backup",
    ),
    "hangs": LogEvent(
        "a process made no progress for hang_timeout_ms; it is killed and started again",
        "if the host was overloaded, give it more cores; otherwise report the lines before it",
    ),
    "holder_not_forgotten": LogEvent("the lock file still names the ended process", NOTHING),
    "holder_not_recorded": LogEvent("the lock file does not name this process", ROOM),
    "host_stood_still": LogEvent(
        "no process could run for so long; none is killed for its silence",
        "look for a paused virtual machine, swapping or a lack of memory",
    ),
    "identity_damaged": LogEvent(
        "a copy of the directory's identity was damaged; the other one is used, and it is repaired",
        "look at the disk",
    ),
    "identity_not_read": LogEvent(
        "a copy of the directory's identity cannot be read; the other one is used",
        "look at the disk and at the file's owner",
    ),
    "index_damaged": LogEvent("an index was damaged; readers scan, and it is repaired", NOTHING),
    "index_not_checked": LogEvent("an index could not be checked", DISK),
    "index_put_aside": LogEvent(
        "an index did not fit its segment, was put aside and made again",
        "remove the .aside file when you have looked at it",
    ),
    "internal_error": LogEvent(
        "a message failed unexpectedly; its sender got INTERNAL_ERROR with this id, nothing else "
        "was affected",
        BUG,
    ),
    "journal_batch_damaged": LogEvent(
        "a batch of the journal is damaged; the log has its own copy or reports the damage",
        "look at the disk",
    ),
    "journal_given_up": LogEvent(
        "the journal cannot be written: each file is synced instead, which is slower",
        "look at the disk, then restart when it suits: tailrace restart",
    ),
    "journal_kept": LogEvent(
        "the journal has batches of logs that could not be opened, and is kept",
        "repair those logs, then restart",
    ),
    "journal_not_read": LogEvent("the journal cannot be read: a log stays offline", DISK),
    "journal_not_reset": LogEvent("the journal could not be emptied", DISK),
    "kafka_certificates_not_reloaded": LogEvent(
        "changed certificates of the Kafka port cannot be used; the former ones are in use",
        "look at the files that the line names (kafka.tls), and reload again",
    ),
    "kafka_connection_refused": LogEvent(
        "the Kafka gateway closed a connection: its bytes are no request that it serves",
        "look at the client that the line names; docs/kafka.md has the APIs and versions",
    ),
    "kafka_dead_letter": LogEvent(
        "a record of a share group was delivered as often as allowed: it is in the dead-letter "
        "topic",
        "look at it there (tailrace dlq), and at the consumer that did not accept it",
    ),
    "kafka_dead_letter_not_written": LogEvent(
        "a record at the delivery limit could not be written to the dead-letter topic: it stays in "
        "its queue, and is tried again",
        "remove the cause that the line names; the record's topic says the name of the topic "
        "(dead.letter.topic)",
    ),
    "kafka_login_failed": LogEvent(
        "a Kafka client was not let in",
        "look at the client's user name, password and mechanism; `tailrace user list` shows users",
    ),
    "kafka_pattern_not_restored": LogEvent(
        "a member's pattern of topic names could not be taken up after a restart of the gateway: "
        "it keeps its topics, and gets no new ones",
        "restart that consumer",
    ),
    "kafka_token_keys_not_reloaded": LogEvent(
        "the keys that verify tokens of Kafka clients cannot be used; the former ones are in use",
        "look at the file that the line names (kafka.sasl.oauthbearer.jwks), and reload again",
    ),
    "kernel_not_compiled": LogEvent(
        "Python code does the work of the compiled kernel, several times slower",
        "install a wheel for this Python, or gcc and python3-dev, and tailrace again",
    ),
    "lock_file_gone": LogEvent(
        "the lock file was removed while the appliance ran; it is made again", "leave it alone"
    ),
    "lock_file_not_made": LogEvent("the lock file cannot be made again", ROOM),
    "log_not_closed": LogEvent("a log was not closed cleanly; the next start recovers it", DISK),
    "log_not_deleted": LogEvent(
        "files of a deleted topic could not be removed", "remove the directory by hand"
    ),
    "log_not_synced": LogEvent(
        "a log could not be synced at a stop; its batches stay in rings and journal, and the next "
        "start writes them",
        "look at the disk before the next start; leave /dev/shm/tailrace-* alone",
    ),
    "log_open_failed": LogEvent(
        "a partition's log cannot be opened: it serves nothing",
        "repair the disk, then run tailrace topic online TOPIC",
    ),
    "log_waits": LogEvent(
        "a log cannot be opened, or moved to the bin, yet",
        "free some space, or allow more open files; it is tried again",
    ),
    "partition_not_moved": LogEvent(
        "the copy of a partition that was to move to another directory could not be completed",
        "it stays where it is: look at the disk of the other directory, and try again",
    ),
    "partition_stays": LogEvent(
        "a partition was to move to another directory, and did not",
        "run tailrace partition move again",
    ),
    "copy_not_removed": LogEvent(
        "the copy of a partition that did not move could not be removed",
        "the next move of the partition replaces it",
    ),
    "manifest_damaged": LogEvent(
        "a copy of shm.json was damaged; shared memory was found without it", NOTHING
    ),
    "manifest_not_read": LogEvent("a copy of shm.json cannot be read", "look at the disk"),
    "manifest_not_removed": LogEvent("shm.json was not removed at a stop", NOTHING),
    "manifest_not_written": LogEvent("shm.json cannot be written", ROOM),
    "manifest_replaced_by_what_is_there": LogEvent(
        "shm.json was missing: shared memory was found by its names",
        "keep other programs out of the data directory",
    ),
    "memory_lost": LogEvent(
        "shared memory is gone with batches that were not on disk yet (acknowledged with acks=1 "
        "or durability=memory); readers that had read them get LogTruncatedError",
        "send those records again; after a restart of the machine that is expected",
    ),
    "memory_not_copied": LogEvent(
        "this data directory is a copy of one whose appliance ran, or was killed; batches that "
        "were only in its memory are not in the copy, and readers beyond its end get an error",
        "nothing, if the original still serves; to copy everything, stop the original first",
    ),
    "memory_short": LogEvent(
        "processes wait for memory for more than memory.pressure.percent of the time, and "
        "producers get credit for one batch at a time; or a front's connections take more than "
        "they may, and the largest are closed",
        "give the appliance more memory; look for clients that do not read (`peer_closed`)",
    ),
    "no_administrator": LogEvent(
        "there are no users, and none could be made: no client is let in",
        "mend the file that the line names, then restart the controller: tailrace restart",
    ),
    "no_console_token": LogEvent(
        "the console's token cannot be read or made: it refuses changes",
        "look at the reason and at the first data directory",
    ),
    "no_control_socket": LogEvent(
        "tailrace restart and upgrade cannot reach the supervisor",
        "look at the reason and at the first data directory, then restart",
    ),
    "no_dedicated_worker": LogEvent(
        "a dedicated worker cannot be started; it is tried again",
        "look at the reason: /dev/shm may be full, or a limit reached (tailrace doctor)",
    ),
    "no_idle_io_priority": LogEvent(
        "the host refuses the idle priority of the disk; the cleaner has the usual one",
        "none needed",
    ),
    "no_process_of_groups": LogEvent(
        "the process of groups cannot be started; it is tried again",
        "look at the reason: /dev/shm may be full, or a limit reached (tailrace doctor)",
    ),
    "no_producer_ids": LogEvent("the catalog refused new producer ids", ROOM),
    "no_thread": LogEvent(
        "the console cannot start a thread for a request",
        "raise the limit of processes (TasksMax in the unit, ulimit -u)",
    ),
    "no_transaction_lanes": LogEvent(
        "shared memory for transactions cannot be made; it is tried again",
        "enlarge /dev/shm, or lower lane_bytes",
    ),
    "no_zygote": LogEvent(
        "there is no zygote until the next start; processes start more slowly",
        "correct what the line before says, and restart when it suits",
    ),
    "not_forked": LogEvent("a process was started without the zygote, more slowly", NOTHING),
    "not_started": LogEvent(
        "a process cannot be started; it is tried again",
        "look at the error: memory, or a limit of processes or files (tailrace doctor)",
    ),
    "not_what_was_placed": LogEvent(
        "a log file does not have the batch that was placed in it: its producers get an error",
        "look at the disk, and run tailrace log verify after a stop; report the line",
    ),
    "offline_not_persisted": LogEvent(
        "a partition is offline, and its file does not say so: a restart will try it again", DISK
    ),
    "override_ignored": LogEvent(
        "config set stored a setting that this version has not", "tailrace config unset NAME"
    ),
    "override_not_applied": LogEvent(
        "a value of config set is wrong for this version, or has no room beside the configuration; "
        "files, environment and flags are used",
        "tailrace config unset NAME, or set it again",
    ),
    "partition_file_damaged": LogEvent(
        "partition.json was damaged and is made again; log start offset and epochs may be older",
        "look at the disk",
    ),
    "partition_not_opened": LogEvent(
        "a partition's files cannot be read", "look at the disk; it is tried with each batch"
    ),
    "partition_offline": LogEvent(
        "a partition takes no writes; reads go on",
        "repair the disk, then run tailrace topic online TOPIC",
    ),
    "password_check_failed": LogEvent(
        "a password could not be checked, so its user was not let in",
        "the line has the reason; passwords need the package argon2-cffi: "
        "pip install 'tailrace[kafka]'",
    ),
    "peer_closed": LogEvent(
        "a front closed a connection that broke a rule or a limit",
        "look at the reason, and at docs/limits.md",
    ),
    "prepared_transaction_aborted": LogEvent(
        "a prepared transaction was not decided within transaction.prepared.max.ms",
        "mend the program that prepared it: it did not come back",
    ),
    "producer_snapshot_damaged": LogEvent(
        "a list of known producers was damaged; they take a new epoch", NOTHING
    ),
    "quarantine_failed": LogEvent("damaged bytes could not be kept for a look", ROOM),
    "read_ahead_failed": LogEvent("readers may wait for the disk", DISK),
    "read_failed": LogEvent("readers of a partition get STORAGE_ERROR", DISK),
    "request_failed": LogEvent("the console failed at a request; it goes on", BUG),
    "reserve_given_up": LogEvent(
        "the disk is full to its last byte: a piece of the file `reserve` was freed for the "
        "appliance's own books",
        "free some space; the reserve is made again then",
    ),
    "reserve_not_given_up": LogEvent("the reserve file cannot be made smaller", DISK),
    "restart_ended_early": LogEvent(
        "tailrace restart stopped before its end", "look at the reason, then run it again"
    ),
    "restart_needed": LogEvent(
        "changed settings take effect with the next start", "restart when it suits"
    ),
    "retention_failed": LogEvent("expired segments could not be removed", DISK),
    "rewritten": LogEvent(
        "after a failed write a group of batches was written to a new file; nothing is lost",
        "look at the disk's system log (journalctl -k)",
    ),
    "rings_not_drained": LogEvent(
        "the stop left batches in shared memory; the next start writes them",
        "start it again before the machine restarts; leave /dev/shm/tailrace-* alone",
    ),
    "sampler_failed": LogEvent("the console's live view failed; the next viewer restarts it", BUG),
    "schema_message_damaged": LogEvent(
        "the first bytes of a segment were damaged, and were repaired", "look at the disk"
    ),
    "segment_not_sealed": LogEvent("a segment stays open; it is tried again", ROOM),
    "segment_not_split": LogEvent("delete-records could not free space of a segment yet", ROOM),
    "segment_without_schema_removed": LogEvent(
        "a segment that a crash left without a batch was removed", NOTHING
    ),
    "segment_not_merged": LogEvent(
        "a segment has something that cannot be read, and its small batches are not merged",
        "look at the disk; `tailrace log verify` finds the place",
    ),
    "segments_not_swapped": LogEvent(
        "cleaned segments could not take the place of the old ones; it is tried again",
        "free some space or repair the disk",
    ),
    "setting_wrong": LogEvent("a setting of a reload is wrong", "correct it, then reload again"),
    "settings_overridden": LogEvent(
        "the files have other values of these settings, but config set wins",
        "tailrace config unset NAME, if the files are right",
    ),
    "settings_not_reloaded": LogEvent(
        "the reload changed nothing; the settings in force stay",
        "correct the settings of the lines before, then reload again",
    ),
    "share_member_damaged": LogEvent(
        "the state of a queue's member is damaged; the member joins again", NOTHING
    ),
    "share_state_damaged": LogEvent(
        "the state of a queue's partition is damaged: its records are delivered again from the "
        "beginning of the log",
        "look at the disk; consumers must expect records again",
    ),
    "slots_not_read": LogEvent(
        "slots of topics that were not kept stay taken until the next start", "look at the disk"
    ),
    "slow_operation": LogEvent(
        "an operation took longer than slow_operation_ms",
        "compare tailrace top: a slow sync is the disk, else a core or memory is short",
    ),
    "stale_region_ignored": LogEvent("an unusable region of an earlier run is ignored", NOTHING),
    "taken_up_anew": LogEvent("a worker continues a log at another offset than it knew", NOTHING),
    "topic_defaults_not_applied": LogEvent(
        "changed defaults of topics are not applied yet; it is tried again", ROOM
    ),
    "torn_tail_cut": LogEvent(
        "the end of a log was being written at a crash, and was cut; no acknowledged record was "
        "in it",
        NOTHING,
    ),
    "quotas_not_applied": LogEvent(
        "a front cannot read the rules of quotas; it keeps the earlier ones",
        "set them again with this version: tailrace quota list, tailrace quota set",
    ),
    "transaction_aborted": LogEvent(
        "a transaction was open for longer than its timeout",
        "look at its producer: it is stuck, ended without a commit, or needs a longer "
        "transaction_timeout_ms",
    ),
    "transaction_index_damaged": LogEvent(
        "readers of committed records wait before the transactions of this segment",
        "restart the partition's flusher, which makes it again: tailrace restart flusher-N",
    ),
    "transaction_index_not_written": LogEvent(
        "readers of committed records may wait", "free some space or repair the disk"
    ),
    "wall_jumps_not_kept": LogEvent("clock.json could not be written", ROOM),
    "writing_waits": LogEvent(
        "the flusher lacks files or memory; batches wait in the ring",
        "allow more open files (LimitNOFILE=65536 in the unit) or more memory; it is tried again",
    ),
    "zygote_not_started": LogEvent("the zygote cannot be started; it is tried again", NOTHING),
    "zygote_not_taken": LogEvent(
        "an upgrade has made a zygote that the new version cannot take; it makes one", NOTHING
    ),
    "zap_failed": LogEvent(
        "a front could not decide about a connection, and refused it", "report the error"
    ),
}
"""By the first word of the line."""


def advice_for(event: str) -> str:
    """The advice, "" for an event without a row."""
    found = LOG_EVENTS.get(event)
    return found.advice if found is not None else ""
