"""Who may come, and how much of a server one peer may have."""
