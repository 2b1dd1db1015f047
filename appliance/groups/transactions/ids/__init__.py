"""Transactional ids: their numbers, owners and newest ends, in memory and until they expire."""
