"""The audit log: its lines and files, and their verification."""
