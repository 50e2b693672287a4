"""The rule of annotations, for 2,000 that are made up: refused in a sentence, or right at every call.

What a value must become is asked of Pydantic, where it has an answer.
"""

from __future__ import annotations

import collections
import random
import time
from collections.abc import Callable
from typing import Any, Final

import pydantic
import pytest

from tests.schema.grammar import instance, make_module
from trimcp.schema import convert, converters, hints, resolved, signature
from trimcp.schema.signature import describe, describe_result
from trimcp.schema.validator import Validator
from trimcp.server.handlers.calling import PreparedFunction, prepare
from trimcp.wire.jsonrpc import encode

COUNT: Final = 2_000
A_MODULE: Final = 50
LONGEST: Final = 240.0
"""Seconds after which no more are tried, so that a busy machine does not wait for ever."""


class Unlike(AssertionError):
    """An annotation for which the rule does not hold."""


def comparable(value: Any) -> Any:
    """Return a value with what Pydantic leaves for later done: it reads an Iterable when it is iterated."""
    if isinstance(value, dict):
        return {key: comparable(each) for key, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(comparable, value))
    if isinstance(value, list | tuple | collections.deque):
        return type(value)(map(comparable, value))
    if type(value).__name__ == "ValidatorIterator":
        return comparable(list(value))
    if hasattr(value, "__dataclass_fields__") and not hasattr(value, "__attrs_attrs__"):
        return (type(value), {name: comparable(each) for name, each in vars(value).items()})
    return value


def oracle(hint: Any) -> Callable[[bytes], Any] | None:
    """Return what converts JSON to a type as Pydantic does, or None where it does not know the type."""
    try:
        adapter: Any = pydantic.TypeAdapter(hint)
    except Exception:  # a class of attrs anywhere
        return None
    return adapter.validate_json


def check(module: Any, number: int, lots: random.Random) -> str:
    """Hold one annotation of a module to the rule, in each place. Returns "taken" or "refused"."""
    shown = getattr(module, f"HINT_{number}")
    takes, gives, holds = (getattr(module, f"{name}_{number}") for name in ("takes", "gives", "Holds"))
    try:
        described = describe(takes)
    except TypeError as error:
        if not str(error).startswith(f"takes_{number}(): ") or "\n" in str(error):
            raise Unlike(f"{shown}: {error}") from error
        return "refused"
    try:
        expected = oracle(hints.hints_of(takes, "")["value"])
        schema = described.input_schema["properties"]["value"]
        whole = Validator(described.input_schema)
        prompt = prepare(takes)
        shape = describe_result(describe(gives).return_type)
        field = describe(type_taking(holds))
        for _ in range(3):
            json = instance(schema, lots, described.input_schema)
            assert whole.problems({"value": json}) == [], json
            found = described.bind({"value": json})["value"]
            if expected is not None:
                try:
                    wanted = comparable(expected(encode(json)))
                except pydantic.errors.PydanticUserError:
                    wanted = comparable(found)  # it does not look into a type variable
                assert comparable(found) == wanted, json
            assert comparable(field.bind({"it": {"field": json}})["it"].field) == comparable(found), json
            if shape is not None:
                dumped = shape.dump(found)
                assert Validator(shape.schema).problems(dumped) == [], dumped
            text = json if isinstance(json, str) else encode(json).decode()
            if isinstance(json, str) or not Validator(
                {**schema, "$defs": described.input_schema.get("$defs", {})}
            ).is_valid(text):
                values = prompt.from_texts({"value": text})
                assert comparable(described.bind(values)["value"]) == comparable(found), text
    except Exception as error:
        raise Unlike(f"{shown}: {type(error).__name__}: {error}") from error
    return "taken"


def type_taking(kind: Any) -> Callable[..., None]:
    def takes(it: Any) -> None: ...

    takes.__annotations__["it"] = kind
    return takes


def run(count: int, seed: int, until: float) -> dict[str, int]:
    """Try so many annotations. Returns how many were taken and refused."""
    done = {"taken": 0, "refused": 0}
    for start in range(0, count, A_MODULE):
        module = make_module(f"annotations_{seed}_{start}", seed + start, A_MODULE, future=start // A_MODULE % 2 == 1)
        lots = random.Random(seed + start)
        for number in range(A_MODULE):
            done[check(module, number, lots)] += 1
        if time.monotonic() > until:
            break
    return done


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Item 'day' on TypedDict class")  # of Pydantic, on a ReadOnly
def test_every_annotation_is_refused_or_right_at_every_call() -> None:
    done = run(COUNT, 20261127, time.monotonic() + LONGEST)
    assert done == {"taken": done["taken"], "refused": 0}


def _unbound(variable: Any) -> Any:
    return Any


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Item 'day' on TypedDict class")
@pytest.mark.parametrize(
    ("place", "name", "instead"),
    [
        (hints, "substitute", lambda hint, bound, own: hint),  # generics
        (hints, "_stand_in", _unbound),  # type variables with a bound or constraints
        (hints, "is_typed_dict", lambda cls: False),  # of typing and of typing_extensions
        (hints, "_qualifier", lambda origin: ""),  # ReadOnly, NotRequired
        (resolved, "CONTAINERS", {list: ("list", list), dict: ("mapping", dict)}),  # Iterable, Collection, deque
        (converters, "_count_known", lambda *args: 0),  # the alternative that knows all members
        (converters._Loaders, "_key", lambda self, node: None),
        (convert, "key_text", str.__str__),  # keys of results
        (PreparedFunction, "from_texts", lambda self, values: dict(values)),  # prompts
        (signature, "hints_of", lambda target, title, known=None: dict(target.__annotations__)),  # names
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_repair_that_is_taken_back_is_found(
    monkeypatch: pytest.MonkeyPatch, place: Any, name: str, instead: Any
) -> None:
    monkeypatch.setattr(place, name, instead)
    with pytest.raises((Unlike, AssertionError)):
        done = run(600, 5, time.monotonic() + LONGEST)
        assert done == {"taken": done["taken"], "refused": 0}
