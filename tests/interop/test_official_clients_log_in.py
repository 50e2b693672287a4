"""The official SDKs' clients, Python's and TypeScript's, log in to our server at an authorization server.

`official_login.py` and `node_login.mjs` carry out what is tested; here they are run, once for each era, host and kind
of token. The authorization server and the person are those of `test_authorization_server.py`. These clients name scopes
when they register, and do not register again when they need more: the authorization server lets them ask for all.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

from tests.interop.authorities import Authorities, authorities
from tests.interop.peers import HERE, NODE, run_scenarios

OFFICIAL_1 = os.environ["TRIMCP_OFFICIAL_SDK_1"]
COMMANDS: dict[str, Sequence[str | Path]] = {
    "python 2": [sys.executable, HERE / "official_login.py"],
    "python 1": [OFFICIAL_1, HERE / "official_login.py"],
    "typescript": [NODE, HERE / "node_login.mjs"],
}
EVERYTHING = ("login", "renewal", "more_scopes")
# By client, and its era with what its tokens are bound to: Python's have no proof of possession.
SCENARIOS = {
    ("python 2", "legacy"): EVERYTHING,
    ("python 2", "auto"): EVERYTHING,
    # It asks for no offline access, and so gets nothing to renew its token with.
    ("python 1", "legacy"): ("login", "more_scopes"),
    ("typescript", "legacy"): EVERYTHING,
    ("typescript", "modern"): EVERYTHING,
    ("typescript", "legacy-dpop"): EVERYTHING,
    ("typescript", "modern-dpop"): EVERYTHING,
}
Errors = Callable[[str, str, str], dict[str, str]]


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Authorities]:
    with authorities(tmp_path_factory.mktemp("authorities")) as started:
        yield started


@pytest.fixture(scope="module")
def errors(there: Authorities, tmp_path_factory: pytest.TempPathFactory) -> Errors:
    """Runs a client against a host, unless it has been, and returns what went wrong in each scenario."""

    @cache
    def run(client: str, way: str, host: str) -> dict[str, str]:
        bound = way.endswith("dpop")
        issuer = there.issuer("wide", "nonces") if bound else there.issuer("wide")
        url = there.protected(host, issuer.base, "dpop" if bound else "").http
        log = tmp_path_factory.mktemp("client") / "stderr.log"
        return run_scenarios([*COMMANDS[client], way, url, sys.executable, *SCENARIOS[client, way]], log)

    return run


@pytest.mark.parametrize("host", ["own", "hypercorn"])
@pytest.mark.parametrize(
    ("client", "way", "scenario"), [(*client, name) for client, names in SCENARIOS.items() for name in names]
)
def test_a_client_logs_in_to_our_server(errors: Errors, client: str, way: str, host: str, scenario: str) -> None:
    assert errors(client, way, host)[scenario] == ""
