"""Client sessions, from handshake to disconnect, and their pending requests."""
