"""What issuers are asked: for their keys, beside what goes on, and about tokens that say nothing by themselves.

A key that is known is used without waiting. One that is not is looked for once in a while, whoever asks how often.
Keys that were good stay so while an issuer cannot be reached.
"""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote_plus, urlencode

import attrs
import trio
from joserfc.jwk import Key

from trimcp.auth.metadata import AuthorizationServer, issuer_metadata_urls, read_json, same_issuer, secure_url
from trimcp.auth.steps import Fetch, Fetched, came, object_in
from trimcp.auth.verifying import AccessToken, BadToken, TokenRules, key_for, read_keys
from trimcp.errors import AuthorizationError
from trimcp.support.bounds import checked
from trimcp.support.cleaning import log_crash, one_line
from trimcp.transports.targets import basic_authorization

if TYPE_CHECKING:
    from trimcp.auth.fetching import Fetcher

_log = logging.getLogger("trimcp.auth")

_REFUSED_SECONDS: Final = 5.0  # for which an issuer is not asked again about a token that it does not know
_SOON: Final = 1.0  # seconds after the first fetch of an issuer's keys, if it failed, in which there is no other
_AT_ONCE: Final = 8  # tokens of one address or IPv6 network that issuers are asked about at a time; the others wait
_AGE: Final = re.compile(r"(?:^|[\s,])max-age=([0-9]{1,9})", re.IGNORECASE)


@attrs.frozen(field_transformer=checked(zero=("max_age",)))
class Issuer:
    """An authorization server whose tokens are taken.

    Attributes:
        name: its identifier, a URL, compared with a token's `iss` by `same_issuer`.
        jwks_uri: where its keys are; None to look it up in its metadata.
        max_age: seconds after which keys are fetched anew, where the issuer does not say; at least a minute and at
            most a day in any case.
        interval: seconds between two fetches, whatever asks for them. While there are no keys yet, as the issuer starts
            too, a token has them fetched sooner: after a second at first, then after twice as long each time.
    """

    name: str
    jwks_uri: str | None = None
    max_age: float = 600.0
    interval: float = 30.0

    def __attrs_post_init__(self) -> None:
        for url in (self.name, self.jwks_uri):
            if url is not None and not secure_url(url):
                raise ValueError(f"an issuer and its keys are at https, or on this machine: {url!r:.200}")


@attrs.define(eq=False)
class IssuerKeys:
    """The keys of one issuer."""

    issuer: Issuer  # whose they are
    fetcher: Fetcher  # makes the requests
    metadata: AuthorizationServer | None = attrs.field(init=False, default=None)
    _keys: dict[str, Key] = attrs.field(init=False, factory=dict)
    _stale_at: float = attrs.field(init=False, default=0.0)
    _again_at: float = attrs.field(init=False, default=0.0)
    _fetching: bool = attrs.field(init=False, default=True)
    _fetched: trio.Event = attrs.field(init=False, factory=trio.Event)
    _wanted: trio.Event = attrs.field(init=False, factory=trio.Event)

    async def keep_fresh(self) -> None:
        """Fetch the keys at once, before they are too old, and when a token names one that is not known.

        All fetches are made here: a request that gives up while it waits for one does not cut it off.
        """
        interval, soon = self.issuer.interval, _SOON
        while True:
            began = self._again_at = trio.current_time()
            self._fetching = True
            try:
                await self._fetch()
            except (AuthorizationError, ValueError) as error:
                _log.warning("the keys of %s could not be fetched: %s", self.issuer.name, one_line(str(error)))
                self.metadata = None  # it may say something else by now
            except Exception as error:  # of a library, for what no issuer should publish: it must not end the server
                log_crash(_log, error, "the keys of %s could not be read", self.issuer.name)
            self._fetching, self._again_at = False, began + (interval if self._keys else min(soon, interval))
            self._fetched.set()
            self._fetched, self._wanted = trio.Event(), trio.Event()
            await trio.sleep_until(self._again_at)
            with trio.move_on_at(max(self._stale_at, began + interval)):
                await self._wanted.wait()
            soon *= 2

    def known(self, header: Mapping[str, Any]) -> Key | None:
        """Return the key for a token's header, or None if it is not among those that were fetched."""
        return key_for(self._keys, header)

    async def find(self, header: Mapping[str, Any]) -> Key | None:
        """Return the key for a token's header, fetched if it is not known and that was not tried just now.

        Raises AuthorizationError: there are no keys at all, since the issuer could not be asked.
        """
        key = self.known(header)
        if key is None and (self._fetching or trio.current_time() >= self._again_at):
            self._wanted.set()
            await self._fetched.wait()
            key = self.known(header)
        if not self._keys:
            raise AuthorizationError("the issuer's keys could not be fetched")
        return key

    async def _fetch(self) -> None:
        url = self.issuer.jwks_uri or (await self.describe()).jwks_uri
        if not url:
            raise AuthorizationError("its metadata names no keys (jwks_uri)")
        reply = await self.fetcher.fetch(Fetch(url))
        if reply.status != 200:
            raise AuthorizationError(f"it {came(reply)}")
        keys = read_keys(reply.body)
        if not keys:
            raise AuthorizationError("there are no keys for signatures")
        said = _AGE.search(reply.headers.get("cache-control", ""))
        age = self.issuer.max_age if said is None else float(said[1])
        self._keys, self._stale_at = keys, trio.current_time() + min(max(age, 60.0), 86_400.0)

    async def describe(self) -> AuthorizationServer:
        """Return the issuer's metadata, fetched once (RFC 8414; OpenID Connect Discovery).

        Raises AuthorizationError: there is none, or it is of another issuer.
        """
        if self.metadata is None:
            reply = Fetched(0)
            for url in issuer_metadata_urls(self.issuer.name):
                reply = await self.fetcher.fetch(Fetch(url))
                if reply.status == 200 and "issuer" in (object_in(reply) or ()):  # no page for whatever is asked
                    found = read_json(AuthorizationServer, reply.body, "its metadata")
                    if not same_issuer(found.issuer, self.issuer.name):
                        raise AuthorizationError("its metadata is of another issuer")
                    self.metadata = found
                    return found
            raise AuthorizationError(f"its metadata: it {came(reply)}")
        return self.metadata


# Tokens that say nothing by themselves


@attrs.frozen(field_transformer=checked(zero=("max_age",)))
class Introspection:
    """How tokens are judged that say nothing by themselves: their issuer is asked (RFC 7662).

    Attributes:
        endpoint: where; a URL.
        client_id, client_secret: by which the issuer knows this server.
        issuer: who gives these tokens.
        max_age: seconds for which an answer is good, if the token does not end before.
    """

    endpoint: str
    client_id: str
    client_secret: str = attrs.field(repr=False)
    issuer: str
    max_age: float = 60.0

    def __attrs_post_init__(self) -> None:
        if not secure_url(self.endpoint):
            raise ValueError("tokens are shown only to an endpoint at https, or on this machine")


@attrs.define(eq=False)
class _TokenQuestion:
    """A token that its issuer is being asked about, for all who show it meanwhile.

    An error in it is one that nobody raises: a raised one keeps the frames of the request.
    """

    done: trio.Event = attrs.field(factory=trio.Event)
    answer: AccessToken | BadToken | AuthorizationError | None = None  # None: whoever asked has left


@attrs.define(eq=False)
class TokenQuestions:
    """Asks an issuer about tokens."""

    _settings: Introspection
    _rules: TokenRules  # by which an answer is judged
    _fetcher: Fetcher
    _now: Callable[[], float]
    _most: int  # tokens that are remembered as not good
    _refused: OrderedDict[bytes, tuple[float, BadToken]] = attrs.field(init=False, factory=OrderedDict)
    _questions: dict[bytes, _TokenQuestion] = attrs.field(init=False, factory=dict)
    _asking: dict[str, trio.Semaphore] = attrs.field(init=False, factory=dict)

    async def ask(self, token: str, digest: bytes, owner: str) -> AccessToken:
        """Return what the issuer says of a token: asked once for all who show it now, and not again soon if it is bad.

        Raises BadToken, and AuthorizationError if the issuer cannot be asked.
        """
        if (refused := self._refused.get(digest)) is not None and 0 <= self._now() - refused[0] < _REFUSED_SECONDS:
            raise BadToken(str(refused[1]), refused[1].error)
        while (question := self._questions.get(digest)) is not None:
            await question.done.wait()
            answer = question.answer
            if isinstance(answer, AccessToken):
                return answer
            if isinstance(answer, BadToken):
                raise BadToken(str(answer), answer.error)
            if answer is not None:
                raise AuthorizationError(str(answer))
        question = self._questions[digest] = _TokenQuestion()
        try:
            async with self._turn(owner):
                question.answer = good = await self._introspect(token)
            return good
        except BadToken as bad:
            question.answer = BadToken(str(bad), bad.error)
            self._refused[digest] = self._now(), question.answer
            while len(self._refused) > self._most:
                self._refused.popitem(last=False)
            raise
        except AuthorizationError as error:
            question.answer = AuthorizationError(str(error))
            raise
        finally:
            del self._questions[digest]
            question.done.set()

    @asynccontextmanager
    async def _turn(self, owner: str) -> AsyncIterator[None]:
        """Wait until few tokens of an owner are asked about: nobody keeps the issuer from others' tokens."""
        room = self._asking.setdefault(owner, trio.Semaphore(_AT_ONCE))
        try:
            async with room:
                yield
        finally:
            if room.value == _AT_ONCE and self._asking.get(owner) is room:
                del self._asking[owner]

    async def _introspect(self, token: str) -> AccessToken:
        settings = self._settings
        headers = {
            "accept": "application/json",
            "content-type": "application/x-www-form-urlencoded",
            "authorization": basic_authorization(quote_plus(settings.client_id), quote_plus(settings.client_secret)),
        }
        body = urlencode({"token": token, "token_type_hint": "access_token"}).encode()
        reply = await self._fetcher.fetch(Fetch(settings.endpoint, "POST", headers, body))
        said = object_in(reply) if reply.status == 200 else None
        if said is None or not isinstance(said.get("active"), bool):
            raise AuthorizationError(f"the introspection endpoint answered {reply.status or reply.why}")
        if not said["active"]:
            raise BadToken("the token is not good any more")
        said = {"iss": settings.issuer, "exp": self._now() + settings.max_age, **said}
        return self._rules.judge_claims(said, self._now())
