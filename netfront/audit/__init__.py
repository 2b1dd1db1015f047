"""The front's part of the audit log. Imported where audit.enabled is set."""
