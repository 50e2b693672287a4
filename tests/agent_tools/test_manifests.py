"""Manifests: what is read from them, what is refused before anything looks at it, hashes and the order of versions."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest

from trimcp.agent_tools import Manifest, ManifestBounds, UnfitManifest, version_key
from trimcp.agent_tools.messages import manifests as module

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "Get current weather for a city", "parameters": SCHEMA}


def refusal(raw: Any, bounds: ManifestBounds | None = None, **options: Any) -> list[str]:
    """The problems of what is no manifest."""
    with pytest.raises(UnfitManifest) as caught:
        Manifest.parse(raw, bounds, **options)
    problems = caught.value.data["problems"]
    assert caught.value.message == f"the manifest cannot be registered: {problems[0]}"
    assert all(len(problem) < 300 for problem in problems), "nothing long is repeated"
    return list(problems)


def problem_of(schema: Any, **bounds: int) -> str:
    """The only problem of a manifest with these parameters."""
    (problem,) = refusal({**WEATHER, "parameters": schema}, ManifestBounds(**bounds) if bounds else None)
    return problem


def nested(depth: int, inside: Any = "x") -> Any:
    for _ in range(depth):
        inside = [inside]
    return inside


# Reading


def test_the_article_s_manifest_is_read() -> None:
    manifest = Manifest.parse(WEATHER)
    assert (manifest.name, manifest.version, manifest.implementation, manifest.callback) == (
        "get_weather",
        "1",
        None,
        None,
    )
    assert manifest.to_json() == {**WEATHER, "version": "1"}
    assert manifest.validator.is_valid({"city": "Beijing"})
    assert not manifest.validator.is_valid({"city": 7})
    assert not manifest.validator.is_valid({})


def test_a_manifest_may_say_more() -> None:
    manifest = Manifest.parse({**WEATHER, "version": "2.1-rc.1", "implementation": "weather", "unknown": 1})
    assert (manifest.version, manifest.implementation) == ("2.1-rc.1", "weather")
    assert "weather" not in manifest.to_json().values(), "where it is carried out is nobody's business"
    manifest = Manifest.parse({"name": "a", "parameters": {"type": "object"}, "callback": "https://a.example/?key=1"})
    assert manifest.callback == "https://a.example/?key=1"
    assert "https" not in repr(manifest) + repr(manifest.to_json()), "it may hold a secret"
    assert manifest.description == ""


@pytest.mark.parametrize("raw", [None, [], "text", 7, True])
def test_a_manifest_is_an_object(raw: Any) -> None:
    assert refusal(raw) == ["a manifest is an object"]


NO_NAMES = ["", "a b", "a@1", "-a", ".a", "a/b", "ä", "a\n", "x" * 129, "a\x00", None, 7, ["a"], {"a": 1}]


@pytest.mark.parametrize("name", NO_NAMES, ids=repr)
def test_names_that_are_none(name: Any) -> None:
    (problem,) = refusal({**WEATHER, "name": name})
    assert problem.startswith("name is 1 to 128")


@pytest.mark.parametrize("name", ["a", "_", "A.b-c_9", "9", "x" * 128])
def test_names_that_are_some(name: str) -> None:
    assert Manifest.parse({**WEATHER, "name": name}).name == name


@pytest.mark.parametrize("version", ["", "1 ", "v@1", "1/2", "x" * 65, 1, 1.0, None, "-1", "1\n"], ids=repr)
def test_versions_that_are_none(version: Any) -> None:
    (problem,) = refusal({**WEATHER, "version": version})
    assert problem.startswith("version is a text")


@pytest.mark.parametrize(
    ("description", "problem"),
    [
        (None, "description is a text of at most 4,096 characters"),
        (["a"], "description is a text of at most 4,096 characters"),
        ("x" * 4_097, "description is a text of at most 4,096 characters"),
        ("good\u202eevil", "description holds text that a person cannot see (direction)"),
        ("good\U000e0041", "description holds text that a person cannot see (tag)"),
        ("good\x1b[2J", "description holds text that a person cannot see (escape)"),
        ("\ud800", "description is not Unicode"),
    ],
)
def test_descriptions_that_are_refused(description: Any, problem: str) -> None:
    assert refusal({**WEATHER, "description": description}) == [problem]


def test_all_problems_are_told_at_once() -> None:
    raw = {"name": "", "version": 1, "description": 7, "implementation": "", "callback": "x" * 3_000, "parameters": []}
    assert [problem.split()[0] for problem in refusal(raw)] == [
        "name",
        "description",
        "version",
        "implementation",
        "callback",
        "implementation",
        "parameters",
    ]


def test_unknown_members_are_refused_where_that_was_chosen() -> None:
    raw = {**WEATHER, "evil\x1b": 1, "more": 2}
    assert Manifest.parse(raw).name == "get_weather"
    (problem,) = refusal(raw, strict=True)
    assert problem == "unknown members: evil\\x1b, more"


# Schemas, before they are compiled


def test_a_schema_is_that_of_an_object() -> None:
    assert problem_of(None) == "parameters is a JSON Schema: an object"
    assert problem_of(True) == "parameters is a JSON Schema: an object"
    for schema in ({}, {"type": "string"}, {"type": ["object"]}):
        assert problem_of(schema) == 'parameters is the schema of an object: it needs "type": "object"'


def test_a_schema_beyond_the_bounds_is_never_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile(schema: Any) -> Any:
        raise AssertionError("it was compiled")

    monkeypatch.setattr(module, "peer_validator", compile)
    large = {"type": "object", "description": "x" * 70_000}
    assert problem_of(large) == "parameters is larger than 65,536 bytes"
    assert problem_of({"type": "object", "x" * 70_000: 1}) == "parameters is larger than 65,536 bytes"
    escaped = {"type": "object", "description": '"' * 40_000}  # as JSON it is twice as long
    assert problem_of(escaped) == "parameters is larger than 65,536 bytes"
    numbers = {"type": "object", "enum": [10**18] * 4_900}
    assert problem_of(numbers) == "parameters is larger than 65,536 bytes"
    assert problem_of({"type": "object", "enum": [1] * 5_000}) == "parameters has more than 5,000 members"
    assert problem_of({"type": "object", "a": nested(32)}) == "parameters is nested deeper than 32 levels"
    assert problem_of({"type": "object", "a": nested(100_000)}) == "parameters is nested deeper than 32 levels"
    wide = {"type": "object", "a": [[] for _ in range(10**6)]}
    assert problem_of(wide) == "parameters has more than 5,000 members"


def test_the_bounds_are_settings() -> None:
    assert problem_of({"type": "object", "a": [1, 2, 3]}, max_members=4) == "parameters has more than 4 members"
    assert problem_of({"type": "object", "a": [1]}, max_depth=1) == "parameters is nested deeper than 1 levels"
    assert problem_of({"type": "object", "a": "b"}, max_schema=10) == "parameters is larger than 10 bytes"
    bounds = ManifestBounds(max_description=3)
    assert refusal({**WEATHER, "description": "four"}, bounds) == ["description is a text of at most 3 characters"]
    assert Manifest.parse({**WEATHER, "parameters": {"type": "object", "a": nested(31)}}).name
    with pytest.raises(ValueError, match="max_depth"):
        ManifestBounds(max_depth=0)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "description": "a\u200bb"},
        {"type": "object", "properties": {"a\u202e": {}}},
        {"type": "object", "properties": {"a": {"description": "\x1b[0m"}}},
        {"type": "object", "properties": {"a": {"default": ["\x07"]}}},
    ],
)
def test_text_that_nobody_sees_is_refused_wherever_it_stands(schema: Any) -> None:
    assert problem_of(schema).startswith("parameters holds text that a person cannot see")


@pytest.mark.parametrize("value", [2**70, {1: 2}, "\ud800"])
def test_what_json_cannot_say_is_refused(value: Any) -> None:
    assert problem_of({"type": "object", "a": value}).startswith("parameters is not JSON")


# Schemas, when they are compiled


@pytest.mark.parametrize(
    "reference",
    [
        "https://evil.example/schema.json",
        "http://169.254.169.254/latest/meta-data/",
        "file:///etc/passwd",
        "other.json#/$defs/a",
        "//evil.example/a",
    ],
)
@pytest.mark.parametrize("keyword", ["$ref", "$dynamicRef"])
def test_no_schema_is_fetched(keyword: str, reference: str) -> None:
    problem = problem_of({"type": "object", "properties": {"a": {keyword: reference}}})
    assert "outside this schema, and schemas are never fetched" in problem


def test_an_embedded_resource_is_refused() -> None:
    inside = {"$id": "https://evil.example/a", "type": "string"}
    assert "embedded resource" in problem_of({"type": "object", "properties": {"a": inside}})


@pytest.mark.parametrize("pattern", ["(?=a)b", r"(a)\1", "(?<!a)b", "("])
def test_patterns_that_backtrack_are_refused(pattern: str) -> None:
    assert problem_of({"type": "object", "properties": {"a": {"pattern": pattern}}}).startswith("parameters: ")


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|aa)+$", "(.*a){12}$", "^(([a-z])+.)+[A-Z]([a-z])+$"])
def test_catastrophic_patterns_take_no_time(pattern: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}}
    validator = Manifest.parse({**WEATHER, "parameters": schema}).validator
    since = time.process_time()
    validator.is_valid({"a": "a" * 20_000 + "!"})
    assert time.process_time() - since < 2, "a backtracking engine takes longer than the universe"


def test_references_that_multiply_are_bounded() -> None:
    levels = {f"l{n}": {"allOf": [{"$ref": f"#/$defs/l{n + 1}"}] * 4} for n in range(12)}
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/l0"}}, "$defs": {**levels, "l12": {}}}
    validator = Manifest.parse({**WEATHER, "parameters": schema}).validator
    since = time.process_time()
    assert not validator.is_valid({"a": 1})  # 4^12 visits would be needed
    assert time.process_time() - since < 5


def test_a_reference_to_itself_in_place_is_refused() -> None:
    loop = {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#/$defs/a"}}}
    assert "leads back to itself" in problem_of(loop)


def test_a_tree_may_refer_to_itself() -> None:
    tree = {"type": "object", "properties": {"child": {"$ref": "#"}}, "additionalProperties": False}
    validator = Manifest.parse({**WEATHER, "parameters": tree}).validator
    assert validator.is_valid({"child": {"child": {}}})
    assert not validator.is_valid({"child": {"child": {"other": 1}}})


def test_headers_that_repeat_arguments_keep_to_their_rules() -> None:
    property = {"type": "string", "x-mcp-header": "not a header name"}
    assert problem_of({"type": "object", "properties": {"a": property}}).startswith("parameters: x-mcp-header")


def test_an_invalid_schema_is_refused() -> None:
    assert problem_of({"type": "object", "properties": []}).startswith("parameters: ")
    assert "dialect" in problem_of({"type": "object", "$schema": "https://evil.example/dialect"})


# Hashes


def test_equal_manifests_have_equal_hashes() -> None:
    turned = {
        "parameters": dict(reversed(SCHEMA.items())),
        "version": "1",
        **{k: WEATHER[k] for k in ("name", "description")},
    }
    assert Manifest.parse(turned).hash == Manifest.parse({**WEATHER, "more": 1}).hash
    assert len(Manifest.parse(WEATHER).hash) == 64


@pytest.mark.parametrize(
    "change",
    [
        {"name": "other"},
        {"description": "other"},
        {"version": "1.0"},
        {"parameters": {"type": "object"}},
        {"parameters": {**SCHEMA, "required": []}},
        {"implementation": "other"},
        {"callback": "https://a.example/"},
    ],
)
def test_every_change_changes_the_hash(change: dict[str, Any]) -> None:
    assert Manifest.parse({**WEATHER, **change}).hash != Manifest.parse(WEATHER).hash


def test_a_manifest_under_another_name_is_another() -> None:
    manifest = Manifest.parse(WEATHER)
    renamed = manifest.named("ada.get_weather")
    assert (renamed.name, manifest.name) == ("ada.get_weather", "get_weather")
    assert renamed.hash != manifest.hash
    assert renamed.hash == Manifest.parse({**WEATHER, "name": "ada.get_weather"}).hash
    assert manifest.named("get_weather") is manifest


# Versions

IN_ORDER = [
    "alpha",
    "0.9",
    "1-rc.1",
    "1",
    "1.1-alpha",
    "1.1-beta",
    "1.1-beta.2",
    "1.1",
    "1.9",
    "1.10",
    "2.0-rc.1",
    "2.0",
    "10",
]


def test_versions_are_compared_as_dotted_numbers() -> None:
    for older, newer in itertools.pairwise(IN_ORDER):
        assert version_key(older) < version_key(newer), (older, newer)
    assert sorted(set(IN_ORDER), key=version_key) == IN_ORDER


def test_versions_that_are_one() -> None:
    assert version_key("2") == version_key("2.0") == version_key("2.0.0") == version_key("02")
    assert version_key("0") == version_key("0.0")
    assert version_key("2") != version_key("2.0-rc.1")


def test_any_text_has_a_place_among_versions() -> None:
    texts = ["", "-", ".", "..", "1..2", "--", "é", "1-", "9" * 64, "a.1", "1.a"]
    assert sorted(texts, key=version_key)


# What one may cost


def test_the_memory_of_a_manifest_is_estimated() -> None:
    assert Manifest.parse(WEATHER).memory < 50_000
    text = {**WEATHER, "parameters": {"type": "object", "description": "x" * 60_000}}
    assert Manifest.parse(text).memory > 3_000_000
    patterns = {f"p{n}": {"pattern": f"a{{2000}}{n}"} for n in range(60)}
    assert Manifest.parse({**WEATHER, "parameters": {"type": "object", "properties": patterns}}).memory > 7_000_000


def test_patterns_that_take_too_much_memory_are_refused() -> None:
    patterns = {f"p{n}": {"pattern": f"(a{{280}}){{280}}{n}"} for n in range(100)}
    problem = problem_of({"type": "object", "properties": patterns})
    assert problem == "parameters: its 100 patterns take too much memory"


def test_no_arguments_keep_the_server_from_its_work() -> None:
    slow = [{"pattern": f"(a|b)*a(a|b){{12}}[cd]{n}"} for n in range(400)]
    schema = {"type": "object", "properties": {"a": {"not": {"anyOf": slow}}}}
    validator = Manifest.parse({**WEATHER, "parameters": schema}).validator
    since = time.process_time()
    assert not validator.is_valid({"a": "ab" * 2_000_000})
    assert time.process_time() - since < 2, "it would be minutes"
    assert validator.is_valid({"a": "ab"})
