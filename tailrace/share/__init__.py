"""The client's side of share groups: what `ShareConsumer` is made of."""
