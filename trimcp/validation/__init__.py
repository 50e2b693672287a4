"""Deciding and explaining with JSON Schema, on both sides. It knows nothing of MCP."""

from trimcp.schema_bounds import SchemaError
from trimcp.validation.validator import Validator, check_author_schema, peer_validator

__all__ = ["SchemaError", "Validator", "check_author_schema", "peer_validator"]
