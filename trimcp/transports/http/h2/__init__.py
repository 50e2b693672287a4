"""HTTP/2 (RFC 9113): frames and streams without I/O, the server's connections, and the client's."""
