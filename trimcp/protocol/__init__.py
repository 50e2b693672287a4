"""The state of one side of one connection, without I/O: which messages may be sent or received now."""
