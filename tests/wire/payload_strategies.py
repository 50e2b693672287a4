"""Hypothesis strategies for payloads, read off the classes themselves: every member, in every allowed shape."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin

import attrs
from hypothesis import strategies as st

import trimcp.wire
from trimcp.wire import common
from trimcp.wire.common import RESULT_INPUT_REQUIRED
from trimcp.wire.fields import ABSENT, attributes, facts_of, is_payload, is_union, member_types, members
from trimcp.wire.input_requests import ElicitResult, InputRequiredResult
from trimcp.wire.revisions import V2025_11_25, Revision

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)
# The schema of 2026-07-28 forgets null and fractions where it says "any JSON"; here is what it does name.
NAMED_JSON = st.recursive(
    st.booleans() | st.integers(-(2**53), 2**53) | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)
OBJECT = st.dictionaries(TEXT, NAMED_JSON, max_size=2)
ENVELOPE = {common.META_PROTOCOL_VERSION: "x", common.META_CLIENT_CAPABILITIES: {}, common.META_SUBSCRIPTION_ID: 1}


@cache
def payload_classes() -> tuple[type, ...]:
    """Every class made with `@wire`."""
    found: dict[str, type] = {}
    for info in pkgutil.iter_modules(trimcp.wire.__path__, "trimcp.wire."):
        module = importlib.import_module(info.name)
        found |= {cls.__name__: cls for cls in vars(module).values() if is_payload(cls) and cls.__module__ == info.name}
    return tuple(found[name] for name in sorted(found))


@cache
def payloads_of(cls: Any, revision: Revision) -> st.SearchStrategy[Any]:
    """Instances that the revision must be able to carry, members it lacks included."""
    return st.builds(cls, **{a.name: _member(cls, a, revision) for a in attributes(cls)})


def _member(cls: Any, attribute: attrs.Attribute[Any], revision: Revision) -> st.SearchStrategy[Any]:
    said = facts_of(attribute)
    if attribute.name == "extra":
        return st.just({})
    if attribute.name == "meta":
        return st.just(ENVELOPE) if revision.modern else OBJECT.map(lambda meta: {"a": meta})
    if attribute.name in ("input_schema", "output_schema"):
        return st.just({"type": "object", "properties": {"z": {}, "a": {}}})
    if attribute.name == "uri":
        return st.sampled_from(["file:///a", "file:///a/b%20c"])  # the official models want a URL in roots
    if attribute.name == "request_id":
        return TEXT | st.integers()
    if attribute.name == "input_responses":
        return st.just({"name": {"action": "decline"}})
    if cls is InputRequiredResult and attribute.name != "input_requests":
        return st.just(RESULT_INPUT_REQUIRED) if attribute.name == "result_type" else TEXT
    if cls is ElicitResult and attribute.name == "content":
        return st.dictionaries(TEXT, _answers(revision), max_size=2)
    if said.required_from is not None and said.required_at(revision) and get_origin(attribute.type) is not Literal:
        return _of_types(member_types(attribute), revision)
    found = _of_types(member_types(attribute), revision)
    optional = attribute.default is None or attribute.default is ABSENT
    return found | st.just(attribute.default) if optional else found


def _of_types(kinds: tuple[Any, ...], revision: Revision) -> st.SearchStrategy[Any]:
    return values(kinds[0] if len(kinds) == 1 else Union[kinds], revision)  # noqa: UP007 - a tuple of members


def _answers(revision: Revision) -> st.SearchStrategy[Any]:
    """What a form may hold. The schemas forget numbers that are not whole; ours has them."""
    plain = TEXT | st.integers() | st.booleans()
    return plain | st.lists(TEXT, max_size=2) if revision >= V2025_11_25 else plain


def values(tp: Any, revision: Revision) -> st.SearchStrategy[Any]:
    """Values of an annotation."""
    if is_union(tp):
        options = [option for option in members(tp) if _fits(option, revision)]
        return st.one_of([values(option, revision) for option in options])
    if is_payload(tp):
        return st.deferred(lambda: payloads_of(tp, revision)) if _fits(tp, revision) else st.just(None)
    origin, inner = get_origin(tp), get_args(tp)
    if origin is Literal:
        return st.sampled_from(inner)
    if origin is list:
        return st.lists(values(inner[0], revision), max_size=2)
    if origin is dict:
        return OBJECT if inner[1] is Any else st.dictionaries(TEXT, values(inner[1], revision), max_size=2)
    return _PRIMITIVES[tp]


def _fits(option: Any, revision: Revision) -> bool:
    if get_origin(option) is list and is_union(get_args(option)[0]):  # a list of contents, in sampling
        return revision >= V2025_11_25
    return not is_payload(option) or option.__wire__.exists_at(revision)


_PRIMITIVES: dict[Any, st.SearchStrategy[Any]] = {
    str: TEXT,
    bool: st.booleans(),
    int: st.integers(0, 2**53),
    float: st.floats(0, 1) | st.integers(0, 1),
    type(None): st.none(),
    Any: JSON,
}
