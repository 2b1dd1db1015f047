"""Access of clients to a front's APIs: rules of each API, and the principal of each session."""
