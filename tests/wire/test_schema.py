"""Every payload against the official schemas: nothing of theirs is missing here, nothing of ours is strange there."""

from __future__ import annotations

import copy
import json
from typing import Any, get_args, get_origin

import attrs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.wire.payload_strategies import payload_classes, payloads_of
from tests.wire.spec import (
    ERROR_DATA,
    NO_PAYLOADS,
    PAYLOADS,
    SPEC,
    definitions,
    fits,
    method_of,
    payloads,
    problems,
    require_spec,
    samples,
)
from trimcp.wire import common
from trimcp.wire.converter import WireError, converter_for
from trimcp.wire.input_requests import InputRequest
from trimcp.wire.methods import METHODS
from trimcp.wire.revisions import REVISIONS, V2026_07_28, Revision

require_spec()

EVERYWHERE = [
    pytest.param(revision, name, tp, part, id=f"{revision.name}-{name}")
    for revision in REVISIONS
    for name, tp, part in payloads(revision)
]
EXAMPLES = sorted((SPEC / V2026_07_28.name / "examples").rglob("*.json"))


@pytest.mark.parametrize("revision", REVISIONS, ids=str)
def test_every_definition_is_a_payload_or_deliberately_none(revision: Revision) -> None:
    found = {name for name, _, _ in payloads(revision)}
    without_params = {name for name, part in definitions(revision).items() if method_of(part)}
    assert set(definitions(revision)) - found - without_params - NO_PAYLOADS == set()


def test_the_tables_name_nothing_that_no_schema_has() -> None:
    known = {name for revision in REVISIONS for name in definitions(revision)}
    assert {*PAYLOADS, *ERROR_DATA, *NO_PAYLOADS} - known == set()


def test_the_members_of_meta_are_those_that_the_schema_names() -> None:
    theirs = {
        member
        for name, part in definitions(V2026_07_28).items()
        if name.endswith("MetaObject")
        for member in part.get("properties", {})
    }
    ours = {getattr(common, name) for name in dir(common) if name.startswith("META_") and name != "META_TRACE"}
    assert {name for name in ours if "/" not in name or name.startswith("io.modelcontextprotocol/")} == theirs


@pytest.mark.parametrize("revision", REVISIONS, ids=str)
def test_each_revision_has_exactly_its_methods(revision: Revision) -> None:
    theirs = {name for part in definitions(revision).values() if (name := method_of(part)) is not None}
    questions = {attrs.fields(cls).method.default for cls in get_args(InputRequest) if cls.__wire__.exists_at(revision)}
    ours = {name for name, row in METHODS.items() if row.available(revision)}
    assert ours | questions == theirs
    assert ours & questions == set()


@pytest.mark.parametrize(("revision", "name", "tp", "part"), EVERYWHERE)
def test_what_the_schema_allows_loads_and_dumps_to_itself(
    revision: Revision, name: str, tp: Any, part: dict[str, Any]
) -> None:
    converter = converter_for(revision)
    for sample in samples(part, revision):
        assert problems(sample, part, revision) == [], "the sample itself must fit"
        before = copy.deepcopy(sample)
        loaded = converter.load(sample, tp)
        assert sample == before, "loading must not change what came"
        assert converter.dumper(tp)(loaded) == sample


@pytest.mark.parametrize(("revision", "name", "tp", "part"), EVERYWHERE)
def test_what_the_schema_requires_is_required(revision: Revision, name: str, tp: Any, part: dict[str, Any]) -> None:
    if get_origin(tp) is not None:
        return  # without its tag it may be another member of the union
    for sample in samples(part, revision):
        for member in set(part.get("required", [])) - _FORGIVEN:
            with pytest.raises(WireError):
                converter_for(revision).load({k: v for k, v in sample.items() if k != member}, tp)


@pytest.mark.parametrize(("revision", "name", "tp", "part"), EVERYWHERE)
def test_a_member_of_the_wrong_type_is_refused(revision: Revision, name: str, tp: Any, part: dict[str, Any]) -> None:
    """Every declared member of a primitive type, given every other primitive, is judged as the schema judges it.

    But null in an optional one is taken for none, since many write it so.
    """
    load = converter_for(revision).load
    sample = samples(part, revision)[-1]
    for member in part.get("properties", {}):
        for wrong in _EACH_KIND:
            value = {**sample, member: wrong}
            if member in _LOOSE or fits(value, part, revision) or (wrong is None and member in _FORGIVEN):
                continue
            if wrong is None and member not in part.get("required", []):
                without = load({k: v for k, v in sample.items() if k != member}, tp)
                assert load(value, tp) == without or get_origin(tp) is not None  # it tells classes of a union apart
                continue
            with pytest.raises(WireError):
                load(value, tp)


_EACH_KIND: list[Any] = ["5", 5, 5.5, True, None, [], {}]
_FORGIVEN = {
    "_meta",  # the engine's to check, and with a better error
    "io.modelcontextprotocol/subscriptionId",  # the same
    "ttlMs",  # server/utilities/caching says what it means that they are not there
    "cacheScope",
    "requestId",  # one revision does not require it; without, a cancellation means nothing
}
_LOOSE = {"_meta", "inputResponses", "inputSchema", "outputSchema", "ttlMs"} | {
    *("priority", "costPriority", "speedPriority", "intelligencePriority")
}
"""Members that are kept as open JSON here, and numbers whose range nobody checks."""


@pytest.mark.parametrize("cls", payload_classes(), ids=lambda cls: cls.__name__)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_what_we_build_fits_every_schema(cls: Any, data: st.DataObject) -> None:
    """Built with every member we know, whatever the revision: what it lacks must not go out."""
    revision = data.draw(st.sampled_from([r for r in REVISIONS if cls.__wire__.exists_at(r)]))
    payload = data.draw(payloads_of(cls, revision))
    converter = converter_for(revision)
    dumped = converter.dump(payload)
    assert converter.dump(converter.load(dumped, cls)) == dumped
    for name, tp, part in payloads(revision):
        if tp is cls:
            assert problems(dumped, part, revision) == [], name
            assert set(dumped) - _BY_EXTENSIONS <= _declared(part, revision), name


_BY_EXTENSIONS = {"extensions", "taskIds"}
"""What payloads got from outside of their revision: SEP-2133 has both sides declare extensions in the legacy handshake,
and SEP-2663 adds tasks to what a subscription is about."""


def _declared(part: dict[str, Any], revision: Revision) -> set[str]:
    """The members a schema names; `_meta` is implied where the envelope's definition has it."""
    if "$ref" in part:
        return _declared(definitions(revision)[part["$ref"].rsplit("/", 1)[1]], revision)
    halves = [_declared(half, revision) for half in part.get("allOf", [])]
    return {"_meta", *part.get("properties", {})}.union(*halves)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_the_published_examples_load_and_dump_to_themselves(path: Any) -> None:
    example = json.loads(path.read_text("utf-8"))
    converter = converter_for(V2026_07_28)
    tp, value = _example(path.parent.name, example)
    if tp is None:
        assert path.parent.name in NO_PAYLOADS, "an example of nothing we know"
        return
    dumped = converter.dumper(tp)(converter.load(value, tp))
    if path.stem == "read-resource-result-response" and "ttlMs" not in value:
        dumped = {name: member for name, member in dumped.items() if name not in ("ttlMs", "cacheScope")}
    assert dumped == value


def _example(name: str, example: Any) -> tuple[Any, Any]:
    """The payload type of an example and the part of it that is the payload."""
    if name in PAYLOADS:
        return PAYLOADS[name], example
    if name in ERROR_DATA:
        return ERROR_DATA[name], example["error"]["data"]
    if name.endswith("ResultResponse"):
        return PAYLOADS[name.removesuffix("Response")], example["result"]
    if isinstance(example, dict) and "method" in example:
        return METHODS[example["method"]].params, example.get("params", {})
    return None, None


def test_there_are_examples() -> None:
    assert len(EXAMPLES) > 100


def test_every_payload_class_is_reached() -> None:
    """No class of ours is left out: each is an entry of the tables, a method's payload or a member of one."""
    reached: set[Any] = set()
    waiting: list[Any] = [*PAYLOADS.values(), *ERROR_DATA.values()]
    waiting += [tp for row in METHODS.values() for tp in (row.params, row.result)]
    while waiting:
        tp = waiting.pop()
        if isinstance(tp, type) and hasattr(tp, "__wire__") and tp not in reached:
            reached.add(tp)
            attrs.resolve_types(tp)
            waiting += [attribute.type for attribute in attrs.fields(tp)]
        waiting += getattr(tp, "__args__", ())
    bases = {"Params", "Result", "_FormField", "_Message", "_Selection"}
    assert {cls.__name__ for cls in payload_classes()} - {cls.__name__ for cls in reached} - bases == set()
