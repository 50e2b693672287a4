"""From the words of `trimcp run --http` to the settings of the HTTP face: who may come, and with which keys."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from trimcp.cli.exits import USAGE, Failure
from trimcp.cli.options import NetworkOptions
from trimcp.errors import LocalError
from trimcp.protocol.request_state import Sealer
from trimcp.server.server import Server
from trimcp.transports.http.access import AccessLog
from trimcp.transports.http.identity import Authenticate, bearer_tokens
from trimcp.transports.http.origins import Origins
from trimcp.transports.http.settings import HttpSettings

__all__ = ["STATE_KEYS", "settings_of", "use_state_keys"]

STATE_KEYS: Final = "TRIMCP_STATE_KEYS"
"""The environment variable with secrets that sign `requestState`, newest first, separated by commas."""


def settings_of(options: NetworkOptions) -> HttpSettings:
    """Return the settings of the HTTP face.

    Raises:
        Failure: a value is wrong, or the file with the tokens is; the text says what to write.
    """
    sse = options.sse and not options.ws
    path = options.path or ("/ws" if options.ws else "/mcp")
    taken = {"/healthz", "/readyz"}
    taken |= {"/sse", "/messages"} if sse else set()
    taken |= {"/ws"} if options.websocket and not options.ws else set()
    if not path.startswith("/") or path in taken:
        raise Failure(f"the endpoint cannot be at {path!r}: write a path such as /mcp", USAGE)
    try:
        return HttpSettings(
            path=None if options.ws else path,
            sse_path="/sse" if sse else None,
            websocket_path=path if options.ws else "/ws" if options.websocket else None,
            origins=Origins(options.allow_origins, options.allowed_hosts),
            authenticate=None if options.token_file is None else _read_tokens(Path(options.token_file)),
            reply=options.reply,
            stateless=options.stateless,
            access_log=AccessLog() if options.access_log else None,
        )
    except ValueError as error:
        raise Failure(str(error), USAGE) from None


def _read_tokens(file: Path) -> Authenticate:
    """Return a hook that knows the tokens of a file: "name: token" on each line, # for comments."""
    tokens: dict[str, str] = {}
    try:
        lines = file.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise Failure(f"cannot read {file}: {error}", USAGE) from None
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, colon, token = (part.strip() for part in line.rpartition(":"))
        if not colon or not name or not token:
            raise Failure(f"{file}, line {number}: write NAME: TOKEN", USAGE)  # the line may be the token: not shown
        if tokens.setdefault(token, name) != name:
            raise Failure(f"{file}, line {number}: {tokens[token]!r} and {name!r} cannot have the same token", USAGE)
    if not tokens:
        raise Failure(f"{file} has no tokens, so nobody could come in; write lines of NAME: TOKEN", USAGE)
    return bearer_tokens(tokens)


def use_state_keys(server: Server[Any], environment: Mapping[str, str] = os.environ) -> None:
    """Let a server that has no keys of its own sign `requestState` with those in the environment, if there are any.

    Raises:
        Failure: they are too short.
    """
    text = environment.get(STATE_KEYS, "")
    if not text or server.sealer.keys is not None:
        return
    keys = [key.strip().encode() for key in text.split(",") if key.strip()]
    try:
        server.sealer = Sealer(keys, server.sealer.lifetime, server.sealer.cipher)
    except LocalError as error:
        raise Failure(f"{STATE_KEYS}: {error}", USAGE) from None
