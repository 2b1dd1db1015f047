"""Stores of objects with backups in them."""

from __future__ import annotations

from functools import partial

from appliance.backup.manifest import Manifest
from appliance.backup.target.object_store import ObjectStore, open_target

INSTANCE = "ab" * 16


def begun(place: str) -> ObjectStore:
    """The store at a place, locked and begun."""
    store = ObjectStore(open_target(place), None)
    store.target.lock()
    store.begin(INSTANCE)
    return store


def backed_up(store: ObjectStore, number: int, *contents: bytes) -> Manifest:
    """A backup of these objects, sent."""
    objects = [store.put(partial(iter, [content]))[0] for content in contents]
    manifest = Manifest(f"{number:08d}-20270101T000000.000000Z", number, "1", INSTANCE, 0, number)
    manifest.objects = objects
    store.put_manifest(manifest)
    return manifest
