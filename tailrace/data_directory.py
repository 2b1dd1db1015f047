"""The names of what lies in a data directory: for the processes that write it and for the tools that look at it offline."""

from __future__ import annotations

LOCK_FILE = "instance.lock"
IDENTITY_FILE = "instance.json"
MANIFEST_FILE = "shm.json"
CATALOG_FILE = "coordinator.db"
JOURNAL_FILE = "journal"
RESERVE_FILE = "reserve"
QUARANTINE_DIRECTORY = "quarantine"
