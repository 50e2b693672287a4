"""Handler functions: registered, called with what they need, inline or in threads."""
