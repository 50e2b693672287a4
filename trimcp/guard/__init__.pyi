# Written by docs/stubs.py from the list in __init__.py beside it.

from trimcp.guard.audit import Audit as Audit
from trimcp.guard.filters import HiddenTextFilter as HiddenTextFilter
from trimcp.guard.filters import PatternFilter as PatternFilter
from trimcp.guard.filters import SecretsFilter as SecretsFilter
from trimcp.guard.filters import SizeFilter as SizeFilter

__all__ = [
    "Audit",
    "HiddenTextFilter",
    "PatternFilter",
    "SecretsFilter",
    "SizeFilter",
]
