"""Code that tests share: appliances, crafted batches, fault injection."""
