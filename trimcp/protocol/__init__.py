"""What may be said *now*: a sans-IO engine for one side of one connection. Knows wire; never trio, sockets or time."""
