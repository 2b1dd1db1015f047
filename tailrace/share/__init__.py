"""The client's side of share groups: `ShareConsumer` and its parts."""
