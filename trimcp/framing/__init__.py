"""Bytes to messages and back, one module per framing. No I/O; of the wire it uses only `jsonrpc`."""
