"""The group coordinator's process: its service, and the agent that runs it."""
