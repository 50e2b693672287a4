"""The seam between sessions and wires: whole messages in, whole messages out, in batches.

A channel knows bytes and framing. It knows nothing of requests under way, revisions or handlers, and nothing above
it knows whether it is a pipe, a socket or a list. Vocabulary and exceptions are Trio's.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from types import TracebackType
from typing import Any, Final, Protocol, Self

import attrs
import trio

from trimcp.budget import Holding
from trimcp.errors import LocalError
from trimcp.principal import Principal
from trimcp.values import shown
from trimcp.wire.jsonrpc import Message, RequestId

LANES: Final = ("replies", "requests", "progress", "logs", "changes", "others")
"""What is treated differently while the peer is slow; docs/reference/lanes.md says how. The last holds cancels, too."""


SERVER_MAX_MESSAGE: Final = 4 * 1024 * 1024
"""Bytes of the largest message a server takes unless told otherwise."""

CLIENT_MAX_MESSAGE: Final = 64 * 1024 * 1024
"""Bytes of the largest message a client takes unless told otherwise: results are larger than requests."""


class Kind(Enum):
    """What an outgoing message is, for transports that route or withdraw by it."""

    REQUEST = "request"
    REPLY = "reply"
    NOTIFICATION = "notification"
    CANCEL = "cancel"


class Origin(Protocol):
    """Where a message came in, for transports with more than one connection to the peer (HTTP exchanges, streams).

    The session sends whatever belongs to that message to this origin's sink, and names it on every `Outgoing`.
    """

    @property
    def name(self) -> str:
        """What to call it in a log."""
        ...

    @property
    def client(self) -> str | None:
        """Where the peer is, as far as it tells clients apart, such as its address without the port; or None."""
        ...

    @property
    def sink(self) -> Sink | None:
        """Where messages go that belong to it; None for the session's own sink."""
        ...


# These two are mutable only because making a frozen value takes attrs three times as long; nobody changes them.
@attrs.define(eq=False)
@shown
class Incoming:
    """One message as it arrived.

    Attributes:
        message: the parsed message; what could not be parsed is a `Malformed`, a message like any other.
        size: bytes it took on the wire, for the mailbox's accounting.
        origin: where it came in, or None where there is only one connection.
        headers: transport headers by lower-case name; opaque to channels, None where there are none.
        principal: who sent it, as the transport's identity hook decided; None until someone authenticates.
    """

    message: Message
    size: int = 0
    origin: Origin | None = None
    headers: Mapping[str, str] | None = None
    principal: Principal | None = None


@attrs.define(eq=False)
@shown
class Outgoing:
    """One message on its way out, encoded already: transports frame bytes and never encode.

    Attributes:
        data: the message as JSON text in UTF-8, without framing and without a raw newline.
        kind: what it is.
        request_id: the request it is (REQUEST), answers (REPLY), belongs to (NOTIFICATION) or cancels (CANCEL).
        origin: that of the incoming request it belongs to, or None.
        headers: transport headers to send with it; opaque to channels, None where there are none.
        error: the code of the error that it is (REPLY), or None: some transports have statuses for them.
    """

    data: bytes
    kind: Kind
    request_id: RequestId | None = None
    origin: Origin | None = None
    headers: Mapping[str, str] | None = None
    error: int | None = None


_METHOD_WITHIN: Final = 96  # bytes of a notification in which its method stands: we write it before the params


def lane_of(outgoing: Outgoing) -> str:
    """Return which of `LANES` a message belongs to. For what is merged, dropped or looked at, not for every message."""
    if outgoing.kind is Kind.REPLY:
        return "replies"
    if outgoing.kind is Kind.REQUEST:
        return "requests"
    if outgoing.kind is Kind.NOTIFICATION:
        beginning = outgoing.data[:_METHOD_WITHIN]
        if b'"notifications/progress"' in beginning:
            return "progress"
        if b'"notifications/message"' in beginning:
            return "logs"
        if b'/list_changed"' in beginning or b'"notifications/resources/updated"' in beginning:
            return "changes"
    return "others"


@attrs.define(eq=False)
class LaneCounts:
    """What gave way because a reader was slow or gone, by lane.

    Attributes:
        merged: messages that gave way to a later one of their kind.
        dropped: messages that nobody will see.
        untold: log messages dropped since the peer was last told how many were.
    """

    merged: dict[str, int] = attrs.field(factory=dict)
    dropped: dict[str, int] = attrs.field(factory=dict)
    untold: int = 0

    def merge(self, lane: str) -> None:
        """Count a message that gave way to a later one."""
        self.merged[lane] = self.merged.get(lane, 0) + 1

    def drop(self, lane: str) -> None:
        """Count a message that nobody will see."""
        self.dropped[lane] = self.dropped.get(lane, 0) + 1

    def add(self, other: LaneCounts) -> None:
        """Count here what another one has counted, such as one of a session that has ended."""
        for mine, theirs in ((self.merged, other.merged), (self.dropped, other.dropped)):
            for lane, count in theirs.items():
                mine[lane] = mine.get(lane, 0) + count


class Sink(ABC):
    """Where outgoing messages go: a session's outbox, or the response of one HTTP request.

    The defaults are those of a sink in which nothing waits and whose connection stays.
    """

    __slots__ = ()

    @property
    def full(self) -> bool:
        """Whether a sender has to wait for room first."""
        return False

    async def room(self) -> None:  # noqa: B027
        """Wait until there is room for one more message, of whatever size."""

    @abstractmethod
    def post(self, outgoing: Outgoing) -> None:
        """Enqueue now, whether there is room or not; never blocks. Senders that can wait call `room` first.

        Raises:
            LocalError: it is a request, and there is no way to send it.
        """

    def post_latest(self, key: Hashable, outgoing: Outgoing) -> None:
        """Enqueue, in place of an earlier message of the same key that has not left yet."""
        self.post(outgoing)

    def settle_latest(self, key: Hashable, *, keep: bool) -> None:  # noqa: B027
        """Put the latest message of `key` in order before what is posted next, or drop it."""

    def withdraw(self, request_id: RequestId) -> bool:
        """Take back a request that has not left yet; False if it has."""
        return False

    def unanswered(self, request_id: RequestId) -> None:  # noqa: B027
        """Note that this request of the peer's gets no answer: it gave the request up."""

    def release(self) -> None:  # noqa: B027
        """Let the peer's connection go, where the transport lets it come back for the rest; else do nothing."""

    def close(self) -> None:  # noqa: B027
        """No more is posted; what is queued still leaves."""

    def waiting(self) -> tuple[Sequence[Outgoing], int]:
        """Return the messages that are still held here, and the bytes handed on that the peer has not taken."""
        return (), 0


class _Nowhere(Sink):
    """Drops notifications, and refuses requests."""

    def post(self, outgoing: Outgoing) -> None:
        if outgoing.kind is Kind.REQUEST:
            raise LocalError("the client cannot be asked outside a request: it has no session here")


NOWHERE: Final[Sink] = _Nowhere()
"""The sink of what belongs to no request where nothing leads to the peer, or nothing any more."""


class OneTask:
    """A `with` block for one task at a time; a second task gets `trio.BusyResourceError`.

    Args:
        does: what the task does, for the text of the error: "sending on" or "receiving from" the channel.
    """

    __slots__ = ("_busy", "_does")

    def __init__(self, does: str) -> None:
        self._does = does
        self._busy = False

    def __enter__(self) -> None:
        if self._busy:
            raise trio.BusyResourceError(f"another task is {self._does} this channel")
        self._busy = True

    def __exit__(self, *raised: object) -> None:
        self._busy = False


class MessageChannel(ABC):
    """Sends and receives whole messages: all a transport has to offer.

    One task sends and one task receives at a time; a second one gets `trio.BusyResourceError`. `trimcp.testing.
    check_channel` checks the whole contract.
    """

    mirrors_headers: bool = False
    """Whether `Outgoing.headers` reach the peer (HTTP); servers then compare them with the body."""

    half_open: bool = True
    """Whether the peer still reads after it has closed its side (a pipe). If not, its requests are cancelled then."""

    too_slow: bool = False
    """Whether the connection was ended on our side because the peer took nothing for too long."""

    read_ahead: tuple[int, int] = (0, 0)
    """How many requests one `receive` may bring, and how many bytes of text that and what lies here meanwhile may be.

    A session stops reading so much before its window is full. One message larger than that may still pass it.
    """

    holding: Holding | None = None
    """What is counted of the memory that this connection makes us keep; None counts nothing.

    Set by whoever accepted the connection, else by the session that is driven over it.
    """

    @abstractmethod
    async def send(self, batch: Sequence[Outgoing]) -> None:
        """Send every message of the batch, in order, in as few writes as possible.

        Returns once the bytes are with the operating system (or the peer). Cancelling it may leave a message half
        written, after which the channel is broken: only the session's one writer calls it.

        Raises:
            trio.BrokenResourceError: the peer is gone, or an earlier send was cut short.
            trio.ClosedResourceError: this channel was closed here.
            trio.BusyResourceError: another task is sending.
        """

    @abstractmethod
    async def receive(self) -> Sequence[Incoming]:
        """Wait for messages and return all that have arrived, at least one.

        Cancelling it loses nothing: what had arrived is returned by the next call.

        Raises:
            trio.EndOfChannel: the peer has closed its side; nothing more will come.
            trio.BrokenResourceError: the connection broke.
            trio.ClosedResourceError: this channel was closed here.
            trio.BusyResourceError: another task is receiving.
        """

    def set_max_message(self, size: int) -> None:  # noqa: B027  # who bounds nothing need not say so
        """Take in no message of more than `size` bytes from now on; a larger one arrives as `Malformed`.

        A session calls it with its `Limits.max_message` before it receives. By default nothing is bounded.
        """

    def wait_for_persons(self, person: Callable[[], AbstractContextManager[None]]) -> None:  # noqa: B027  # as above
        """Take what is to be put around a person's time, such as for a login: the clocks of calls stand still then.

        A client calls it before its first message. By default nobody is asked.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """Close both directions; safe to call twice. When cancelled it still closes, without waiting for niceties."""

    def close_reason(self) -> str | None:
        """Say how the other side ended, as far as this channel knows, for the errors of calls; None for nothing."""
        return None

    async def hung_up(self) -> None:
        """Wait, without receiving, until nobody is there any more who would read an answer.

        Asked while a session does not receive because it has enough to do: else that the peer has left would show only
        behind everything that it sent before. Where nobody can tell, this waits until it is cancelled.
        """
        await trio.sleep_forever()

    def taken(self) -> Hashable:
        """Return what changes whenever the peer takes more of the send under way; None if nobody can tell.

        Asked now and then while a send lasts. A peer that takes a little is slow; one that takes nothing for
        `Limits.stall_timeout` seconds is dropped. Where nobody can tell, a send that lasts so long is taken for that.
        A channel that itself gives up such a peer returns something new each time, and says so in `too_slow`.
        """
        return None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            await self.aclose()
        except trio.Cancelled:
            if exc_value is None:  # else what the body raised tells more
                raise


_LOOKS: Final = 4  # within the time allowed: so a peer is kept for at most a quarter longer
_NEARLY: Final = 0.999  # of the time allowed: what is left then is nothing


class PeerProgress:
    """Tells when a peer has taken nothing of what is sent to it for too long. It sets no timer: whoever sends asks it.

    Call `begin` and then `look` now and then, where one can see how much the peer has taken; or `step` around each
    piece that is written.

    Args:
        patience: seconds in which the peer has to take something; infinity for no limit.
    """

    __slots__ = ("_mark", "_since", "patience")

    def __init__(self, patience: float) -> None:
        self.patience: float = patience
        self._mark: Hashable = None
        self._since = math.inf

    def begin(self, mark: Hashable = None) -> float:
        """Note that a send begins; return the seconds after which to look."""
        self._mark, self._since = mark, trio.current_time()
        return self.patience / _LOOKS  # what the system takes at first is no reading yet

    def look(self, mark: Hashable) -> float:
        """Return the seconds after which to look again, or 0 if the peer has taken nothing for `patience` seconds.

        Args:
            mark: what changes whenever the peer takes something.
        """
        if mark != self._mark:
            return self.begin(mark)
        silence = self.silence
        if silence >= self.patience * _NEARLY:
            return 0.0
        return min(self.patience - silence, self.patience / _LOOKS)

    def step(self) -> trio.CancelScope:
        """Begin to send a piece; return the scope for it, which is cancelled when `patience` is over."""
        self.begin()
        return trio.CancelScope(deadline=self._since + self.patience)

    @property
    def silence(self) -> float:
        """For how many seconds nothing was seen to be taken."""
        return trio.current_time() - self._since


# The loop on which all of this runs


def require_trio() -> None:
    """Check that a Trio task runs this: called once where a connection, a server or a test begins.

    Raises:
        RuntimeError: none does; the text says what to do instead.
    """
    if trio.lowlevel.in_trio_task():
        return
    if _asyncio_runs():
        what = "asyncio runs this. Start the program with trio.run(main), or give trimcp a thread of its own: "
        raise RuntimeError(f"trimcp runs on Trio; use trio.run. Here {what}await asyncio.to_thread(trio.run, main)")
    raise RuntimeError("trimcp runs on Trio; use trio.run. Here no Trio task runs this (in a test, pytest-trio does)")


def run_trio(name: str, instead: str, function: Callable[..., Any], *args: Any) -> None:
    """Run a whole program on Trio, unless an event loop runs here already, which it would stop.

    Args:
        name: of the public function that is called.
        instead: what to write where a loop runs.
        function, args: what to run.

    Raises:
        RuntimeError: a loop runs here; the text says what to do instead.
    """
    if trio.lowlevel.in_trio_run():
        raise RuntimeError(f"{name} calls trio.run itself; inside Trio use await trimcp.{instead}(server)")
    if _asyncio_runs():
        raise RuntimeError(
            f"{name} runs on Trio and would stop the asyncio loop that runs here; use it in a program without one, or "
            f"await asyncio.to_thread(trio.run, trimcp.{instead}, server)"
        )
    trio.run(function, *args)


def _asyncio_runs() -> bool:
    asyncio = sys.modules.get("asyncio")  # what is not loaded does not run
    return asyncio is not None and asyncio._get_running_loop() is not None
