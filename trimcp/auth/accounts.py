"""One login while it is used: its tokens for all connections, how often a person was asked, and what a store lacks."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Final, Protocol

import attrs
import trio

from trimcp.auth.credentials import Credentials, StoreKey, Tokens
from trimcp.auth.jose import ProofKey
from trimcp.auth.stores import CredentialStore
from trimcp.errors import AuthorizationError
from trimcp.support.cleaning import one_line
from trimcp.support.nurseries import unwrap_single

_log = logging.getLogger("trimcp.auth")

_SAVING: Final = 5.0  # seconds that a store may take to keep a login
_LAST_WORDS: Final = 5.0  # seconds for a token that was asked for, and for keeping it, once nobody waits any more
_SAVE_AGAIN: Final = 1.0  # seconds until a save that failed is tried again; twice as many each time, at most a minute
_MOST_LOGINS: Final = 2  # in a row that bring no token that the server takes
_MOST_AN_HOUR: Final = 20  # logins in which a person is asked, whatever the server takes in between
_PAUSE: Final = 60.0  # seconds after which a program that nobody watches may try again
_RENEW_AGAIN: Final = 5.0  # seconds after a renewal beside what goes on has failed


class AuthorizedConnection(Protocol):
    """A connection that uses a login."""

    nursery: trio.Nursery  # for what is done beside its requests; it ends with the connection
    person: Callable[[], AbstractContextManager[None]]  # is put around the time in which a person logs in


@attrs.define(eq=False)
class Account:
    """What is known of one login, for all connections that use it, and as long as there are some."""

    key: StoreKey
    connections: int = 0
    credentials: Credentials | None = None
    proof_key: ProofKey | None = None
    attempt: Attempt | None = None
    renew_at: float = -math.inf  # when a token that is still good may be renewed, on Trio's clock
    connected: list[AuthorizedConnection] = attrs.field(factory=list)
    step_ups: dict[frozenset[str], int] = attrs.field(factory=dict)
    logouts: int = 0  # how often somebody logged out
    # why the store does not have `credentials`, which are newer than what it has; None if it has them
    unsaved: str | None = None
    replaced: Credentials | None = None  # what the store has instead
    unread: bool = False  # whether the store could not be read: what was damaged may have been moved away since
    trying: bool = False  # whether somebody tries to let the store have them
    # when a person was asked, or a program got a token anew, in the last hour
    logins: deque[float] = attrs.field(factory=deque)
    unaccepted: int = 0  # how many of them in a row brought no token that the server took

    def take(self, credentials: Credentials | None, dpop: bool) -> None:
        """Use these from now on."""
        self.credentials = credentials
        if credentials is not None and credentials.bound:
            kept = credentials.proof_key
            try:
                if self.proof_key is None or self.proof_key.jwk != kept:
                    self.proof_key = ProofKey.from_jwk(kept)
            except ValueError as error:
                _log.warning("the login for %s is not used: %s", self.key, one_line(str(error)))
                self.credentials = None
        if dpop and self.proof_key is None:
            self.proof_key = ProofKey.generate()

    @property
    def tokens(self) -> Tokens | None:
        return None if self.credentials is None else self.credentials.tokens

    def ended(self, attempt: Attempt) -> None:
        """Take note that the login or renewal that was under way has ended, well or not."""
        if not attempt.ended:
            self.renew_at = trio.current_time() + _RENEW_AGAIN
        self.attempt = None
        attempt.done.set()

    # How often somebody may be asked to log in

    def count_login(self, now: float) -> None:
        self.logins.append(now)
        self.unaccepted += 1

    def pardon(self) -> None:
        """Begin to count anew: somebody wants to log in."""
        self.logins.clear()
        self.unaccepted = 0

    def exhausted(self, now: float, person: bool) -> bool:
        """Return whether another login would be one too many."""
        while self.logins and not now - 3600 < self.logins[0] <= now:
            self.logins.popleft()
        if not person:
            return self.unaccepted >= _MOST_LOGINS and bool(self.logins) and now < self.logins[-1] + _PAUSE
        return self.unaccepted >= _MOST_LOGINS or len(self.logins) >= _MOST_AN_HOUR

    def forgettable(self, now: float) -> bool:
        """Return whether nothing would be lost with this, beyond what the store has."""
        return self.unsaved is None and not self.exhausted(now, True) and not self.logins

    # Keeping what the store has not

    async def newest(self, store: CredentialStore) -> Credentials | None:
        """Return what the store has, or what is newer; the store's lock is held.

        Raises Exception: the store's, if there is nothing in memory that could be used instead.
        """
        try:
            kept = await store.load(self.key)
        except Exception as error:  # of a disk or keyring, perhaps of the user's own class
            if self.credentials is None:
                raise
            log = _log.debug if self.unread else _log.warning
            log("the stored login for %s cannot be read, and the one in memory is used: %s", self.key, _why(error))
            self.unread = True
            return self.credentials
        if self.unsaved is None:
            self.unread = False
        else:
            if kept == self.replaced or (kept is None and self.unread):
                return self.credentials
            self.unsaved = None  # somebody has logged in or out since
        return kept

    async def save(self, store: CredentialStore, replaced: Credentials | None) -> None:
        """Let the store keep the credentials; the store's lock is held. What goes wrong is a warning."""
        assert self.credentials is not None
        first, self.unsaved, self.replaced = self.unsaved is None, "it was cancelled", replaced
        try:
            with trio.move_on_after(_SAVING) as saving:
                await store.save(self.key, self.credentials)
            self.unsaved = f"it took longer than {_SAVING:g} s" if saving.cancelled_caught else None
        except Exception as error:  # as above
            self.unsaved = _why(error)
        finally:
            if self.unsaved is not None:
                _log.log(
                    logging.WARNING if first else logging.DEBUG,
                    "the login for %s could not be kept: %s; it is used all the same, and that is tried again",
                    self.key,
                    self.unsaved,
                )

    def keep_trying(self, store: CredentialStore) -> None:
        """Let one of the connections try again, and again, to keep what could not be kept."""
        if self.unsaved is not None and not self.trying and self.connected:
            self.trying = True
            self.connected[0].nursery.start_soon(self._keep_trying, store)

    async def _keep_trying(self, store: CredentialStore) -> None:
        delay = _SAVE_AGAIN
        try:
            while self.unsaved is not None:
                await trio.sleep(delay)
                delay = min(2 * delay, 60.0)
                await self.try_again(store)
        finally:
            self.trying = False

    async def left(self, store: CredentialStore) -> None:
        """Let another connection go on trying, or try once more with the last one."""
        if self.connections:
            self.keep_trying(store)
            return
        with trio.move_on_after(_SAVING, shield=True):
            await self.try_again(store)

    async def try_again(self, store: CredentialStore) -> None:
        """Try to keep what could not be kept, unless the store has something newer by now."""
        try:
            async with store.exclusively(self.key):
                kept = await self.newest(store)
                if self.unsaved is not None and self.credentials is not None:
                    await self.save(store, self.replaced)
                    if self.tokens is None:  # logged out meanwhile
                        await store.remove(self.key)
                elif self.unsaved is None:
                    self.take(kept, False)
        except Exception as error:  # as above
            _log.debug("the login for %s still could not be kept: %s", self.key, _why(error))


@attrs.define(eq=False)
class Attempt:
    """A login or renewal under way, and how many wait for it."""

    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)  # gives it up
    # is shielded from that while a token is on its way, which the authorization server gives but once: a refresh token
    # that was used is good no more. It then has some seconds left.
    getting: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    done: trio.Event = attrs.field(factory=trio.Event)
    waiting: int = 0
    error: BaseException | None = None
    ended: bool = False

    def give_up(self, why: str) -> None:
        """End it; whoever waits is told why."""
        self.error = AuthorizationError(why)
        self.scope.cancel(reason=why)

    async def hurry(self) -> None:
        """Wait until it is given up, and bound what it may still take."""
        try:
            await trio.sleep_forever()
        finally:
            self.getting.deadline = trio.current_time() + _LAST_WORDS

    async def wait(self) -> None:
        """Wait until it has ended; if nobody waits any more, it is given up."""
        self.waiting += 1
        try:
            await self.done.wait()
        finally:
            self.waiting -= 1
            if not self.waiting and not self.done.is_set():
                self.scope.cancel(reason="nobody waits for the login any more")


def _why(error: Exception) -> str:
    """Return in one line why a store failed."""
    alone = unwrap_single(error)
    return one_line(str(alone) if isinstance(alone, AuthorizationError) else f"{type(alone).__name__}: {alone}")
