"""The supervisor: processes, shared memory, systemd."""
