"""The authorization server that nobody here wrote, and our servers and others' that take its tokens."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

import attrs
from joserfc.jwk import ECKey

from tests.interop.peers import HERE, NODE, Served, serving

__all__ = ["Authorities", "authorities"]


@attrs.frozen
class Authorities:
    """Starts what is asked for, once, and ends it with the module of tests.

    Attributes:
        key: the private key of the client "signing-robot".
        issuer: starts the authorization server; takes the words of `oidc_provider.mjs`.
        protected: starts our server; takes a host, the issuer's address and a kind, see `protected_server.py`.
        official: starts the official Python SDK's server; takes its interpreter and the issuer's address.
    """

    key: ECKey = attrs.field(repr=False)
    issuer: Callable[..., Served] = attrs.field(repr=False)
    protected: Callable[..., Served] = attrs.field(repr=False)
    official: Callable[[str | Path, str], Served] = attrs.field(repr=False)


def _name(issuer: str) -> str:
    return issuer.rpartition(":")[2].replace("/", "-")


@contextmanager
def authorities(folder: Path) -> Iterator[Authorities]:
    """Yield what starts servers; at the end each has to stop when it is told to, and ours to have kept its secrets.

    Args:
        folder: for their logs.
    """
    key = ECKey.generate_key("P-256", {"kid": "robot"})
    env = {"TRIMCP_ROBOT_KEYS": json.dumps({"keys": [key.as_dict(private=False)]})}
    ours: list[Path] = []
    with ExitStack() as stack:

        def start(name: str, command: Sequence[str | Path], *, orderly: bool = False) -> Served:
            return stack.enter_context(serving(command, folder / f"{name}.log", env=env, orderly=orderly))

        @cache
        def issuer(*words: str) -> Served:
            return start("-".join(("issuer", *words)), [NODE, HERE / "oidc_provider.mjs", *words])

        @cache
        def protected(host: str, issuer: str, kind: str = "") -> Served:
            served = start(
                f"{host}-{_name(issuer)}-{kind}",
                [sys.executable, HERE / "protected_server.py", host, issuer, *filter(None, [kind])],
                orderly=True,
            )
            ours.append(served.log)
            return served

        @cache
        def official(python: str | Path, issuer: str) -> Served:
            name = f"official-{1 + (python == sys.executable)}-{_name(issuer)}"
            return start(name, [python, HERE / "official_protected_server.py", issuer])

        yield Authorities(key, issuer, protected, official)
    for log in ours:
        said = log.read_text("utf-8")
        assert "eyJ" not in said, "a token stands in the log"  # how every JWT begins
        assert not [line for line in said.splitlines() if line.startswith(("ERROR", "CRITICAL", "Traceback"))], said
