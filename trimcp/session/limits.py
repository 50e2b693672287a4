"""Every bound and grace period of a session in one record, with the reason for each default beside it."""

from __future__ import annotations

import attrs

from trimcp.bounds import checked
from trimcp.channel import CLIENT_MAX_MESSAGE, SERVER_MAX_MESSAGE
from trimcp.protocol.profile import Role
from trimcp.values import valued


@attrs.frozen(field_transformer=checked(zero=("waiting",)))
@valued
class Quota:
    """How much of a server one of many may use: one session, one principal, or the calls of one tool.

    What is beyond it waits for its turn, one of each session after the other, so that a session with a thousand calls
    delays another's by one. What cannot wait, or would wait past its deadline, is refused at once (`Overloaded`), with
    the seconds after which to try again. Calls are counted from when they get their turn to their answer.

    Attributes:
        running: how many may be under way at once; None for no bound.
        per_second: how many may begin per second, on average; None for no bound.
        burst: how many may begin at once after a pause; by default as many as in one second, and at least one.
        waiting: how many may wait for their turn.
    """

    running: int | None = None
    per_second: float | None = None
    burst: int | None = None
    waiting: int = 1_000

    @property
    def bounds(self) -> bool:
        """Whether it bounds anything."""
        return self.running is not None or self.per_second is not None


_ANY = Quota()


@attrs.frozen(field_transformer=checked(zero=("eof_grace", "drain_timeout")))
@valued
class Limits:
    """How much one session may hold, and how long it waits. Sizes are bytes, times are seconds.

    Attributes:
        max_message: of the largest message taken in, over every transport; None for 4 MiB into a server and 64 MiB into
            a client. A larger one is refused by its id, or fails the call it answers.
        max_running: requests of the peer worked on at once. One that waits for the peer's answer does not count.
        backlog_requests: requests that may wait behind them, together with those that wait for the peer.
        backlog_bytes: what the waiting ones may weigh, each with 2,100 bytes beside its text. With a full backlog
            reading pauses, so this is the window of a peer that pipelines without reading. One message may pass it.
        running_bytes: what the requests under way may weigh, those that wait for the peer and the results that wait to
            be read counted; the next one waits. Of requests that end at once, a result that passes twice as much
            becomes an error (-32603, reason "results_unread"): its call was carried out.
        outbox_messages, outbox_bytes: what may wait for a peer that reads slowly; senders wait for room. Twice as much
            again may have been taken by the writer: a slow reader costs less than 2 MiB.
        progress_kept: progress messages a call keeps for its reader; then the oldest give way and are counted.
        logs_kept: log messages kept for a client's handler; then the oldest give way and are counted.
        kept_bytes: what each of these may weigh before fewer are kept.
        eof_grace: how long requests already received may still run after the peer closed its side of a half-closed
            channel (a pipe). Longer suits piped one-shot use.
        drain_timeout: how long the writer may take to get rid of what is queued when a session ends.
        stall_timeout: for how long a peer may take nothing of what is being written to it. Then it is dropped: handlers
            are cancelled (`CancelReason.LIMIT`), the session is lost. A peer that reads slowly, but reads, is kept.
            Infinity for never. Over HTTP it is `HttpLimits.stall_timeout`.
        answer_timeout: how long the peer, and the person in front of it, may take to answer a question in the middle of
            a request, where the handler waits for it in place. It counts for no tool's own timeout.
        max_result: of one answer; a larger one becomes an error. What clients of trimcp take by default.
        max_client_info: of memory that a server keeps of what a client says of itself, in `initialize` (for as long as
            the session is) or in the envelope of a request: its name and its capabilities. A request with more is
            refused (-32602). Icons in it may be given as `data:`; most clients need less than 2 KiB.
        max_server_info: of memory that a client keeps of what a server says of itself: its name, its capabilities and
            its instructions. To a server that says more it does not connect (`InvalidReply`).
        session, principal: what one session, and one authenticated principal over all its sessions, may use of a
            server, of tools, resources, prompts and completion together.
        tool, resource, prompt, completion: what the calls of any one tool, the reads of any one resource or template,
            and so on, may use, over all sessions, unless it has a quota of its own.
    """

    max_message: int | None = None
    max_running: int = 1_000
    backlog_requests: int = 10_000
    backlog_bytes: int = 16 * 1024 * 1024
    running_bytes: int = 32 * 1024 * 1024
    outbox_messages: int = 1_024
    outbox_bytes: int = 256 * 1024
    progress_kept: int = 1_024
    logs_kept: int = 1_000
    kept_bytes: int = 4 * 1024 * 1024
    eof_grace: float = 0.5
    drain_timeout: float = 2.0
    stall_timeout: float = 60.0
    answer_timeout: float = 3_600.0
    max_result: int = 64 * 1024 * 1024
    max_client_info: int = 64 * 1024
    max_server_info: int = 1024 * 1024
    session: Quota = _ANY
    principal: Quota = _ANY
    tool: Quota = _ANY
    resource: Quota = _ANY
    prompt: Quota = _ANY
    completion: Quota = _ANY

    def largest_into(self, role: Role) -> int:
        """Return the bytes of the largest message that a session of this role takes in."""
        if self.max_message is not None:
            return self.max_message
        return SERVER_MAX_MESSAGE if role is Role.SERVER else CLIENT_MAX_MESSAGE

    def kept_of(self, most: int, size: int) -> int:
        """Return how many messages of `size` bytes may be kept for a slow reader where at most `most` are."""
        return max(1, min(most, self.kept_bytes // max(size, 1)))
