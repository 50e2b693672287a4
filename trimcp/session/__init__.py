"""Time and tasks: the actor that carries an engine, and what it hands to handlers and callers."""
