"""Documents that somebody has spoiled: they are refused, or operations left out; nothing crashes or takes long."""

from __future__ import annotations

import copy
import logging
import random
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

import trimcp
from tests.rest.shop import SHOP, FakeApi
from trimcp.errors import LocalError, RemoteError
from trimcp.testing.connect import connected

VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1.5, "", "x", "a/b", "\x00", "é" * 50, [], {}, [None], [[]], [{}], {"": None}),
    *("$ref", "#", "#/", "#/paths", "#/components/schemas/User", "http://x/y", {"$ref": "#"}, {"$ref": 5}),
    *({"$ref": "#/components/schemas/User"}, {"type": "object", "properties": 5}, {"type": ["string", 5]}, "path"),
]
KEYS = ["$ref", "type", "properties", "in", "name", "content", "schema", "items", "allOf", "x-y", "", "get", "required"]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in pairs:
        yield from places(each, (*path, key))


def spoiled(lots: random.Random) -> Any:
    """The document of the shop with one to four members changed, removed or added."""
    document = copy.deepcopy(SHOP)
    for _ in range(lots.randint(1, 4)):
        path = lots.choice([each for each in places(document) if each])
        owner = document
        for step in path[:-1]:
            owner = owner[step]
        way = lots.randrange(3)
        if way == 0:
            owner[path[-1]] = copy.deepcopy(lots.choice(VALUES))
        elif way == 1:
            del owner[path[-1]]
        elif isinstance(owner, dict):
            owner[lots.choice(KEYS)] = copy.deepcopy(lots.choice(VALUES))
    return document


@pytest.mark.parametrize("seed", range(20))
def test_a_spoiled_document_is_refused_or_read(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    lots, read = random.Random(seed), 0
    caplog.set_level(logging.CRITICAL)
    for _ in range(50):
        document = spoiled(lots)
        try:
            server = trimcp.openapi(document, client=FakeApi().client, url="http://localhost:1")
        except (ValueError, LocalError):
            continue
        read += 1
        assert all(tool.listed.name for tool in server.tools)
    assert read > 10


@pytest.mark.parametrize("keyword", ["allOf", "anyOf", "oneOf"])
@pytest.mark.parametrize("number_of", [20, 31, 60])
async def test_schemas_that_refer_to_each_other_are_bounded(
    keyword: str, number_of: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A bomb: each of many schemas refers twice to the next, and each operation to the first."""
    schemas: dict[str, Any] = {
        f"S{number}": {keyword: [{"$ref": f"#/components/schemas/S{number + 1}"}] * 2} for number in range(number_of)
    }
    schemas[f"S{number_of}"] = {"type": "string"}
    body = {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/S0"}}}}
    document = {
        **SHOP,
        "components": {"schemas": schemas},
        "security": [],
        "paths": {"/a": {"post": {"requestBody": body}}},
    }
    began = time.process_time()
    with caplog.at_level(logging.WARNING, "trimcp.server"):
        server = trimcp.openapi(document, client=FakeApi().client)
    async with connected(server) as session:
        with suppress(RemoteError):  # whatever becomes of the tool
            await session.call_tool("post_a", {"body": {"a": 1}})
    ours = time.process_time() - began
    began = time.process_time()
    sum(range(30_000_000))  # a second or so, the yardstick
    assert ours < 2 * (time.process_time() - began)


def test_very_many_operations_are_refused() -> None:
    paths = {f"/{number}": {"get": {}} for number in range(5_001)}
    with pytest.raises(ValueError, match="more than 5000 operations"):
        trimcp.openapi({**SHOP, "paths": paths}, url="http://localhost:1", expose=lambda operation: False)
