"""Entries of users: each user has its own, and the one with the most makes room."""

from __future__ import annotations

import random

from netfront.access.user_entries import UserEntries


def test_entries_are_what_a_dictionary_by_user_and_key_has() -> None:
    rng, entries = random.Random(7), UserEntries[str, int]()
    model: dict[tuple[str, str], tuple[int, int]] = {}
    """The oldest first."""
    for number in range(3_000):
        place = rng.choice("abc"), rng.choice("vwxyz")
        act = rng.choice(["put", "put", "pop", "touch", "victim"])
        if act == "put":
            size = rng.randrange(4)
            entries.put(*place, number, size)
            model.pop(place, None)
            model[place] = number, size
        elif act == "pop":
            found = model.pop(place, None)
            assert entries.pop(*place) == (None if found is None else found[0])
        elif act == "touch" and place in model:
            value, size = model.pop(place)
            model[place] = value, size + 2
            entries.touch(*place, 2)
        elif act == "victim" and model:
            sizes = {
                user: sum(size for (other, _), (_, size) in model.items() if other == user)
                for user, _ in model
            }
            user, key = entries.victim()
            assert sizes[user] == max(sizes.values())
            assert entries.has_most(user)
            assert (user, key) == next(each for each in model if each[0] == user)
        assert entries.size == sum(size for _, size in model.values())
        assert {(user, key) for user in entries.users() for key in entries.keys_of(user)} == (
            model.keys()
        )
        for user, key in model:
            assert entries.get(user, key) == model[user, key][0]
