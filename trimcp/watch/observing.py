"""Look at a server that runs: pictures of what it does, and what an operator may do about it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Final

import trio

from trimcp.channel import require_trio
from trimcp.errors import LocalError
from trimcp.session.incoming.job import CancelReason, Job, session_key
from trimcp.session.session import Session
from trimcp.support.bounds import check_number
from trimcp.support.cleaning import in_quotes
from trimcp.watch.picture import EndedRequest, Observed, Picture, ended_request, request_key, take_picture
from trimcp.watch.wire import Tap, look_at

log: logging.Logger = logging.getLogger("trimcp.admin")

_KEPT: Final = 100  # requests that have ended


class Observation:
    """Pictures of a server while it runs: `async for picture in observation`. Made by `Server.observe`.

    A picture is taken when it is asked for, so whoever is slow gets the latest, and there is no queue. It is entered
    once, and keeps of what ends from then on.

    Args:
        server: the server.
        interval: the least seconds between two pictures.
        who: who looks, for the log of what they do.
    """

    def __init__(self, server: Observed, interval: float = 0.25, who: str = "this program") -> None:
        require_trio()
        check_number("interval", interval)
        self._server = server
        self._interval = interval
        self._who = who
        self._ended: deque[EndedRequest] = deque(maxlen=_KEPT)
        self._taken = -interval
        self._room = _KEPT
        self._telling = server.telling_finished(self.finished)
        self._tap: Tap | None = None

    def __enter__(self) -> Observation:
        self._telling.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._look_away()
        self._telling.__exit__(*raised)

    def __aiter__(self) -> AsyncIterator[Picture]:
        return self

    async def __anext__(self) -> Picture:
        """Wait until the interval is over, and return a picture of now. Cancelling this loses nothing."""
        await trio.sleep_until(self._taken + self._interval)
        self._taken = trio.current_time()
        return self.picture()

    def picture(self) -> Picture:
        """Return a picture of now at once."""
        self._room = _KEPT
        return take_picture(self._server, self._ended)

    def wire(self, session: str, after: int = 0, text: bool = False) -> dict[str, Any]:
        """Look at the messages of one session, from the first time that this is called for it.

        It ends when it is called for another one, after ten seconds without a call, and with the session. At most 500
        messages are kept, and 1 MiB of what is in them.

        Args:
            session: its `key` in a picture.
            after: the number of the last message that was seen.
            text: say what is in messages that come from now on, with secrets masked, of each at most 8 KiB.

        Returns the latest messages as `events`, the number of those that are not kept any more as `missed`, of all as
        `count`, and why the session has ended, or None, as `ended`.

        Raises:
            LocalError: it has ended before this was called.
        """
        tap = self._tap
        if tap is None or session_key(tap.session) != session or tap.over:
            found = self._session(session)
            self._look_away()
            tap, after = look_at(found), 0
            self._tap = tap
        if text and not tap.wants(self):
            self._say("reads what is said in a session", session)
        return tap.latest(self, after, text=text)

    def _look_away(self) -> None:
        tap, self._tap = self._tap, None
        if tap is not None:
            tap.leave(self)

    # What an operator does; each is logged as a warning of the logger "trimcp.admin".

    def cancel(self, request: str, reason: str) -> None:
        """Cancel a request; its handler and its caller are told the reason.

        Args:
            request: its `key` in a picture.
            reason: a text.

        Raises:
            LocalError: it has ended.
        """
        for session in self._server.sessions():
            for job in session.jobs:
                if request_key(job) == request:
                    about = "" if job.target is None else f" {in_quotes(job.target)}"
                    self._say(f"cancels {job.request.method.name}{about}", reason)
                    session.jobs.cancel(job, CancelReason.OPERATOR, reason)
                    return
        raise LocalError("this request has ended")

    def close(self, session: str, reason: str) -> None:
        """End a session: its requests are cancelled, and its connection closes.

        Args:
            session: its `key` in a picture.
            reason: a text.

        Raises:
            LocalError: it has ended.
        """
        found = self._session(session)
        holding = found.memory.holding
        self._say("closes a session" + ("" if holding is None else f" of {in_quotes(holding.owner.name)}"), reason)
        found.jobs.cancel_all(CancelReason.OPERATOR, reason)
        found.close()

    async def drain(self, grace: float = 5.0, reason: str = "drained") -> None:
        """Let the server take no more requests; those under way have `grace` seconds. Returns when all have ended."""
        check_number("grace", grace, zero=True)
        self._say("drains the server", reason)
        async with trio.open_nursery() as nursery:
            for running in list(self._server.runs):
                nursery.start_soon(running.drain, grace)

    def _session(self, key: str) -> Session:
        for session in self._server.sessions():
            if session_key(session) == key:
                return session
        raise LocalError("this session has ended")

    def _say(self, what: str, reason: str) -> None:
        log.warning("%s %s: %s", self._who, what, in_quotes(reason))

    def finished(self, job: Job, reply: bytes | None) -> None:
        """Keep how a request ended. Between two pictures no more that went well are kept than one shows."""
        if self._room or job.error is not None or job.cancelled is not None:
            self._room = max(0, self._room - 1)
            self._ended.append(ended_request(job, reply))
