"""What tests share: appliances, crafted batches, fault injection."""
