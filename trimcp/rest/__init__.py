"""Offers the operations of an HTTP API as tools, from its description (OpenAPI 3.0 and 3.1)."""
