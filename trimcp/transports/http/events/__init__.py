"""Events kept so that a stream can be resumed: in memory, in SQLite, or elsewhere."""
