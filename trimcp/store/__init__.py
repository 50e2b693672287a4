"""What a server keeps beside its work: events of streams, contexts of agents. In memory, or in SQLite files."""
