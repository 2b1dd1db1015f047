"""Drawing and keys of `tailrace top`."""
