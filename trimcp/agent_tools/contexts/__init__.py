"""Contexts: the state that an agent keeps with a service, and all that a run has of them."""
