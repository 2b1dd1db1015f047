"""Topics over their life: creation, growth, schemas, compaction, deletion."""
