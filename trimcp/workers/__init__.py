"""A pool of worker processes that can be killed."""
