"""Exceptions between a server and its workers: ours stay themselves, anybody else's become words."""

from __future__ import annotations

import orjson
import pytest

import trimcp
from trimcp.schema.convert import ConversionError
from trimcp.wire.jsonrpc import Unencodable
from trimcp.workers.packing import FailedInWorker, pack, unpack

OURS = [
    trimcp.ToolError("text"),
    trimcp.ErrorReply(7, "message", {"a": [1]}),
    trimcp.RemoteError(-32601, "message", None),
    trimcp.Overloaded(1000, "message", {"retryAfter": 1}),
    trimcp.CannotAsk("no", {"roots": {}}),
    trimcp.CannotAsk("no"),
    trimcp.LocalError("text"),
    trimcp.InvalidReply("text"),
    trimcp.ConnectionLost("text"),
    trimcp.ResourceNotFound("text"),
    Unencodable("text"),
    ConversionError(["one", "two"]),
]


@pytest.mark.parametrize("error", OURS, ids=repr)
def test_ours_stay_themselves(error: Exception) -> None:
    found = unpack(orjson.loads(orjson.dumps(pack(error))))
    assert type(found) is type(error)
    assert str(found) == str(error)
    for name in ("code", "message", "data", "required", "problems"):
        assert getattr(found, name, None) == getattr(error, name, None)


def test_a_subclass_speaks_as_what_it_is_one_of() -> None:
    class NoLuck(trimcp.ToolError): ...

    assert type(unpack(pack(NoLuck("text")))) is trimcp.ToolError


def test_a_strangers_class_is_not_taken_for_ours_by_its_name() -> None:
    stranger = type("ToolError", (Exception,), {})
    found = unpack(pack(stranger("a secret")))
    assert type(found) is FailedInWorker
    assert str(found) == "ToolError: a secret"


def test_the_traceback_comes_along_in_words() -> None:
    try:
        raise KeyError("x")
    except KeyError as error:
        found = unpack(pack(error))
    assert 'raise KeyError("x")' in str(found.__cause__)


@pytest.mark.parametrize("error", [ValueError("\udcff"), trimcp.ErrorReply(1, "m", {1, 2})], ids=repr)
def test_what_json_cannot_carry_still_travels(error: Exception) -> None:
    assert isinstance(unpack(orjson.loads(orjson.dumps(pack(error)))), Exception)


def test_a_text_that_cannot_be_had_is_said_to_be_missing() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert "<no text: RuntimeError>" in str(unpack(pack(Mute())))
