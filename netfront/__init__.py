"""Network front: owns the socket, and serves sessions, credit, produce and fetch requests."""
