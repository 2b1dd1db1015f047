"""Changes of topics for which a producer has batches: the batches wait, then move."""
