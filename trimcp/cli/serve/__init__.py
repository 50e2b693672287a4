"""The commands that serve: `run`, `worker`, `bridge` and `gateway`."""
