"""The state of one side of one connection, without I/O: which message may be sent or received now."""
