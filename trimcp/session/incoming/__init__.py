"""Requests of the peer: admitted, run, answered."""
