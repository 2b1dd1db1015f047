"""The log as tables: one planner and one reader of a topic's batches, from its files where they are on this host, over ZeroMQ elsewhere."""
