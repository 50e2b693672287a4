"""Promise 13: no schema of a server takes our client long, whatever its keyword and the value: found by a search.

Every keyword of 2020-12, 2019-09 and drafts 7 and 6 meets values of every kind, large and strange: at the root, in
arrays and objects, many times over, and through references. What is refused as too much is refused quickly, too.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from contextlib import suppress
from operator import itemgetter
from typing import Any

import pytest

from tests.guarantees.report import figure
from trimcp.schema.engine import SchemaError
from trimcp.schema.validator import peer_validator
from trimcp.wire.jsonrpc import DEFAULT_LIMITS

pytestmark = [pytest.mark.slow, pytest.mark.alone]

MEMBERS = DEFAULT_LIMITS.max_members * 9 // 10
NUMBERS = [0, 1, -1, 7, 2**53 + 1, 2**63 - 1, 2**64 - 1, 0.1, 0.5, 1.5, -1.5, 1e-9, 1e-300, 5e-324, 1e15 + 0.5, 1e300]
TEXTS = {
    "plain": "ab",
    "wide": "ü",
    "astral": "\U0001f600",
    "dots": "a.",
    "colons": "1:",
    "slashes": "/~0",
    "percent": "%41",
    "braces": "{a}",
    "groups": "(a|b)*",
    "classes": "[a-z]{1,99}",
    "dates": "2024-01-31T10:00:00Z",
    "durations": "P1Y2M",
    "at": "a@b.c",
    "xn": "xn--a.",
    "base64": "AAAA",
    "brackets": "[",
}
FORMATS = (
    *("date", "date-time", "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6"),
    *("uri", "uri-reference", "iri", "iri-reference", "uuid", "uri-template", "json-pointer"),
    *("relative-json-pointer", "regex", "nonsense"),
)
PATTERNS = ("^a", "a*b*c*", "(a|b)*a(a|b){12}[cd]", r"\p{L}*\p{N}{9}x", "^(a+)+$", "[^x]*x[^y]*y", "(?:a?){99}a{99}")
NAMES = [f"k{number}" for number in range(1_000)]


def simple_keywords() -> Iterator[dict[str, Any]]:
    """Keywords that have no subschemas, each with values that are usual, large and extreme."""
    for word in ("multipleOf", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "const"):
        yield from ({word: number} for number in NUMBERS if word != "multipleOf" or number > 0)
    for word in ("maxLength", "minLength", "maxItems", "minItems", "maxProperties", "minProperties"):
        yield from ({word: number} for number in (0, 1, 2**53))
    yield from ({"format": name} for name in FORMATS)
    yield from ({"pattern": pattern} for pattern in PATTERNS)
    yield from ({"type": kind} for kind in ("integer", "number", ["string", "object", "array", "null", "boolean"]))
    for enumeration in (
        NUMBERS,
        list(range(1_000)),
        [number + 0.25 for number in range(1_000)],
        [number * 1e-300 for number in range(1, 300)],
        NAMES,
        [[0] * 99 + [number] for number in range(50)],
        [[1e-300] * 99 + [number] for number in range(50)],
        [dict.fromkeys(NAMES[:99], number) for number in range(50)],
        ["ab" * 5_000 + str(number) for number in range(50)],
    ):
        yield {"enum": enumeration}
        yield {"const": enumeration}
    yield {"required": NAMES}
    yield {"dependentRequired": dict.fromkeys(NAMES[:99], NAMES[:99])}
    yield {"dependencies": dict.fromkeys(NAMES[:99], NAMES[:99])}
    yield {"uniqueItems": True}
    yield {"contentEncoding": "base64", "contentMediaType": "application/json"}


def applied(inner: Any) -> Iterator[dict[str, Any]]:
    """Every keyword that has subschemas, with one of them."""
    yield inner
    for word in ("items", "contains", "unevaluatedItems", "additionalProperties", "unevaluatedProperties"):
        yield {word: inner}
    yield {"items": {"items": inner, "additionalProperties": inner}}
    yield {"prefixItems": [inner] * 99, "items": inner}
    yield {"contains": inner, "minContains": 2**40, "unevaluatedItems": inner}
    yield {"propertyNames": inner}
    yield {"patternProperties": {"(a|b)*a(a|b){12}[cd]": inner, "k": inner}, "additionalProperties": inner}
    yield {"properties": dict.fromkeys(NAMES, inner)}
    for word in ("allOf", "anyOf", "oneOf"):
        yield {"items": {word: [inner] * 50, "unevaluatedItems": inner}, "additionalProperties": {word: [inner] * 50}}
    yield {"items": {"not": {"not": inner}, "if": inner, "then": inner, "else": inner}}
    yield {"dependentSchemas": dict.fromkeys(NAMES[:99], inner), "unevaluatedProperties": inner}
    yield {"anyOf": [{"contains": inner}] * 20, "unevaluatedItems": {"const": 1e-300}}
    yield {"$defs": {"a": {"items": {"$ref": "#/$defs/a"}, "allOf": [inner]}}, "$ref": "#/$defs/a"}
    yield {
        "$dynamicAnchor": "n",
        "additionalProperties": {"$dynamicRef": "#n"},
        "items": {"$ref": "#"},
        "allOf": [inner],
    }
    seventh = "http://json-schema.org/draft-07/schema#"
    yield {"$schema": seventh, "items": [inner] * 99, "additionalItems": inner, "dependencies": {"k1": inner}}
    yield {"$schema": seventh, "definitions": {"a": inner}, "items": {"$ref": "#/definitions/a"}}
    yield {"$schema": "http://json-schema.org/draft-06/schema#", "contains": inner}
    ninth = "https://json-schema.org/draft/2019-09/schema"
    yield {"$schema": ninth, "$recursiveAnchor": True, "items": {"$recursiveRef": "#"}, "allOf": [inner]}


def values() -> Iterator[Any]:
    """Values that are as large as a message may be, or nearly."""
    for number in NUMBERS:
        yield [number] * MEMBERS
    yield list(range(MEMBERS))
    yield [number + 0.5 for number in range(MEMBERS)]
    yield [number * 1e-300 for number in range(1, MEMBERS)]
    yield [[number * 1e-300 for number in range(1, 15)]] * (MEMBERS // 15)
    yield [[[0] * 50 + [number] for number in range(14)]] * (MEMBERS // 800)
    yield [f"x{number}" for number in range(MEMBERS)]
    yield [{"k1": number} for number in range(MEMBERS // 2)]
    yield [{"k1": number * 1e-300} for number in range(1, MEMBERS // 2)]
    yield {f"k{number}": number for number in range(MEMBERS)}
    yield {f"k{number}": 1e-300 for number in range(MEMBERS)}
    yield {f"{'ab' * 500}{number}": 1 for number in range(2_000)}
    yield [dict.fromkeys(NAMES[:99], 1)] * (MEMBERS // 100)
    yield [[]] * MEMBERS
    yield [None, True, 1, 1.0, "1", [1], {"a": 1}] * (MEMBERS // 9)
    deep: Any = 1e-300
    for _ in range(100):
        deep = [deep, {"k1": deep}] if random.random() < 0.05 else [deep]
    yield deep
    for text in TEXTS.values():
        yield text * (4_000_000 // len(text))
        yield [text * 100] * (4_000_000 // len(text) // 100)


def pieces(most: int) -> Iterator[tuple[Any, Any]]:
    """Pairs of a schema and a value: so many of all, by a seed; every keyword and every value is among them."""
    chosen = random.Random(13)
    everything = list(values())
    simple = list(simple_keywords())
    direct = [{"items": inner, "additionalProperties": inner, **inner} for inner in simple]
    wrapped = [schema for inner in simple for schema in applied(inner)]
    for number in range(most):
        schemas = direct if number % 2 else wrapped
        yield chosen.choice(schemas) if number >= 2 * len(direct) else schemas[number // 2], chosen.choice(everything)


def large() -> Iterator[tuple[str, dict[str, Any]]]:
    """Schemas that are as large as a message may be, by what they have many of."""
    many = MEMBERS // 2
    names, distinct = [f"k{number}" for number in range(many)], range(many)
    yield "numbers", {"enum": [number + 0.25 for number in distinct]}
    yield "texts", {"propertyNames": {"enum": names}}
    yield "arrays", {"enum": [[[[number]]] for number in range(many // 2)]}
    yield "objects", {"enum": [{"a": number} for number in range(many)]}
    yield "required names", {"required": names}
    yield "required names of items", {"items": {"required": names}}
    yield (
        "required names of alternatives",
        {"anyOf": [{"required": names[at : at + 100]} for at in range(0, many, 100)]},
    )
    yield "names beside another", {"dependentRequired": {"k0": names}}
    yield "dependencies", {"$schema": "http://json-schema.org/draft-07/schema#", "dependencies": {"k0": names}}
    yield "unknown keywords", {f"x{number}": number for number in distinct}
    yield "examples", {"examples": [{"a": number} for number in distinct]}
    yield "properties", {"properties": {name: {} for name in names}}
    yield "some properties", {"properties": {name: {"type": "string"} for name in names[:4_900]}}
    yield "a pattern", {"pattern": "a" * 4_000_000}
    yield "alternatives of a pattern", {"pattern": "|".join(names)}
    yield "a reference", {"k" * 4_000_000: True, "$ref": "#/" + "k" * 4_000_000}
    for most in (1_900, 2_400, 4_900):
        some = names[:most]
        yield "references to one", {"$defs": {"a": {}}, "properties": {name: {"$ref": "#/$defs/a"} for name in some}}
        yield "references", {"$defs": {name: {"items": {"$ref": f"#/$defs/{name}"}} for name in some}}
        long = "k" * (100_000 // most)
        yield "long references", {long: True, "properties": {name: {"$ref": f"#/{long}"} for name in some}}
        yield "very long references", {"properties": {name: {"$ref": "#/" + "%78" * 500} for name in some}}
        yield "steps", {"a": {"a": {}}, "properties": {name: {"$ref": "#/a/a" + "/a" * 200} for name in some}}
        yield "anchors", {"properties": {name: {"$anchor": name, "items": {"$ref": f"#{name}"}} for name in some}}
        yield "dynamic", {"$dynamicAnchor": "n", "properties": {name: {"$dynamicRef": "#n"} for name in some}}
        yield "dependent", {"dependentSchemas": {name: {"required": ["a"]} for name in some}, "required": ["b"]}
        yield "unevaluated", {"unevaluatedItems": False, "allOf": [{"unevaluatedItems": {}} for _ in some]}
        yield "conditions", {"allOf": [{"if": {"type": "string"}, "then": False} for _ in some]}


def spent(validator: Any, value: Any) -> tuple[float, bool]:
    begun = time.thread_time()
    found = validator.problems(value)
    return time.thread_time() - begun, not found


def yardstick() -> float:
    """What half a million steps of Python take: about 1.7 ms on the machine that the bound was written for."""
    best = 9.0
    for _ in range(5):
        begun = time.thread_time()
        for _ in itertools.repeat(None, 500_000):
            pass
        best = min(best, time.thread_time() - begun)
    return best


def test_no_keyword_and_no_value_take_a_client_long() -> None:
    worst: list[tuple[float, bool, Any, Any]] = []
    tried = refused = 0
    for schema, value in pieces(500):
        try:
            validator = peer_validator(schema)
            validator.is_valid(None)
        except SchemaError:
            refused += 1
            continue
        took, fits = spent(validator, value)
        if took > 0.05:  # perhaps something else took it
            took = min(took, spent(validator, value)[0], spent(validator, value)[0])
        tried += 1
        worst = sorted([*worst, (took, fits, schema, value)], key=itemgetter(0), reverse=True)[:10]
    for took, fits, schema, value in worst:  # whose words take longer than their work
        print(f"{1000 * took:8.1f} ms {fits} {schema!r:.300}\n            {value!r:.60}")
    unit = yardstick()
    print(f"{tried} tried, {refused} schemas refused, yardstick {1000 * unit:.1f} ms")
    figure(13, f"the worst of {tried} schemas and values", 1000 * worst[0][0], None, "ms", "client")
    figure(13, "the same, in times of half a million steps of Python", worst[0][0] / unit, 60, "", "client")
    assert worst[0][0] <= 60 * unit  # 0.1 s on a quiet machine


REFUSING: list[dict[str, Any]] = [
    {"oneOf": [{"multipleOf": number / 10} for number in range(1, 30)]},
    {"anyOf": [{"type": "string"}, {"maxItems": 1, "maxProperties": 1}]},
    {"minItems": 2**53, "minProperties": 2**53},
    {"items": {"type": "array", "minItems": 9}, "additionalProperties": False},
    {"not": {}},
]


def test_no_refusal_takes_a_client_long_to_explain() -> None:
    unit = yardstick()
    found: list[tuple[float, Any, Any]] = []
    for value in (
        [{"k1": number} for number in range(MEMBERS // 2)],
        [{"k1": {"k2": {"k3": number * 1e-7}}} for number in range(MEMBERS // 4)],
        {f"k{number}": [number] for number in range(MEMBERS // 2)},
        list(range(MEMBERS)),
        [[number] * 10 for number in range(7_200)],  # some that are explained
        [{"k1": number} for number in range(39_000)],
    ):
        for schema in REFUSING:
            validator = peer_validator(schema)
            validator.problems(None)
            took = min(spent(validator, value)[0] for _ in range(3))
            found.append((took, schema, value))
    worst, schema, value = max(found, key=itemgetter(0))
    name = f"{schema!r} {value!r:.40}"
    print(f"{name}: {1000 * worst:.1f} ms, yardstick {1000 * unit:.1f} ms")
    figure(13, f"the worst of {len(found)} refusals of large values", 1000 * worst, None, "ms", "client")
    figure(13, "the worst refusal, in times of half a million steps of Python", worst / unit, 60, "", "client")
    assert worst <= 60 * unit, name


def test_no_schema_takes_a_client_long_to_read() -> None:
    unit = yardstick()
    found: list[tuple[float, str]] = []
    for name, schema in large():
        best = 9.0
        for _ in range(3):
            begun = time.thread_time()
            with suppress(SchemaError):
                validator = peer_validator(schema)
                for value in ({"k0": 1, "a": [{}]}, [[]], "a"):  # refused by many, and explained
                    validator.problems(value)
            best = min(best, time.thread_time() - begun)
            if best < 30 * unit:
                break
        found.append((best, name))
    worst, name = max(found)
    print(f"{name}: {1000 * worst:.1f} ms, yardstick {1000 * unit:.1f} ms")
    figure(13, f"the worst of {len(found)} large schemas, read and explained", 1000 * worst, None, "ms", "client")
    figure(13, "the worst large schema, in times of half a million steps of Python", worst / unit, 60, "", "client")
    assert worst <= 60 * unit, name
