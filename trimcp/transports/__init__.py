"""Channels over things: memory, byte streams, standard streams. They know no session, server or client."""
