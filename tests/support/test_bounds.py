"""Every setting of the package that is a number says so when it is given another."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest

import trimcp
import trimcp.testing
from trimcp import agent_tools, auth
from trimcp.client.client import Client
from trimcp.fleet.supervisor import Breaker, Health
from trimcp.server.server import Server
from trimcp.session.limits import Limits, Quota
from trimcp.store.events import MemoryEvents
from trimcp.store.events_sqlite import SqliteEvents
from trimcp.support.bounds import check_number, checked
from trimcp.support.restarts import Restarts
from trimcp.transports.http.client.policy import Timeouts
from trimcp.transports.http.client.target import HttpServer
from trimcp.transports.http.settings import HttpLimits, HttpSettings
from trimcp.transports.stdio.child import ShutdownTimes, StdioServer
from trimcp.transports.websocket.client import WebSocketServer
from trimcp.transports.websocket.frames import KeepAlive
from trimcp.wire import jsonrpc

RECORDS: dict[type, tuple[Any, ...]] = {
    **dict.fromkeys((Limits, Quota, HttpLimits, HttpSettings, Restarts, Breaker, Health, ShutdownTimes, KeepAlive), ()),
    **dict.fromkeys((Timeouts, MemoryEvents, jsonrpc.ParseLimits, trimcp.testing.Faults), ()),
    SqliteEvents: ("/nowhere/to/be/made",),
    StdioServer: (["server"],),
    HttpServer: ("http://server.test",),
    WebSocketServer: ("ws://server.test",),
    trimcp.GrpcServer: ("grpc://server.test",),
    **dict.fromkeys((agent_tools.ContextLimits, agent_tools.ManifestBounds, agent_tools.RegistrationRules), ()),
    agent_tools.AgentTarget: ("http://server.test/agent",),
    agent_tools.Callbacks: ([],),
    **dict.fromkeys((auth.OAuth, auth.Browser), ()),
    auth.ResourceServer: ("https://server.test/mcp", ["https://issuer.test"]),
    auth.Issuer: ("https://issuer.test",),
    auth.Introspection: ("https://issuer.test/look", "us", "secret", "https://issuer.test"),
}
NO_SETTINGS = {
    *("Applied", "Arg", "ContextUpdate", "CreateMessageParams", "KeptContext", "Refused", "Registration"),
    *("ResourceLink", "Revision", "ToolProgress", "Tokens"),
}
"""Public classes with numbers that may be left out, and may be any: what a schema, a peer or an author says."""

NUMBERS = {"int", "float", "int | None", "float | None"}


def numbers() -> Iterator[Any]:
    for record in RECORDS:
        for attribute in attrs.fields(record):
            if attribute.init and str(attribute.type) in NUMBERS and attribute.name != "seed":
                yield pytest.param(record, attribute, id=f"{record.__name__}.{attribute.name}")


def test_there_are_as_many_as_one_thinks() -> None:
    assert len(list(numbers())) > 80


def test_no_public_setting_is_left_unchecked() -> None:
    unchecked = {
        name
        for module in (trimcp, agent_tools, auth)
        for name in module.__all__
        if isinstance(public := getattr(module, name), type) and attrs.has(public)
        for field in attrs.fields(public)
        if field.init and str(field.type) in NUMBERS and field.default is not attrs.NOTHING and field.validator is None
    }
    assert unchecked == NO_SETTINGS


@pytest.mark.parametrize(("record", "attribute"), list(numbers()))
def test_a_number_that_makes_no_sense_is_refused_by_name(record: Any, attribute: Any) -> None:
    wrong = [(-1, ValueError), (True, TypeError), ("1", TypeError), (1j, TypeError), ([], TypeError)]
    if attribute.type.startswith("int"):
        wrong += [(1.0, TypeError), (math.inf, TypeError)]
    else:
        wrong += [(math.nan, ValueError), (-math.inf, ValueError)]
    if not attribute.type.endswith("None"):
        wrong.append((None, TypeError))
    name = attribute.alias
    for value, error in wrong:
        with pytest.raises(error, match=rf"^{record.__name__}\.{name} is an? (integer|number) .*, not "):
            record(*RECORDS[record], **{name: value})


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: Limits(progress_kept=0), "progress_kept is an integer of at least 1, not 0"),
        (lambda: Limits(logs_kept=0), "logs_kept is an integer of at least 1, not 0"),
        (lambda: HttpSettings(max_sessions=0), "max_sessions is an integer of at least 1"),
        (lambda: HttpSettings(stateless="no"), "stateless is True or False, not 'no'"),
        (lambda: KeepAlive(interval=0), "interval is a number greater than 0, not 0"),
        (lambda: Quota(running=0), "running is an integer of at least 1 or None, not 0"),
        (lambda: Client("c", max_request_time=math.nan), "max_request_time is a number greater than 0 or None"),
        (lambda: Client("c", asks_per_minute=-1), "asks_per_minute is an integer of at least 0"),
        (lambda: Server("s", page_size=0), "page_size is an integer of at least 1 or None, not 0"),
        (lambda: Server("s", max_threads=0), "max_threads is an integer of at least 1, not 0"),
    ],
)
def test_what_is_wrong_is_said(make: Callable[[], object], name: str) -> None:
    with pytest.raises((ValueError, TypeError), match=name):
        make()


def test_what_makes_sense_passes() -> None:
    assert Limits(eof_grace=0, stall_timeout=math.inf, answer_timeout=1).eof_grace == 0
    assert Quota(per_second=0.5, waiting=0).waiting == 0
    assert HttpServer("http://server.test", retries=0).retries == 0
    check_number("x", None, optional=True)
    check_number("x", 2**63 - 1)


def test_a_rule_names_members_that_are_there() -> None:
    with pytest.raises(TypeError, match="Odd has no nothing"):

        @attrs.frozen(field_transformer=checked(zero=("nothing",)))
        class Odd:
            something: int = 1
