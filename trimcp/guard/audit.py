"""One record per call: client, method and target, outcome, duration and size.

Text from peers is escaped, so that it cannot imitate a record. By default only kinds and sizes of arguments are
recorded.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import orjson
import trio

from trimcp.errors import ErrorReply
from trimcp.session.incoming.job import Job
from trimcp.support.cleaning import harmless, mask, shapes
from trimcp.wire.codes import CANCELLED_BY_DRAIN, FORBIDDEN, OVERLOADED
from trimcp.wire.methods import CALLS

Arguments: TypeAlias = Literal["none", "shapes", "masked", "whole"]

_TARGETS: Final = ("name", "uri", "ref")

log: logging.Logger = logging.getLogger("trimcp.server")


class Audit:
    """Keeps a record of each call of a server: `Server("files", audit=trimcp.guard.Audit(file="audit.jsonl"))`.

    A record is a dict for JSON. Members always present: `time` (UTC, ISO 8601, when the call ended), `method`,
    `request_id`, `revision`, `transport` ("http", "sse", "websocket", "grpc", or "stream" for standard input and output
    and other byte streams), `outcome`, `duration` (seconds of work), `waited` (seconds of waiting for a turn before),
    `request_bytes` (approximate) and `reply_bytes`. Members present if known: `principal`, `address` (over HTTP),
    `client` and `client_version` (as the client declares them), `target` (the tool's, resource's or prompt's name),
    `arguments`, `code` (of the error), `reason` and `detail` (why it was cancelled or refused, and the text given by
    the canceller or by `allow=`), `scopes` (those that the call needs, if the caller's token lacks some), and for calls
    of agent tools `agent` and `context`. A call that becomes a task has two records: of its answer, and of the work,
    with `transport` "task" and the beginning of the task's id as `task`.

    Registrations of agent tools are recorded too, as "tools/register" and "tools/remove": see `note`.

    `outcome` is "ok", "tool_error" (a result with `isError`), "error", "cancelled", "refused" (the handler did not run;
    `reason` is "overload", "quota", "drain", "audit", "scopes" or "forbidden") or "asked" (answered with questions; the
    client repeats the call).

    There is one destination, by default the logger "trimcp.audit" at INFO, with each member as an attribute of the log
    record, as `JsonFormatter` writes them. The first of several failed writes is logged as one ERROR; no call fails for
    it.

    Args:
        logger: the name of another logger.
        file: a file to append to, one line of JSON per record, each in one unbuffered write. It is created readable for
            its owner only, opened when the server begins to run and closed when it ends.
        write: a function called with each record, in the event loop; it must not wait.
        methods: the methods to record.
        arguments: "shapes" records names, kinds and sizes; "masked" the values, with secrets masked by name and long
            texts cut; "whole" all values; "none" nothing.
        required: after a failed write refuse calls until a write succeeds. Running calls continue.

    Raises:
        ValueError: more than one destination is given, or `required` with a logger, which hides failed writes.
    """

    def __init__(
        self,
        *,
        logger: str | None = None,
        file: str | Path | None = None,
        write: Callable[[dict[str, Any]], object] | None = None,
        methods: Sequence[str] = CALLS,
        arguments: Arguments = "shapes",
        required: bool = False,
    ) -> None:
        if sum(place is not None for place in (logger, file, write)) > 1:
            raise ValueError("an audit goes to one place: a logger, a file or a function")
        if required and file is None and write is None:
            raise ValueError("a logger hides whether it wrote: required=True needs file= or write=")
        if arguments not in ("none", "shapes", "masked", "whole"):
            raise ValueError(f"arguments is 'none', 'shapes', 'masked' or 'whole', not {arguments!r}")
        if isinstance(methods, str):
            raise ValueError(f"methods are several: ({methods!r},)")
        self.methods: frozenset[str] = frozenset(methods)
        self.arguments: Arguments = arguments
        self.required: bool = required
        self._logger = logging.getLogger(logger or "trimcp.audit") if file is None and write is None else None
        self._file = None if file is None else _LineFile(Path(file))
        self._write = write if self._file is None else self._file.write
        self._users = 0
        self._lost = 0
        self._refused: set[Job] = set()

    @property
    def lost(self) -> int:
        """The number of records lost since the last successful write."""
        return self._lost

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Keep the file open while the block runs. Raises OSError if it cannot be opened."""
        if self._file is not None and not self._users:
            self._file.open()
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if self._file is not None and not self._users:
                self._file.close()

    def guarded(self, handler: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
        """Return a handler that refuses calls while writing fails. The record of each refusal is the next attempt."""

        async def call(ctx: Any, params: Any) -> Any:
            if self._lost:
                self._refused.add(ctx.internals[1])
                raise ErrorReply(OVERLOADED, "calls are refused while the audit cannot be written", {"reason": "audit"})
            return await handler(ctx, params)

        return call

    def finished(self, job: Job, reply: bytes | None) -> None:
        """Record a call that ended (`Session.on_finished`). A failed write is logged, not raised."""
        if job.request.method.name not in self.methods:
            return
        logger = self._logger
        if logger is None or logger.isEnabledFor(logging.INFO):
            record = self._record(job, reply)
            self._keep(record, f"{1_000 * record['duration']:.1f}ms")

    def note(self, method: str, outcome: str, **facts: object) -> None:
        """Record an act that is no call, such as a registration. A failed write is logged, not raised.

        Args:
            method: what was done.
            outcome: "ok", "refused" or "pending".
            facts: what is known, by name; numbers stay, everything else becomes harmless text, None is left out.
        """
        known = {name: value for name, value in facts.items() if value is not None}
        record = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "method": method,
            "outcome": outcome,
            **{name: value if isinstance(value, int) else harmless(mask(str(value))) for name, value in known.items()},
        }
        self._keep(record, "")

    def _keep(self, record: dict[str, Any], took: str) -> None:
        logger = self._logger
        if logger is not None:
            text = (record["method"], record.get("target", ""), record["outcome"], took)
            logger.info("%s %s %s %s", *text, extra=record)
            return
        assert self._write is not None
        try:
            self._write(record)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a user's function, or a full disk
            self._lost += 1
            if self._lost == 1:
                log.error("the audit cannot be written: %s", harmless(repr(error), 500))
        else:
            if self._lost:
                log.warning("the audit is written again; %d records were lost", self._lost)
                self._lost = 0

    def _record(self, job: Job, reply: bytes | None) -> dict[str, Any]:
        request = job.request
        admission = request.admission
        now = trio.current_time()
        began = job.since if job.started else job.queued or now
        turn = 0.0 if job.extras is None else job.extras.waited
        waited = turn + (began - job.queued if job.queued else 0.0)
        id = request.id
        record: dict[str, Any] = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "method": request.method.name,
            "request_id": harmless(id) if isinstance(id, str) else id,
            "revision": admission.revision.name,
            "transport": _transport(job),
            "outcome": "ok",
            "duration": round(max(now - began - turn, 0.0), 6),
            "waited": round(waited, 6),
            "request_bytes": job.size,
            "reply_bytes": 0 if reply is None else len(reply),
        }
        if job.client is not None:
            record["address"] = harmless(job.client)
        if admission.principal is not None:
            record["principal"] = harmless(admission.principal)
        if admission.peer is not None:
            record["client"] = harmless(admission.peer.name)
            record["client_version"] = harmless(admission.peer.version)
        if (more := getattr(job.origin, "audited", None)) is not None:  # another protocol's call
            record.update((name, harmless(value)) for name, value in more.items())
        self._add_target(record, request.raw, job.target)
        self._add_outcome(record, job, reply)
        return record

    def _add_target(self, record: dict[str, Any], raw: Mapping[str, Any], called: str | None) -> None:
        target = called or next((raw[key] for key in _TARGETS if key in raw), None)
        if isinstance(target, Mapping):  # the reference of a completion
            target = target.get("name", target.get("uri"))
        if isinstance(target, str):
            record["target"] = harmless(mask(target))
        if self.arguments == "none":
            return
        arguments = raw.get("arguments", raw.get("argument"))
        if isinstance(arguments, Mapping):
            if self.arguments == "shapes":
                record["arguments"] = shapes(arguments)
            else:
                record["arguments"] = mask(arguments) if self.arguments == "masked" else arguments

    def _add_outcome(self, record: dict[str, Any], job: Job, reply: bytes | None) -> None:
        error, cause = job.error, job.cancelled
        code = None if error is None else error.code
        if code is not None:
            record["code"] = code
        if cause is not None:
            record["reason"] = cause.reason.value
            if cause.detail is not None:
                record["detail"] = harmless(cause.detail)
        if cause is not None and (reply is None or code is not None):
            record["outcome"] = "cancelled"
        elif code == OVERLOADED or (code == CANCELLED_BY_DRAIN and not job.started):
            record["outcome"] = "refused"
            record["reason"] = self._why_refused(job)
        elif error is not None and code == FORBIDDEN:
            record["outcome"] = "refused"
            record["reason"] = "scopes" if error.required else "forbidden"
            if error.required:
                record["scopes"] = [harmless(scope) for scope in error.required]
            record["detail"] = harmless(error.message)
        elif reply is None:
            record["outcome"] = "cancelled"
        elif code is not None:
            record["outcome"] = "error"
        elif job.extras is not None and job.extras.failed:
            record["outcome"] = "tool_error"
        elif job.questions is not None and job.questions.unwound:
            record["outcome"] = "asked"
        self._refused.discard(job)

    def _why_refused(self, job: Job) -> str:
        if job in self._refused:
            return "audit"
        if job.error is not None and job.error.code == CANCELLED_BY_DRAIN:
            return "drain"
        return "quota" if job.started else "overload"


def _transport(job: Job) -> str:
    if job.origin is not None:
        return "http"
    if job.headers is None:
        return "stream"
    if job.headers.get("content-type", "").startswith("application/grpc"):
        return "grpc"
    return "websocket" if job.session.sink.queues else "sse"


class _LineFile:
    """A file to which whole lines are appended, each with one system call."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None
        self._torn = False

    def open(self) -> None:
        self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def write(self, record: dict[str, Any]) -> None:
        if self._fd is None:
            raise OSError("the audit's file is closed: the server does not run")
        line = _line(record)
        if self._torn:  # the last line was only partly written
            line = b"\n" + line
        written = os.write(self._fd, line)
        self._torn = 0 < written < len(line)
        if written < len(line):
            raise OSError(f"only {written} of {len(line)} bytes could be written")


def _line(record: dict[str, Any]) -> bytes:
    """Return a record as one line of ASCII."""
    line = orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)
    if not line.isascii() or b"\x7f" in line:
        line = json.dumps(record, separators=(",", ":")).replace("\x7f", "\\u007f").encode("ascii") + b"\n"
    return line
