"""The schemas of 30 tools go through the strict conversions of four agent frameworks, each beside that framework."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import json
import os
import subprocess
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypedDict, TypeVar

import attrs
import pydantic
import pytest

import trimcp
from tests.interop.strict_schemas import CONVERSIONS

T = TypeVar("T")
SCRIPT = Path(__file__).with_name("strict_schemas.py")


class Size(enum.Enum):
    SMALL = "small"
    LARGE = "large"


@dataclasses.dataclass
class Place:
    """Where something is."""

    town: str
    street: str | None = None
    since: datetime.date | None = None


@attrs.frozen
class Parcel:
    grams: Annotated[int, trimcp.Arg("what it weighs", ge=1, le=30_000)]
    size: Size = Size.SMALL


@dataclasses.dataclass
class Trip:
    start: Place
    end: Place
    stops: list[Place] = dataclasses.field(default_factory=list)


class Window(TypedDict, total=False):
    first: datetime.date
    last: datetime.date


class Point(NamedTuple):
    x: float
    y: float = 0.0


@dataclasses.dataclass
class Page(Generic[T]):
    items: list[T]
    number: int = 1


@dataclasses.dataclass
class Node:
    name: str
    kids: list[Node] = dataclasses.field(default_factory=list)


class Item(pydantic.BaseModel):
    name: str = pydantic.Field(min_length=1)
    tags: list[str] = []


class Basket(pydantic.BaseModel):
    items: list[Item]
    gift: Item | None = None


HINTS: dict[str, Any] = {
    "text": str,
    "whole": int,
    "number": Annotated[float, trimcp.Arg("how much", ge=0)],
    "sure": bool,
    "maybe": str | None,
    "choice": Literal["a", "b"],
    "size": Size,
    "day": datetime.date,
    "moment": datetime.datetime,
    "money": decimal.Decimal,
    "key": uuid.UUID,
    "texts": list[str],
    "numbers": tuple[int, ...],
    "sizes": set[Size],
    "matrix": list[list[float]],
    "place": Place,
    "places": list[Place],
    "maybe_place": Place | None,
    "trip": Trip,
    "parcel": Parcel,
    "parcels": list[Parcel],
    "window": Annotated[Window, trimcp.Arg("when")],
    "point": Point,
    "page": Page[Place],
    "item": Item,
    "basket": Basket,
    "baskets": list[Basket],
    "either": Place | Parcel,
    "models": Item | Basket,
    "node": Node,
}


def tool(name: str, hint: Any) -> Callable[..., Any]:
    async def function(value: Any) -> str:
        return name

    function.__name__ = name
    function.__annotations__["value"] = hint
    return function


def schemas() -> dict[str, Any]:
    server = trimcp.Server("strict")
    for name, hint in HINTS.items():
        server.add_tool(tool(name, hint))
    return {entry.listed.name: entry.listed.input_schema for entry in server.tools}


def references(schema: Any) -> bool:
    if isinstance(schema, dict):
        return "$ref" in schema or any(map(references, schema.values()))
    return isinstance(schema, list) and any(map(references, schema))


def test_what_is_not_recursive_has_no_reference() -> None:
    """openai-agents drops its strict mode for a reference that has words beside it."""
    assert len(HINTS) == 30
    assert [name for name, schema in schemas().items() if references(schema)] == ["node"]


@pytest.mark.parametrize("package", CONVERSIONS)
def test_every_schema_is_converted(package: str) -> None:
    python = os.environ.get(f"TRIMCP_STRICT_{package.replace('-', '_').upper()}", "")
    if not python:
        pytest.skip(f"NOTHING HERE SAYS THAT {package} TAKES OUR SCHEMAS: it could not be installed")
    ran = subprocess.run([python, str(SCRIPT), package], input=json.dumps(schemas()), text=True, stdout=-1, check=True)
    found = json.loads(ran.stdout.splitlines()[-1])
    assert {name: each["error"] for name, each in found.items() if "error" in each} == {}
    if package == "google-adk":
        lost = [
            name for name, each in found.items() if not {"type", "any_of"} & each["made"]["properties"]["value"].keys()
        ]
        assert lost == []
    if package in ("openai-agents", "pydantic-ai"):
        loose = [name for name, each in found.items() if not strict(each["made"])]
        assert loose == []


def strict(schema: Any) -> bool:
    """Whether each object of a schema is closed and requires all of its members, as OpenAI's strict mode asks."""
    if isinstance(schema, list):
        return all(map(strict, schema))
    if not isinstance(schema, dict):
        return True
    named = schema.get("properties")
    if schema.get("type") == "object" and isinstance(named, dict):
        closed = schema.get("additionalProperties") is False and set(schema.get("required", ())) == set(named)
        return closed and all(map(strict, named.values()))
    return all(map(strict, schema.values()))
