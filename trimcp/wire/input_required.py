"""Questions of 2026-07-28: a result that says what else must be known first (basic/patterns/mrtr)."""

from __future__ import annotations

from typing import Any, TypeAlias

from trimcp.wire.common import RESULT_INPUT_REQUIRED, Meta
from trimcp.wire.elicitation import ElicitRequest, ElicitResult
from trimcp.wire.fields import ABSENT, Absent, chooses, field, wire
from trimcp.wire.revisions import V2026_07_28
from trimcp.wire.roots import ListRootsRequest, ListRootsResult
from trimcp.wire.sampling import CreateMessageRequest, CreateMessageResult

__all__ = ["InputRequest", "InputRequiredResult", "InputResponse"]

InputRequest: TypeAlias = ElicitRequest | CreateMessageRequest | ListRootsRequest
InputResponse: TypeAlias = ElicitResult | CreateMessageResult | ListRootsResult


@chooses(ElicitResult, CreateMessageResult, ListRootsResult)
def _response(value: dict[str, Any]) -> Any:
    if "action" in value:
        return ElicitResult
    if "roots" in value:
        return ListRootsResult
    return CreateMessageResult if "role" in value else None


@wire(since=V2026_07_28)
class InputRequiredResult:
    """The questions, by names the server chose, and what it wants handed back unread with the answers."""

    input_requests: dict[str, InputRequest] | Absent = field(default=ABSENT)
    request_state: str | Absent = field(default=ABSENT)
    meta: Meta | Absent = field(default=ABSENT)
    result_type: str = field(default=RESULT_INPUT_REQUIRED, required=True)
