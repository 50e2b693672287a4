"""The HTTP/1.1 server: parser, connections, replies and the listener."""
