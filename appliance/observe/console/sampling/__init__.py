"""Samples of the state that the page and `tailrace top` show, and their history."""
