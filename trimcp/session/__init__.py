"""Sessions: they add tasks and timeouts to a protocol connection, and give handlers and callers their context."""
