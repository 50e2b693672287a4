"""`trimcp login`, `logout` and `whoami`, and the stored logins for other commands. Secrets are never shown."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any, Final

import attrs
import click
import trio

from trimcp.cli.exits import INTERRUPTED, LOGIN_EXIT_CODES, NO_CONNECTION, Failure, say
from trimcp.cli.options import LoginOptions, Subcommand, with_options
from trimcp.cli.screen import Screen
from trimcp.cli.text import theirs
from trimcp.errors import AuthorizationError
from trimcp.transports.http.client.target import HttpServer

if TYPE_CHECKING:
    from trimcp.auth.browser import UserAgent
    from trimcp.auth.credentials import Credentials, StoreKey
    from trimcp.auth.oauth import OAuth

_MISSING: Final = 'logins need joserfc: pip install "trimcp[auth]"'
_DAY: Final = 86_400
_FACT: Final = 300  # characters of one thing that an authorization server or a file said


@click.command(cls=Subcommand, epilog=LOGIN_EXIT_CODES)
@click.argument("url")
@with_options(LoginOptions)
def login(url: str, options: LoginOptions) -> None:
    """Log in to the server at URL with a browser, and keep the tokens for call, inspect, bench and record.

    They stand in a file that only its owner can read. `trimcp whoami` shows which there are, `trimcp logout` forgets.

    \b
    Examples:
      trimcp login https://mcp.example/mcp
      trimcp login https://mcp.example/mcp --no-browser --scopes "files:read files:write"
      trimcp login https://mcp.example/mcp --client-id 3f2a --client-secret MY_SECRET --issuer https://auth.example
    """
    oauth = _oauth(options.identity, options)
    try:
        credentials = trio.run(oauth.login, HttpServer(url).address)
    except AuthorizationError as error:
        raise Failure(f"no login to {theirs(url, _FACT)}: {theirs(error, None)}", NO_CONNECTION) from None
    except KeyboardInterrupt:
        if sys.stdin.isatty():
            say("")  # the terminal shows ^C
        raise Failure("the login was given up", INTERRUPTED) from None
    Screen().show(f"Logged in to {_line(_key(url, options.identity), credentials)}")


@click.command(cls=Subcommand, epilog=LOGIN_EXIT_CODES)
@click.argument("url")
@click.option("--identity", default="", metavar="NAME", help="The name of the login, where there are several.")
def logout(url: str, identity: str) -> None:
    """Forget the login to the server at URL.

    \b
    Examples:
      trimcp logout https://mcp.example/mcp
    """
    oauth = _oauth(identity)
    if not trio.run(oauth.logout, HttpServer(url).address):
        raise Failure(f"there is no login to {theirs(url, _FACT)}; trimcp whoami shows which there are")
    Screen().show(
        f"Logged out of {theirs(url, _FACT)}. Its authorization server was not told: what it gave ends by itself."
    )


@click.command(cls=Subcommand, epilog=LOGIN_EXIT_CODES)
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def whoami(as_json: bool) -> None:
    """Show which logins are kept: for which server, as whom, by which authorization server, until when. No secrets.

    \b
    Examples:
      trimcp whoami
    """
    screen = Screen()
    found = trio.run(_all_logins)
    if as_json:
        screen.show(json.dumps([_facts(key, credentials) for key, credentials in found], indent=2))
        return
    for key, credentials in found:
        screen.show(_line(key, credentials))
    if not found:
        screen.show("Not logged in anywhere. Log in with: trimcp login URL")


def with_login(target: Any) -> Any:
    """Return the target with its stored login, refreshed where that needs no user, unless other credentials are given.

    Raises AuthorizationError: what is stored is damaged.
    """
    if not isinstance(target, HttpServer) or any(name.lower() == "authorization" for name in target.headers):
        return target
    oauth = _oauth("")
    kept = trio.run(oauth.store.load, _key(target.address, ""))
    if kept is None:
        return target
    return attrs.evolve(target, auth=attrs.evolve(oauth, user_agent=_nobody(), dpop=kept.proof_key is not None))


def _oauth(identity: str, options: LoginOptions | None = None) -> OAuth:
    """Return the logins that are kept; with options, what gets a new one."""
    try:
        from trimcp.auth import AuthorizationCode, Browser, FileStore, OAuth, PastedUrl
    except ImportError:
        raise Failure(_MISSING) from None
    oauth = OAuth(store=FileStore(), identity=identity)
    if options is None:
        return oauth
    secret = None if options.client_secret is None else os.environ.get(options.client_secret)
    if options.client_secret is not None and not secret:
        raise Failure("--client-secret names an environment variable that holds the secret; there is no such one")
    return attrs.evolve(
        oauth,
        grant=AuthorizationCode(options.client_id, secret, options.issuer),
        scopes=tuple(options.scopes.split()) or None,
        user_agent=Browser(notify=say) if options.browser else PastedUrl(_ask),
        dpop=options.dpop,
        resource=not options.no_resource,
    )


def _nobody() -> UserAgent:
    """Return an agent that never asks the user: only `trimcp login` opens a browser."""
    from trimcp.auth.browser import Browser

    def refuse(url: str) -> None:
        raise AuthorizationError("the login has ended; log in again: trimcp login URL")

    return Browser(open=refuse, notify=lambda text: None)


async def _ask(text: str) -> str:
    say(text)
    line: str = await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True)
    if not line:
        raise AuthorizationError("the input ended before an address was pasted; run it at a terminal")
    return line


async def _all_logins() -> list[tuple[StoreKey, Credentials]]:
    from trimcp.auth.stores import FileStore

    found, store = [], FileStore()
    for key in await store.keys():
        try:
            credentials = await store.load(key)
        except AuthorizationError as error:  # one that is damaged hides no other
            Screen().note(theirs(error, None), "yellow")
        else:
            found += [] if credentials is None else [(key, credentials)]
    return found


def _key(url: str, identity: str) -> StoreKey:
    from trimcp.auth.credentials import StoreKey

    return StoreKey(HttpServer(url).address, identity)


def _facts(key: StoreKey, credentials: Credentials) -> dict[str, Any]:
    tokens = credentials.tokens
    left = None if tokens is None or tokens.expires_at is None else round(tokens.expires_at - time.time())
    return {
        "server": key.resource,
        "identity": key.identity,
        "issuer": credentials.issuer,
        "client_id": credentials.registration.client_id,
        "subject": None if tokens is None else _subject(tokens.access_token),
        "scopes": [] if tokens is None else list(tokens.scopes),
        "expires_in": left,
        "renewable": tokens is not None and tokens.refresh_token is not None,
        "bound_to_key": credentials.proof_key is not None,
    }


def _line(key: StoreKey, credentials: Credentials) -> str:
    facts = _facts(key, credentials)
    parts = [theirs(key, _FACT)]
    if facts["subject"]:
        parts.append(f"as {theirs(facts['subject'], _FACT)}")
    parts.append(f"by {theirs(facts['issuer'], _FACT)}")
    if facts["scopes"]:
        parts.append(f"for {theirs(' '.join(facts['scopes']), _FACT)}")
    left = facts["expires_in"]
    if left is not None:
        ends = "has ended" if left <= 0 else f"ends in {_time(left)}"
        parts.append(f"({ends}{', is renewed' if facts['renewable'] else ''})")
    return " ".join(parts)


def _time(seconds: int) -> str:
    if seconds < 120:
        return f"{seconds} s"
    return f"{seconds // 60} min" if seconds < 2 * _DAY else f"{seconds // _DAY} days"


def _subject(token: str) -> str | None:
    """Return the subject of a token, if it is a JWT; it is not verified here."""
    from trimcp.auth.verifying import BadToken, unverified

    try:
        _, claims = unverified(token)
    except BadToken:
        return None
    subject = claims.get("sub")
    return subject if isinstance(subject, str) else None
