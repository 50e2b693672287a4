"""Deciding and explaining with JSON Schema, on both sides. It knows nothing of MCP.

The engine is loaded with the first schema that has to be looked at: it takes longer than all else in here.
"""

from typing import TYPE_CHECKING

from trimcp.schema_bounds import SchemaError
from trimcp.validation.late import Judge, LateValidator, validator_for

if TYPE_CHECKING:
    from trimcp.validation.validator import Validator, check_author_schema, peer_validator
else:

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from trimcp.validation import validator

        return getattr(validator, name)


__all__ = [
    "Judge",
    "LateValidator",
    "SchemaError",
    "Validator",
    "check_author_schema",
    "peer_validator",
    "validator_for",
]
