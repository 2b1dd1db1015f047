"""Parts of compaction and retention: what is known of a log, and the jobs of the cleaner."""
