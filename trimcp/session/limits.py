"""Every bound and timeout of a session in one class, and the reasons for the defaults."""

from __future__ import annotations

import attrs

from trimcp.channel import CLIENT_MAX_MESSAGE, SERVER_MAX_MESSAGE
from trimcp.protocol.profile import Role
from trimcp.support.bounds import check_instance, checked
from trimcp.support.slotted import valued


@attrs.frozen(field_transformer=checked(zero=("waiting",)))
@valued
class Quota:
    """How much of a server one session, one principal, or the calls of one tool may use.

    Calls beyond it wait for their turn. Sessions take turns, so a session with a thousand calls delays another's by
    one. A call that cannot wait, or would wait past its deadline, is refused at once (`Overloaded`), with the seconds
    after which to retry. A call counts from its turn to its answer.

    Attributes:
        running: how many may run at once; None for no bound.
        per_second: how many may begin per second, on average; None for no bound.
        burst: how many may begin at once after a pause; by default as many as in one second, at least one.
        waiting: how many may wait for their turn.
    """

    running: int | None = None
    per_second: float | None = None
    burst: int | None = None
    waiting: int = 1_000

    @property
    def bounds(self) -> bool:
        """Whether anything is bounded."""
        return self.running is not None or self.per_second is not None


_ANY = Quota()


def _check_quota(limits: Limits, attribute: attrs.Attribute[Quota], value: object) -> None:
    if not isinstance(value, Quota):
        raise TypeError(f"Limits.{attribute.name} is a trimcp.Quota(...), not {value!r:.60}")


@attrs.frozen(field_transformer=checked(zero=("eof_grace", "drain_timeout")))
@valued
class Limits:
    """How much one session may hold, and how long it waits. Sizes are in bytes, times in seconds.

    It has more than 20 fields because each is a setting.

    Attributes:
        max_message: the largest message accepted, over every transport; None for 4 MiB in a server and 64 MiB in a
            client. A larger request is answered with an error; a larger answer fails its call.
        max_running: requests of the peer that run at once. One that waits for the peer's answer does not count.
        backlog_requests: requests that may wait for a slot, together with those that wait for the peer.
        backlog_bytes: memory of the waiting requests, each with 2,100 bytes beside its text. When the backlog is full,
            reading pauses, so this is the window of a peer that pipelines without reading. One message may exceed it.
        running_bytes: memory of the running requests, including those that wait for the peer and results not yet read;
            the next request waits. Of requests that end at once, a result that exceeds twice this becomes an error
            (-32603, reason "results_unread"), although its call was carried out.
        outbox_messages, outbox_bytes: messages queued for a peer that reads slowly; senders wait for room. The writer
            may have taken twice as much again, so a slow reader costs less than 2 MiB.
        progress_kept: progress messages kept for the reader of a call; beyond it the oldest are dropped and counted.
        logs_kept: log messages kept for a client's handler; beyond it the oldest are dropped and counted.
        kept_bytes: total size of each of these; larger messages are kept in smaller numbers.
        eof_grace: how long requests already received may still run after the peer closed its sending side of a
            channel (a pipe). Use more for one-shot commands in a pipeline.
        drain_timeout: how long the writer may take to send what is queued when a session ends.
        stall_timeout: for how long a peer may take nothing of what is being written to it. Then the session ends and
            its handlers are cancelled (`CancelReason.LIMIT`). A peer that reads slowly is kept. Infinity for never.
            Over HTTP it is `HttpLimits.stall_timeout`.
        answer_timeout: how long the peer, and the person who uses it, may take to answer a question during a request
            whose handler waits for it. This time does not count for a tool's own timeout.
        max_result: the largest answer; a larger one becomes an error. The default is what clients of trimcp accept.
        max_client_info: memory of a client's name and capabilities in a server, from `initialize` (for as long as the
            session lasts) or from the envelope of a request. A request with more is refused (-32602). Icons in it may
            be `data:` URLs; most clients need less than 2 KiB.
        max_server_info: memory of a server's name, capabilities and instructions in a client. With more, connecting
            fails (`InvalidReply`).
        session, principal: quotas of one session, and of one authenticated principal over all its sessions, for tools,
            resources, prompts and completion together.
        tool, resource, prompt, completion: quotas of the calls of each tool, the reads of each resource or template,
            and so on, over all sessions, unless it has a quota of its own.
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
    session: Quota = attrs.field(default=_ANY, validator=_check_quota)
    principal: Quota = attrs.field(default=_ANY, validator=_check_quota)
    tool: Quota = attrs.field(default=_ANY, validator=_check_quota)
    resource: Quota = attrs.field(default=_ANY, validator=_check_quota)
    prompt: Quota = attrs.field(default=_ANY, validator=_check_quota)
    completion: Quota = attrs.field(default=_ANY, validator=_check_quota)

    def largest_into(self, role: Role) -> int:
        """Return the bytes of the largest message that a session of this role accepts."""
        if self.max_message is not None:
            return self.max_message
        return SERVER_MAX_MESSAGE if role is Role.SERVER else CLIENT_MAX_MESSAGE

    def kept_of(self, most: int, size: int) -> int:
        """Return how many messages of `size` bytes may be kept for a slow reader, at most `most`."""
        return max(1, min(most, self.kept_bytes // max(size, 1)))


def limits_of(given: Limits | None) -> Limits:
    """Return the limits that a program gave, or else the default ones. Raises TypeError for anything else."""
    check_instance("limits", given, Limits, "trimcp.Limits")
    return given or Limits()
