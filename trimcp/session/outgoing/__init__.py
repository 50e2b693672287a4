"""Requests to the peer: calls, questions, subscriptions."""
