"""A client program: its handlers (`client.handlers`), and how it connects to servers."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from trimcp.client.connect import Target, connecting, named
from trimcp.client.handlers import ClientProgram
from trimcp.client.session import ClientSession
from trimcp.wire.revisions import Revision

__all__ = ["Client"]


class Client(ClientProgram):
    """A client program.

    Handlers may be sync or async; a sync one must return at once. Each may take the asking session as a keyword
    `session`. They run while calls are under way, in tasks of their connection.

    Args:
        name, version, title, description, website_url, icons: how it introduces itself to servers.
        revisions: the revisions it is willing to speak.
        roots: the places it works on; see `set_roots`.
        extensions: settings by extension id, declared to servers (2026-07-28 "Extensions").
        experimental: settings of non-standard abilities, declared to servers.
        request_timeout: seconds a server may work on a request without a sign of progress; the clock stands still
            while a person answers its questions. None: no limit but the caller's own scopes.
        max_request_time: seconds after which a request fails in any case; None for no limit.
        send_deadlines: tell servers how long a request's caller waits (its own scopes, `max_request_time`), in
            `_meta["trimcp/timeout"]` as the seconds left; a server of trimcp then stops work nobody waits for.
        asks_per_minute: how many questions one server may ask per minute; beyond it they are refused.
        connect_timeout: seconds that connecting may take in all, from opening the target to the first answers;
            `math.inf` for as long as the caller's own scopes let it. Give more to programs that are downloaded when
            they are started.
        probe_timeout: seconds of these in which a server may leave the first message unanswered before it is taken for
            a legacy one. None: half of them, and at most 30.
        validate_output: check structured results against the output schemas of listed tools.
        max_rounds: how often one call may come back with questions instead of a result.
        max_pages: how many pages a list may have.
        log_level: the lowest level of log message that servers are asked for, if there is a handler: with each request
            in 2026-07-28, once after the handshake before.
        limits: every other bound.

    Attributes:
        sessions: the connections there are now.

    Timeouts and bounds can be read under their names. What else has a public name, such as `on_sampling`, is there for
    what connects and answers, and may change; handlers are registered with the methods.
    """

    sessions: set[ClientSession]

    def connect(
        self, target: Target, *, revision: Revision | str | None = None
    ) -> AbstractAsyncContextManager[ClientSession]:
        """Connect to a server, agree with it on a revision, and yield the session.

        What the body raises leaves as itself. Leaving the block ends the connection (and a child process with it);
        so does cancelling it. The loss of the server ends no body: it fails calls with `ConnectionLost`.

        Args:
            target: a URL (http, https, ws, wss), what `trimcp.stdio`, `trimcp.http` or `trimcp.websocket` returns, a
                `MessageChannel`, or an async context manager that yields one.
            revision: speak exactly this one; by default the newest that both sides know.

        Raises:
            TypeError: the target is none of these.
            LocalError: the target cannot be opened, or there is no such revision.
            ConnectionLost: the server ended before it was ready; the text carries its last words.
            RemoteError, InvalidReply: it refused, or there is no common revision.
            trio.TooSlowError: that took longer than `connect_timeout`.
        """
        return connecting(self, named(target), revision, self.connect_timeout)
