"""Share groups (KIP-932) on our share groups."""
