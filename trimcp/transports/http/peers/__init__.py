"""Who may come."""
