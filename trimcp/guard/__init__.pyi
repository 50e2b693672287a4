# Written by docs/stubs.py from the list in __init__.py beside it.

from trimcp.guard.audit import Audit as Audit
from trimcp.guard.filters import HiddenTextFilter as HiddenTextFilter
from trimcp.guard.filters import PatternFilter as PatternFilter
from trimcp.guard.filters import SecretsFilter as SecretsFilter
from trimcp.guard.filters import SizeFilter as SizeFilter
from trimcp.guard.permission import ASK as ASK
from trimcp.guard.permission import AccessRequest as AccessRequest
from trimcp.guard.permission import Allow as Allow
from trimcp.guard.permission import Decision as Decision
from trimcp.guard.permission import Denied as Denied
from trimcp.guard.permission import Visible as Visible

__all__ = [
    "ASK",
    "AccessRequest",
    "Allow",
    "Audit",
    "Decision",
    "Denied",
    "HiddenTextFilter",
    "PatternFilter",
    "SecretsFilter",
    "SizeFilter",
    "Visible",
]
