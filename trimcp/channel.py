"""The interface between sessions and transports: whole messages in both directions, in batches.

A channel handles bytes and framing. It knows nothing of requests in progress, revisions or handlers, and the session
does not know whether the channel is a pipe, a socket or a list. Method names and exceptions are Trio's.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from types import TracebackType
from typing import Any, ClassVar, Final, NamedTuple, Protocol, Self

import attrs
import trio

from trimcp.budget import MemoryAccount
from trimcp.errors import LocalError
from trimcp.principal import Principal
from trimcp.support.slotted import shown, slotted, valued
from trimcp.wire.jsonrpc import Message, RequestId

LANES: Final = ("replies", "requests", "progress", "logs", "changes", "others")
"""Kinds of messages handled differently for a slow peer, see docs/reference/lanes.md. Cancels are in `others`."""


SERVER_MAX_MESSAGE: Final = 4 * 1024 * 1024
"""Default size limit, in bytes, of one message that a server receives."""

CLIENT_MAX_MESSAGE: Final = 64 * 1024 * 1024
"""Default size limit, in bytes, of one message that a client receives: results are larger than requests."""


class Kind(Enum):
    """The kind of an outgoing message, for transports that route or withdraw by it."""

    REQUEST = "request"
    REPLY = "reply"
    NOTIFICATION = "notification"
    CANCEL = "cancel"


class Origin(Protocol):
    """Where a message was received, for transports with several connections to one peer (HTTP exchanges, streams).

    The session sends everything that belongs to that message to the sink of its origin, and names the origin in every
    `Outgoing`. One with an attribute `agent_context` or `task` gives it to handlers (`ctx.agent_context`, `ctx.task`).
    """

    @property
    def name(self) -> str:
        """The origin's name in logs."""
        ...

    @property
    def client(self) -> str | None:
        """What identifies the client, such as its address without the port; None if the transport cannot tell."""
        ...

    @property
    def sink(self) -> Sink | None:
        """The sink of messages that belong to it; None for the session's own sink."""
        ...


# Both classes are mutable only because attrs takes three times as long to create a frozen object. Do not change them.
@attrs.define(eq=False)
@shown
class Incoming:
    """One received message.

    Attributes:
        message: the parsed message. One that could not be parsed is a `Malformed`.
        size: bytes on the wire, for the mailbox's accounting.
        origin: where it was received, or None if there is only one connection.
        headers: transport headers by lower-case name, not read by channels; None if there are none.
        principal: who sent it, from the transport's identity hook; None if nobody authenticated.
    """

    message: Message
    size: int = 0
    origin: Origin | None = None
    headers: Mapping[str, str] | None = None
    principal: Principal | None = None


@attrs.define(eq=False)
@shown
class Outgoing:
    """One message to send, already encoded: a transport adds the framing only.

    Attributes:
        data: the message as JSON text in UTF-8, without framing and without a raw newline.
        kind: the kind of message.
        request_id: the request that it is (REQUEST), answers (REPLY), belongs to (NOTIFICATION) or cancels (CANCEL).
        origin: the origin of the incoming request that it belongs to, or None.
        headers: transport headers to send with it, not read by channels; None if there are none.
        error: the error code of an error reply, or None. Some transports map it to a status.
    """

    data: bytes
    kind: Kind
    request_id: RequestId | None = None
    origin: Origin | None = None
    headers: Mapping[str, str] | None = None
    error: int | None = None


_METHOD_WITHIN: Final = 96  # first bytes of a notification that contain its method: we write it before the params


def lane_of(outgoing: Outgoing) -> str:
    """Return the lane, one of `LANES`, of a message. Called only for messages that are merged, dropped or inspected."""
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


@slotted
class LaneCounts:
    """Messages merged or dropped because a reader was slow or gone, by lane.

    Attributes:
        merged: messages replaced by a later one of their kind.
        dropped: messages that will not be delivered.
        untold: log messages dropped since the peer was last sent their number.
    """

    merged: dict[str, int] = attrs.field(factory=dict)
    dropped: dict[str, int] = attrs.field(factory=dict)
    untold: int = 0

    def merge(self, lane: str) -> None:
        """Count a message that was replaced by a later one."""
        self.merged[lane] = self.merged.get(lane, 0) + 1

    def drop(self, lane: str) -> None:
        """Count a message that will not be delivered."""
        self.dropped[lane] = self.dropped.get(lane, 0) + 1

    def add(self, other: LaneCounts) -> None:
        """Add the counts of another object, for example of a session that has ended."""
        for mine, theirs in ((self.merged, other.merged), (self.dropped, other.dropped)):
            for lane, count in theirs.items():
                mine[lane] = mine.get(lane, 0) + count


class Link(NamedTuple):
    """How a peer has come here, or is reached, for people who look at what runs."""

    transport: str
    """Such as "stdio", "HTTP/2" or "WebSocket"."""
    address: str | None = None
    """As in logs ("127.0.0.1:40312", "unix"); None where there is none."""


IN_MEMORY: Final = Link("in memory")


class Sink(ABC):
    """A destination of outgoing messages: a session's outbox, or the response of one HTTP request.

    The default methods are those of a sink that holds no messages back and does not release its connection.
    """

    __slots__ = ()

    queues: ClassVar[bool] = False
    """Whether it keeps messages for a writer. Asked for each message, and `isinstance` of an abstract class is slow."""

    @property
    def link(self) -> Link | None:
        """How the peer has come that it leads to; None if it does not know. Read only when somebody looks."""
        return None

    @property
    def full(self) -> bool:
        """Whether a sender has to wait for room first."""
        return False

    def full_of_replies(self, times: int = 1) -> bool:
        """Return whether answers alone, which wait for nothing, fill it `times` times."""
        return False

    @property
    def bytes_held(self) -> int:
        """Bytes of the messages that it keeps or that are being written."""
        return 0

    async def room(self) -> None:  # noqa: B027
        """Wait until there is room for one more message of any size."""

    @abstractmethod
    def post(self, outgoing: Outgoing) -> None:
        """Enqueue now, even if there is no room; never blocks. Senders that can wait call `room` first.

        Raises:
            LocalError: it is a request, and there is no connection to send it on.
        """

    def post_alone(self, outgoing: Outgoing) -> None:
        """Do as `post`, with a message that probably no others follow in this turn of Trio's loop.

        It may be sent at once. Where others follow, `post` is better: a queue sends them in one write.
        """
        self.post(outgoing)

    def post_latest(self, key: Hashable, outgoing: Outgoing) -> None:
        """Enqueue in place of an unsent message with the same key."""
        self.post(outgoing)

    def finish_latest(self, key: Hashable, *, keep: bool) -> None:  # noqa: B027
        """Put the latest message of `key` before the next one posted, or drop it."""

    def withdraw(self, request_id: RequestId) -> bool:
        """Remove a request that is not sent yet; return False if it is already sent."""
        return False

    def unanswered(self, request_id: RequestId) -> None:  # noqa: B027
        """Note that this request of the peer gets no answer, because the peer cancelled it."""

    def release(self) -> None:  # noqa: B027
        """Close the peer's connection if the transport lets the peer reconnect for the rest; else do nothing."""

    def close(self) -> None:  # noqa: B027
        """Accept no more messages; those queued are still sent."""

    def waiting(self) -> tuple[Sequence[Outgoing], int]:
        """Return the messages still held here, and the number of bytes handed on that the peer has not taken."""
        return (), 0


class _Nowhere(Sink):
    """Drops notifications and refuses requests."""

    def post(self, outgoing: Outgoing) -> None:
        if outgoing.kind is Kind.REQUEST:
            raise LocalError("the client cannot be asked outside a request: it has no session here")


NOWHERE: Final[Sink] = _Nowhere()
"""The sink for messages that belong to no request when no connection leads to the peer (any more)."""


class MessageWriter(Protocol):
    """The writing side of a connection into whose session a transport pushes messages. Nothing here blocks.

    It also tells the session how far the transport reads ahead.
    """

    @property
    def read_ahead(self) -> tuple[int, int]:
        """The most requests that one read may deliver, and the most bytes of text in them; as for a channel."""
        ...

    @property
    def link(self) -> Link | None:
        """How the peer has come here, for people who look."""
        ...

    @property
    def blocked(self) -> bool:
        """Whether the system has accepted less than all. The session keeps further messages until `writable`."""
        ...

    @property
    def waiting(self) -> int:
        """Bytes that were written here and that the system has not accepted yet."""
        ...

    def write(self, outgoing: Outgoing) -> None:
        """Write a message: at once, or together with others of this turn of Trio's loop."""

    def write_later(self) -> None:
        """Call the session's `writable` when this turn of Trio's loop ends."""

    def session_ended(self) -> None:
        """Note that the session was closed: send what is left, and close the connection."""


class OneTask:
    """A `with` block for one task at a time; a second task gets `trio.BusyResourceError`.

    Args:
        does: what the task does, for the error text: "sending on" or "receiving from" the channel.
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


@slotted(frozen=True)
@valued
class HttpClientStatistics:
    """The connections of a client over HTTP to its server.

    Attributes:
        client: what carries the requests, decided when the client connects: "trimcp" or "httpx2". See
            docs/reference/network.md.
        connections: open connections, and those being opened; None if the client was made by the user.
        idle: those of them that wait for a request.
        in_use: exchanges under way: each has a connection, or waits for one.
        waiting: those of them that wait because no more connections may be opened.
    """

    client: str
    connections: int | None
    idle: int | None
    in_use: int
    waiting: int = 0


class MessageChannel(ABC):
    """Sends and receives whole messages. This is all that a transport must implement.

    One task sends and one task receives at a time; a second one gets `trio.BusyResourceError`.
    `trimcp.testing.check_channel` tests an implementation of this interface.
    """

    mirrors_headers: bool = False
    """Whether `Outgoing.headers` are sent to the peer (HTTP); servers then compare them with the body."""

    sends_now: bool = False
    """Whether `send_nowait` can send, so that a message that comes alone needs no turn of the session's writer."""

    half_open: bool = True
    """Whether the peer can still read after it closed its sending side (a pipe). If not, its requests are cancelled."""

    too_slow: bool = False
    """Whether this side closed the connection because the peer read nothing for too long."""

    read_ahead: tuple[int, int] = (0, 0)
    """The most requests one `receive` may return, and the most bytes of text in them and in what is buffered meanwhile.

    A session stops reading this much before its window is full. A single message larger than that may exceed it.
    """

    link: Link | None = None
    """How the peer has come here, or is reached, for people who look; set by the code that opened the connection."""

    holding: MemoryAccount | None = None
    """Counts the memory that this connection uses; None counts nothing.

    Set by the code that accepted the connection, else by the session that runs over it.
    """

    @abstractmethod
    async def send(self, batch: Sequence[Outgoing]) -> None:
        """Send every message of the batch, in order, in as few writes as possible.

        Returns when the bytes are passed to the operating system (or to the peer). Cancelling this may leave a message
        half written; the channel is then broken. So only the session's one writer task calls it.

        Raises:
            trio.BrokenResourceError: the peer is gone, or an earlier send was cancelled half-way.
            trio.ClosedResourceError: this channel was closed here.
            trio.BusyResourceError: another task is sending.
        """

    def send_nowait(self, outgoing: Outgoing) -> Outgoing | None:
        """Send as much of a message as the system takes at once, and return the rest, to be sent next; None if all.

        Never waits and never raises: where nothing can be sent now, for whatever reason, it returns the message, and
        `send` will wait or raise. Called only where `sends_now` is True, and not during a `send`.
        """
        return outgoing

    @abstractmethod
    async def receive(self) -> Sequence[Incoming]:
        """Wait for messages and return all that have arrived, at least one.

        Cancelling this loses nothing: the next call returns what has arrived.

        Raises:
            trio.EndOfChannel: the peer has closed its sending side; no more messages will arrive.
            trio.BrokenResourceError: the connection broke.
            trio.ClosedResourceError: this channel was closed here.
            trio.BusyResourceError: another task is receiving.
        """

    def count_received(self) -> None:  # noqa: B027  # a channel that counts no memory need not implement it
        """Count what the last `receive` returned no longer in `holding`: the session does, from now on.

        The next `receive` does the same. In between it is counted twice, because counted nowhere for a moment it would
        let somebody else's message in.
        """

    def set_max_message(self, size: int) -> None:  # noqa: B027  # a channel without a limit need not implement it
        """Accept no message of more than `size` bytes from now on; a larger one arrives as `Malformed`.

        A session calls it with its `Limits.max_message` before it receives. The default is no limit.
        """

    def set_user_interaction(self, person: Callable[[], AbstractContextManager[None]]) -> None:  # noqa: B027  # as above
        """Set the context manager to enter while waiting for a person, such as for a login: call timeouts pause then.

        A client calls it before its first message. By default no person is ever waited for.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """Close both directions; may be called twice. If cancelled, it still closes, but not gracefully."""

    def close_reason(self) -> str | None:
        """Return why the peer's side ended, if this channel knows it, for the errors of calls; else None."""
        return None

    def http_statistics(self) -> HttpClientStatistics | None:
        """Return a snapshot of the connections of a client over HTTP; None for every other channel."""
        return None

    async def wait_peer_closed(self) -> None:
        """Wait, without receiving, until the peer can no longer read an answer.

        Called while a session does not receive because it has enough to do. Otherwise the peer's end would be noticed
        only after everything that it sent before. A channel that cannot tell waits until it is cancelled.
        """
        await trio.sleep_forever()

    def write_progress(self) -> Hashable:
        """Return a value that changes whenever the peer takes more of the present send; None if that cannot be known.

        Called from time to time during a send. A peer that takes a little is slow; one that takes nothing for
        `Limits.stall_timeout` seconds is disconnected. With None, a send that lasts that long counts as taking nothing.
        A channel that disconnects such a peer itself returns a new value each time, and sets `too_slow`.
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
            if exc_value is None:  # else the body's exception is more useful
                raise


_LOOKS: Final = 4  # checks within the time allowed, so a peer is kept for at most a quarter longer
_NEARLY: Final = 0.999  # of the time allowed: the rest is a rounding error


class PeerProgress:
    """Detects that a peer has taken nothing of what is sent to it for too long. It sets no timer: the sender asks it.

    If the sender can see how much the peer has taken, it calls `begin` and then `look` from time to time. Otherwise it
    uses `step` around each piece that it writes.

    Args:
        patience: seconds within which the peer has to take something; infinity for no limit.
    """

    __slots__ = ("_mark", "_since", "patience")

    def __init__(self, patience: float) -> None:
        self.patience: float = patience
        self._mark: Hashable = None
        self._since = math.inf

    def begin(self, mark: Hashable = None) -> float:
        """Note that a send begins; return the seconds after which to call `look`."""
        self._mark, self._since = mark, trio.current_time()
        return self.patience / _LOOKS  # what the system buffers at first does not count as read by the peer

    def look(self, mark: Hashable) -> float:
        """Return the seconds after which to call it again, or 0 if the peer has taken nothing for `patience` seconds.

        Args:
            mark: a value that changes whenever the peer takes something.
        """
        if mark != self._mark:
            return self.begin(mark)
        silence = self.silence
        if silence >= self.patience * _NEARLY:
            return 0.0
        return min(self.patience - silence, self.patience / _LOOKS)

    def step(self) -> trio.CancelScope:
        """Begin to send one piece; return the cancel scope for it, which expires after `patience` seconds."""
        self.begin()
        return trio.CancelScope(deadline=self._since + self.patience)

    @property
    def silence(self) -> float:
        """Seconds since the peer was last seen to take something."""
        return trio.current_time() - self._since


# The event loop


def stall_text(seconds: float) -> str:
    """Return what is said of a peer that was dropped because it took nothing for so many seconds."""
    return f"the peer read nothing for {seconds:g} seconds"


def require_trio() -> None:
    """Check that a Trio task runs this. Called once, where a connection, a server or a test begins.

    Raises:
        RuntimeError: no Trio task runs; the text says what to do instead.
    """
    if trio.lowlevel.in_trio_task():
        return
    if _asyncio_runs():
        what = "asyncio runs this. Start the program with trio.run(main), or give trimcp a thread of its own: "
        raise RuntimeError(f"trimcp runs on Trio; use trio.run. Here {what}await asyncio.to_thread(trio.run, main)")
    raise RuntimeError("trimcp runs on Trio; use trio.run. Here no Trio task runs this (in a test, pytest-trio does)")


def run_trio(name: str, instead: str, function: Callable[..., Any], *args: Any) -> None:
    """Run a whole program on Trio, but not inside a running event loop, which this would block.

    Args:
        name: the public function that was called.
        instead: what to call if an event loop is running.
        function, args: what to run.

    Raises:
        RuntimeError: an event loop is running; the text says what to do instead.
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
    asyncio = sys.modules.get("asyncio")  # a module that is not loaded cannot be running
    return asyncio is not None and asyncio._get_running_loop() is not None
