"""Servers made of others: one before another (`proxy`), and many as one (`gateway`)."""
