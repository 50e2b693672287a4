"""Tokens for a client: got when a server asks for one, kept, and renewed before they end.

The way to a token is `flow`'s; here it is carried out, once for all who need it. What is sent to the MCP server is not
known here: its transport asks for headers, and tells of refusals.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack, asynccontextmanager, nullcontext
from inspect import isawaitable
from typing import TYPE_CHECKING, Final

import attrs
import trio

from trimcp.auth.accounts import Account, Attempt
from trimcp.auth.browser import Browser, Redirect, UserAgent
from trimcp.auth.credentials import Credentials, StoreKey, Tokens
from trimcp.auth.discovery import Flow, T
from trimcp.auth.flow import Login
from trimcp.auth.grants import AuthorizationCode, Grant
from trimcp.auth.metadata import AuthChallenge, find_challenge, host_of, origin_of
from trimcp.auth.steps import Fetch, Fetched, Listen, Step, Visit, code_of, shown
from trimcp.auth.stores import CredentialStore, MemoryStore
from trimcp.errors import AuthorizationError
from trimcp.support.addresses import is_loopback
from trimcp.support.bounds import checked
from trimcp.support.cleaning import log_crash
from trimcp.support.nurseries import open_service_nursery, unwrap_single

if TYPE_CHECKING:
    import httpx2

    from trimcp.auth.fetching import Fetcher

_log = logging.getLogger("trimcp.auth")

_MOST_STEP_UPS: Final = 50  # sets of scopes that a server may ask for
_LOGOUT: Final = 5.0  # seconds that a logout waits for a login in another process
_MOST_TRIES: Final = 2  # that one request may cost: a token that was renewed, then one that is new


@attrs.define(eq=False, field_transformer=checked())
class OAuth:
    """How a client gets access tokens for the servers it connects to: `trimcp.http(url, auth=OAuth())`.

    May be used for several connections and servers. At most one login or renewal is under way for each server and
    identity; all who need the token wait for it, and it is given up when nobody waits any more.

    Attributes:
        grant: what the client has to show; by default a person logs in with a browser.
        store: where logins are kept; by default until the program ends.
        identity: whose login it is, where there are several for one server.
        scopes: what to ask for, whatever the server suggests; None to go by the server.
        user_agent: how a person is asked to log in.
        resource: tell the authorization server which server a token is for (RFC 8707). Some refuse to be told. Without
            it a token may be good for other servers, too, and the server that gets it could use it there.
        dpop: bind tokens to a key of our own where the authorization server can (RFC 9449).
        allowed_hosts: names of authorization servers that may have addresses that are not public. All may, for a
            server on this machine.
        http_client: an `httpx2.AsyncClient` of your own for requests to authorization servers, with its proxies and
            certificates; it is not closed.
        timeout: seconds for one request to an authorization server. A person may take as long as they like.
        now: returns the seconds since 1970.
    """

    grant: Grant = attrs.field(factory=AuthorizationCode)
    store: CredentialStore = attrs.field(factory=MemoryStore)
    identity: str = ""
    scopes: tuple[str, ...] | None = None
    user_agent: UserAgent = attrs.field(factory=Browser)
    dpop: bool = False
    resource: bool = attrs.field(default=True, kw_only=True)
    allowed_hosts: frozenset[str] = frozenset()
    http_client: httpx2.AsyncClient | None = attrs.field(default=None, repr=False)
    timeout: float = 30.0
    now: Callable[[], float] = attrs.field(default=time.time, repr=False)
    _accounts: dict[StoreKey, Account] = attrs.field(init=False, factory=dict, repr=False)

    @asynccontextmanager
    async def connected(self, server: str) -> AsyncIterator[Authorizer]:
        """Yield what gives tokens to requests to one server, and is told when they are refused.

        Leaving gives up what is under way for this connection.

        Args:
            server: the URL of the MCP server.
        """
        from trimcp.auth.fetching import opened_fetcher

        key, host = StoreKey(server, self.identity), host_of(server)
        for other, idle in list(self._accounts.items()):
            if not idle.connections and idle.forgettable(self.now()):
                del self._accounts[other]
        account = self._accounts.setdefault(key, Account(key))
        account.connections += 1
        try:
            if account.credentials is None:
                before = account.logouts
                kept = await self.store.load(key)
                if account.logouts == before and account.credentials is None:  # else there was a login meanwhile
                    account.take(kept, self.dpop)
            fetching = opened_fetcher(
                self.allowed_hosts | {host}, private=is_loopback(host), client=self.http_client, timeout=self.timeout
            )
            async with fetching as fetcher, open_service_nursery() as nursery:
                authorizer = Authorizer(self, server, account, fetcher, nursery)
                account.connected.append(authorizer)
                account.keep_trying(self.store)
                try:
                    yield authorizer
                finally:
                    account.connected.remove(authorizer)
        finally:
            account.connections -= 1
            if account.unsaved is not None:
                await account.left(self.store)
            if not account.connections and account.unsaved is None:
                account.credentials = account.proof_key = None  # the store has what is needed again
                if account.forgettable(self.now()) and self._accounts.get(key) is account:
                    del self._accounts[key]

    async def login(self, server: str) -> Credentials:
        """Get a token for a server now, whatever is kept, and keep it.

        Raises:
            AuthorizationError: there is no token to be had, or it could not be kept.
        """
        key = StoreKey(server, self.identity)
        try:
            await self.store.load(key)
        except AuthorizationError:  # what is kept is damaged: it goes, if only that is
            await self.store.remove(key)
        async with self.connected(server) as authorizer:
            account = authorizer.account
            account.pardon()
            await authorizer.renew(await authorizer.ask(), anew=True)
            if account.unsaved is not None:
                raise AuthorizationError(f"there is a token, but the login could not be kept: {account.unsaved}")
            assert account.credentials is not None
            return account.credentials

    async def logout(self, server: str) -> bool:
        """Forget the login for a server, and give up one that is under way; return whether there was one."""
        key = StoreKey(server, self.identity)
        account = self._accounts.get(key)
        if account is not None and account.attempt is not None:
            account.attempt.give_up("logged out")
            await account.attempt.done.wait()
        with trio.move_on_after(_LOGOUT) as waiting:  # a renewal that begins now must not keep what it gets
            async with self.store.exclusively(key):
                waiting.deadline = math.inf
                return await self._forget(key)
        return await self._forget(key)  # somebody logs in by another process, and may take as long as they like

    async def _forget(self, key: StoreKey) -> bool:
        if (account := self._accounts.get(key)) is not None:
            account.credentials = account.unsaved = None
            account.logouts += 1
            account.pardon()
        return await self.store.remove(key)


@attrs.define(eq=False)
class Authorizer:
    """Gives tokens to the requests of one connection. Made by `OAuth.connected`."""

    _oauth: OAuth
    _server: str
    account: Account  # what is known of the login, for all connections that use it
    _fetcher: Fetcher
    nursery: trio.Nursery  # for what is done beside requests; it ends with the connection
    person: Callable[[], AbstractContextManager[None]] = nullcontext  # is put around the time in which a person logs in

    async def headers(self, method: str, url: str) -> Mapping[str, str]:
        """Return the headers that a request needs: none before the server has asked for a token.

        Waits only where the token has ended and is being renewed. Raises AuthorizationError: it has ended, and there is
        no other to be had.
        """
        tokens = self.account.tokens
        if tokens is None or (url != self._server and origin_of(url) != origin_of(self._server)):
            return {}
        if tokens.expires_at is not None and tokens.due(self._oauth.now()):
            tokens = await self._renewed(tokens)
            if tokens is None:
                return {}
        if tokens.token_type == "bearer":
            return {"authorization": f"Bearer {tokens.access_token}"}
        key = self.account.proof_key
        assert key is not None
        proof = key.proof(method, url, tokens.access_token)
        return {"authorization": f"DPoP {tokens.access_token}", "dpop": proof}

    async def _renewed(self, tokens: Tokens) -> Tokens | None:
        """Renew a token that ends soon, beside what goes on, or at once if it has ended."""
        if tokens.refresh_token is None:
            return None if tokens.expired(self._oauth.now()) else tokens
        if not tokens.expired(self._oauth.now()):
            if self.account.attempt is None and trio.current_time() >= self.account.renew_at:
                attempt = self._begin(None, tokens)
                attempt.waiting += 1  # nobody waits for it, and it is not given up for that
            return tokens
        await self.renew(None)
        return self.account.tokens

    def helps(self, status: int, headers: Mapping[str, str]) -> bool:
        """Return whether another token may help where a request was answered like this."""
        if status == 403:
            challenge = find_challenge(headers.get("www-authenticate", ""))
            return challenge is not None and challenge.parameters.get("error") == "insufficient_scope"
        return status == 401

    def accepted(self, sent: Mapping[str, str]) -> None:
        """Take note that the server has answered a request as it should. `sent`: what `headers` returned for it."""
        account = self.account
        if account.unaccepted and account.tokens is not None:
            used = sent.get("authorization", "").partition(" ")[2]
            if used == account.tokens.access_token:
                account.unaccepted = 0

    async def refused(self, status: int, headers: Mapping[str, str], sent: Mapping[str, str], tries: int) -> None:
        """Do what a refusal asks for, after which the request is to be sent again.

        `tries`: how often this request was sent again before. Raises AuthorizationError: there is no token to be had,
        or what there is does not suffice.
        """
        challenge = find_challenge(headers.get("www-authenticate", ""))
        error = "" if challenge is None else code_of(challenge.parameters.get("error", ""))
        key = self.account.proof_key
        if key is not None and (nonce := headers.get("dpop-nonce")) is not None:
            fresh = key.nonces.get(origin_of(self._server)) != nonce
            key.nonces[origin_of(self._server)] = nonce
            if error == "use_dpop_nonce" and fresh:
                return
        used = sent.get("authorization", "").partition(" ")[2]
        now = self._oauth.now()
        if tries >= _MOST_TRIES:
            raise AuthorizationError(_refusal(status, challenge), error)
        tokens = self.account.tokens
        if tokens is not None and tokens.access_token != used and not tokens.expired(now):
            return  # it was got or renewed while this request was under way
        if self.account.attempt is None:  # else this request only waits for what another asked for
            if self._exhausted():
                raise AuthorizationError(f"{_refusal(status, challenge)}; {_ENOUGH}", error)
            if status == 403:
                self._count_step_up(challenge)
        await self.renew(challenge, anew=status == 403 or tries > 0)

    def _count_step_up(self, challenge: AuthChallenge | None) -> None:
        wanted = frozenset(() if challenge is None else challenge.scopes)
        counts = self.account.step_ups
        count = counts[wanted] = counts.get(wanted, 0) + 1
        if count > _MOST_TRIES or len(counts) > _MOST_STEP_UPS:
            raise AuthorizationError(_refusal(403, challenge))

    def _exhausted(self) -> bool:
        return self.account.exhausted(self._oauth.now(), isinstance(self._oauth.grant, AuthorizationCode))

    # One login or renewal at a time

    async def renew(self, challenge: AuthChallenge | None, *, anew: bool = False) -> None:
        """Get another token, or wait for whoever is getting one.

        `anew`: ask for a new one even where the old could be refreshed. Raises AuthorizationError: there is none to be
        had.
        """
        before = self.account.tokens
        while True:
            attempt = self.account.attempt or self._begin(challenge, before, anew)
            await attempt.wait()
            if attempt.error is not None:
                # One error of its own for each who waited: a raised one collects tracebacks.
                code = getattr(attempt.error, "code", "")
                raise AuthorizationError(str(attempt.error), code) from attempt.error
            if attempt.ended or self.account.tokens is not before:
                return

    def _begin(self, challenge: AuthChallenge | None, before: Tokens | None, anew: bool = False) -> Attempt:
        attempt = self.account.attempt = Attempt()
        self.nursery.start_soon(self._run, attempt, challenge, before, anew)
        return attempt

    async def _run(self, attempt: Attempt, challenge: AuthChallenge | None, before: Tokens | None, anew: bool) -> None:
        try:
            with attempt.scope:
                async with open_service_nursery() as nursery:
                    nursery.start_soon(attempt.hurry)
                    with attempt.getting:
                        await self._get(attempt, challenge, before, anew)
                        attempt.ended = True
        except Exception as error:  # a store's, a browser's or an assertion's: it must not end the connection
            alone = unwrap_single(error)
            if not isinstance(alone, AuthorizationError):
                log_crash(_log, error, "a login failed")
                alone = AuthorizationError(f"the login failed: {type(alone).__name__}; the log has the details")
            attempt.error = alone
        finally:
            self.account.ended(attempt)
            self.account.keep_trying(self._oauth.store)

    async def _get(self, attempt: Attempt, challenge: AuthChallenge | None, before: Tokens | None, anew: bool) -> None:
        oauth, account = self._oauth, self.account
        async with oauth.store.exclusively(account.key):
            kept = await account.newest(oauth.store)
            tokens = None if kept is None else kept.tokens
            account.take(kept, oauth.dpop)
            other = before is None or (tokens is not None and tokens.access_token != before.access_token)
            if tokens is not None and other and not anew and not tokens.expired(oauth.now()):
                return  # another process has got or renewed it
            login = Login(self._server, oauth.grant, oauth.now, oauth.scopes, account.proof_key, oauth.resource)
            new: Credentials | None = None
            if kept is not None and not anew:
                new = await self._carry_out(attempt, login.refresh(kept))
            if new is None:
                if self._exhausted():
                    raise AuthorizationError(_ENOUGH)
                new = await self._carry_out(attempt, login.begin(challenge, kept))
                if not isinstance(oauth.grant, AuthorizationCode):
                    account.count_login(oauth.now())
            account.take(new, oauth.dpop)
            await account.save(oauth.store, account.replaced if account.unsaved is not None else kept)

    async def _carry_out(self, attempt: Attempt, flow: Flow[T]) -> T:
        """Do what a flow asks for, step by step, and return what it returns.

        The attempt stays shielded as its last step left it, until what it brought is kept.
        """
        async with AsyncExitStack() as stack:
            redirect: list[Redirect] = []

            async def do(step: Step) -> object:
                attempt.getting.shield = isinstance(step, Fetch) and step.once
                if isinstance(step, Fetch):
                    return await self._fetch(step)
                if isinstance(step, Listen):
                    redirect[:] = [await stack.enter_async_context(self._oauth.user_agent.redirect(step.preferred))]
                    return redirect[0].uri
                if isinstance(step, Visit):
                    self.account.count_login(self._oauth.now())
                    with ExitStack() as persons:  # whoever waits for this login
                        for authorizer in self.account.connected:
                            persons.enter_context(authorizer.person())
                        return await redirect[0].visit(step.url, step.state)
                found = step.function(step.argument)
                return await found if isawaitable(found) else found

            try:
                step = next(flow)
                while True:
                    step = flow.send(await do(step))
            except StopIteration as end:
                result: T = end.value
                return result
            finally:
                flow.close()

    async def ask(self) -> AuthChallenge | None:
        """Ask the server without a token which one it wants; None where it does not say."""
        reply = await self._fetch(Fetch(self._server, headers={"accept": "text/event-stream"}))
        return find_challenge(reply.headers.get("www-authenticate", "")) if reply.status in (401, 403) else None

    async def _fetch(self, step: Fetch) -> Fetched:
        reply = await self._fetcher.fetch(step)
        _log.debug("%s %s: %s", step.method, origin_of(step.url), reply.status or reply.why)
        return reply


_ENOUGH: Final = "nobody is asked again until they log in themselves: OAuth.login() (trimcp login URL)"


def _refusal(status: int, challenge: AuthChallenge | None) -> str:
    if status == 401:
        return "the server refuses the token that the authorization server gave for it"
    scopes = () if challenge is None else sorted(challenge.scopes)
    return f"the server wants scopes that the token does not have: {shown(' '.join(scopes))}"
