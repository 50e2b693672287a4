"""A request's context inside a worker process: what is known of it, and verbs that the parent carries out."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import attrs

from trimcp.errors import LocalError
from trimcp.protocol.events import Admission, Admitted
from trimcp.session.context import Context, severity
from trimcp.wire.capabilities import ClientCapabilities
from trimcp.wire.common import Implementation
from trimcp.wire.converter import converter_for
from trimcp.wire.jsonrpc import JSON, RequestId
from trimcp.wire.logs import LoggingLevel
from trimcp.wire.methods import METHODS
from trimcp.wire.revisions import LATEST, REVISIONS

__all__ = ["RemoteContext"]


class _Link(Protocol):
    def say(self, call: int, message: Mapping[str, JSON]) -> None: ...
    def ask(self, call: int, message: Mapping[str, JSON]) -> JSON: ...


@attrs.define(eq=False, repr=False)
class RemoteContext(Admitted):
    """Stands where a `Context` stands behind a `ThreadContext`. Its verbs are async in form only: none ever yields.

    Attributes:
        admission, request_id, method, headers, deadline: as a `Context` has them; the deadline is on the clock of
            `time.monotonic`.
        cancel_reason, cancel_detail: None; a call that is cancelled has no process any more.
    """

    admission: Admission
    request_id: RequestId
    method: str
    headers: Mapping[str, str]
    deadline: float
    _wanted: LoggingLevel | None
    _link: _Link
    _call: int
    cancel_reason: None = attrs.field(init=False, default=None)
    cancel_detail: None = attrs.field(init=False, default=None)
    _last_progress: float = attrs.field(init=False, default=-math.inf)

    @classmethod
    def of(cls, facts: Mapping[str, Any], link: _Link, call: int) -> RemoteContext:
        """Return the context of a call from what the parent said of its request."""
        load = converter_for(LATEST).load
        admission = Admission(
            revision=next(revision for revision in REVISIONS if revision.name == facts["revision"]),
            peer=None if facts["peer"] is None else load(facts["peer"], Implementation),
            capabilities=load(facts["capabilities"], ClientCapabilities),
            log_level=facts["log_level"],
            progress_token=facts["progress_token"],
            meta=facts["meta"],
            principal=facts["principal"],
        )
        left = facts["seconds_left"]
        deadline = math.inf if left is None else time.monotonic() + left
        wanted = facts["log_level"]
        return cls(admission, facts["request_id"], facts["method"], facts["headers"], deadline, wanted, link, call)

    @property
    def state(self) -> Any:
        """What the lifespan made stays in the server's process."""
        raise LocalError('the state of the lifespan is not here: run="process" gives a tool a process of its own')

    async def report_progress(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        """As `Context.report_progress`. The connection to the parent holds some; then it waits."""
        if not progress > self._last_progress:
            raise ValueError(f"progress must increase: {progress} after {self._last_progress}")
        self._last_progress = progress
        if self.admission.progress_token is not None:
            self._link.say(self._call, {"say": "progress", "values": [progress, total, message]})

    async def log(self, level: LoggingLevel, data: JSON, *, logger: str | None = None) -> None:
        """As `Context.log`."""
        if self._wanted is not None and severity(level) >= severity(self._wanted):
            self._link.say(self._call, {"say": "log", "level": level, "data": data, "logger": logger})

    async def ask(self, name: str, params: Any, *, key: str | None = None) -> Any:
        """As `Context.ask`."""
        said = None if params is None else converter_for(LATEST).dump(params)
        value = self._link.ask(self._call, {"method": name, "params": said, "key": key})
        return converter_for(LATEST).load(value, METHODS[name].result)

    # These build the payload and then `ask`, which is all they need of a context.
    elicit: ClassVar[Any] = Context.elicit
    elicit_url: ClassVar[Any] = Context.elicit_url
    sample: ClassVar[Any] = Context.sample
    list_roots: ClassVar[Any] = Context.list_roots
