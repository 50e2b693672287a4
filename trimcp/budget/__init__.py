"""The memory that all peers of a server together may use: accounts, their owners, and turns at large messages."""
