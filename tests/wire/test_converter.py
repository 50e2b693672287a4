from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest

import trimcp
from trimcp.errors import LocalError
from trimcp.wire.capabilities import ServerCapabilities
from trimcp.wire.common import EmptyResult, Icon, Implementation, PageParams, RequestParams
from trimcp.wire.content import (
    AudioContent,
    BlobResourceContents,
    ContentBlock,
    EmbeddedResource,
    ResourceContents,
    ResourceLink,
    TextContent,
    TextResourceContents,
    ToolUseContent,
)
from trimcp.wire.converter import WireConverter, WireError, converter_for
from trimcp.wire.fields import ABSENT
from trimcp.wire.input_requests import (
    CreateMessageParams,
    ElicitFormParams,
    ElicitParams,
    ElicitResult,
    ElicitURLParams,
    FormSchema,
    LegacyTitledEnumSchema,
    SamplingMessage,
    StringSchema,
    UntitledItems,
    UntitledMultiSelectEnumSchema,
    UntitledSingleSelectEnumSchema,
)
from trimcp.wire.lifecycle import (
    CancelledParams,
    DiscoverResult,
    InitializeResult,
    LoggingMessageParams,
    ProgressParams,
    SubscriptionFilter,
    Task,
)
from trimcp.wire.prompts import GetPromptParams, GetPromptResult, PromptMessage
from trimcp.wire.revisions import (
    LATEST,
    REVISIONS,
    V2024_11_05,
    V2025_03_26,
    V2025_06_18,
    V2025_11_25,
    V2026_07_28,
    Revision,
)
from trimcp.wire.tools import CallToolParams, CallToolResult, ListToolsResult, Tool, ToolAnnotations

LOADED = converter_for(LATEST).load


def problems_of(value: Any, tp: Any, revision: Revision = LATEST) -> list[str]:
    with pytest.raises(WireError) as caught:
        converter_for(revision).load(value, tp)
    assert str(caught.value) == "; ".join(caught.value.problems)
    return caught.value.problems


class TestNames:
    def test_camel_case_both_ways(self) -> None:
        json = {"name": "t", "inputSchema": {"type": "object"}, "annotations": {"readOnlyHint": True}}
        tool = LOADED(json, Tool)
        assert tool == Tool("t", {"type": "object"}, annotations=ToolAnnotations(read_only_hint=True))
        assert converter_for(LATEST).dump(tool) == json

    def test_our_own_spelling_is_not_theirs(self) -> None:
        assert problems_of({"name": "t", "input_schema": {}}, Tool) == ["is missing @ $.inputSchema"]


class TestRevisions:
    def test_members_a_revision_lacks_do_not_go_out(self) -> None:
        tool = Tool("t", {"type": "object"}, title="T", annotations=ToolAnnotations(title="A"), icons=[Icon("x")])
        dumped = [sorted(converter_for(revision).dump(tool)) for revision in REVISIONS]
        assert dumped[0] == ["inputSchema", "name"]
        assert dumped[1] == ["annotations", "inputSchema", "name"]
        assert dumped[2] == ["annotations", "inputSchema", "name", "title"]
        assert dumped[3] == dumped[4] == ["annotations", "icons", "inputSchema", "name", "title"]

    def test_members_a_revision_lacks_are_ignored_on_the_way_in(self) -> None:
        json = {"name": "n", "version": "1", "title": 5, "icons": "nonsense"}
        assert converter_for(V2025_03_26).load(json, Implementation) == Implementation("n", "1")

    def test_members_nobody_declared_are_dropped(self) -> None:
        assert LOADED({"type": "text", "text": "a", "x": 1}, TextContent) == TextContent("a")

    def test_results_say_what_they_are_from_2026_on(self) -> None:
        result = ListToolsResult([])
        assert converter_for(V2025_11_25).dump(result) == {"tools": []}
        assert converter_for(V2026_07_28).dump(result) == {
            "resultType": "complete",
            "ttlMs": 0,
            "cacheScope": "private",
            "tools": [],
        }

    def test_a_result_without_its_type_is_complete_before_and_refused_since(self) -> None:
        assert converter_for(V2025_11_25).load({}, EmptyResult).result_type == "complete"
        assert problems_of({}, EmptyResult) == ['must have "resultType" @ $']

    def test_cache_hints_that_are_not_there_mean_stale_and_private(self) -> None:
        found = LOADED({"resultType": "complete", "tools": []}, ListToolsResult)
        assert (found.ttl_ms, found.cache_scope) == (0, "private")

    def test_a_payload_of_another_revision_is_refused_both_ways(self) -> None:
        old, new = converter_for(V2025_11_25), converter_for(V2026_07_28)
        with pytest.raises(WireError, match="DiscoverResult does not exist in revision 2025-11-25"):
            old.dump(DiscoverResult([], ServerCapabilities()))
        with pytest.raises(WireError, match="SubscriptionFilter does not exist"):
            old.load({}, SubscriptionFilter)
        with pytest.raises(WireError, match="InitializeResult does not exist"):
            new.load({}, InitializeResult)

    def test_required_in_one_revision_only(self) -> None:
        url = ElicitURLParams("m", "https://example.com", elicitation_id="1")
        assert converter_for(V2025_11_25).dump(url)["elicitationId"] == "1"
        assert "elicitationId" not in converter_for(V2026_07_28).dump(url)
        without = {"mode": "url", "message": "m", "url": "https://example.com"}
        assert problems_of(without, ElicitURLParams, V2025_11_25) == ['must have "elicitationId" @ $']
        assert LOADED(without, ElicitURLParams).elicitation_id is None


class TestPrimitives:
    @pytest.mark.parametrize("wrong", ["5", True, None, 5.5, [5], {}, float("inf")])
    def test_an_integer_is_nothing_else(self, wrong: Any) -> None:
        (problem,) = problems_of({"messages": [], "maxTokens": wrong}, CreateMessageParams)
        assert problem.startswith("must be an integer, not ")
        assert problem.endswith(" @ $.maxTokens")

    def test_a_whole_number_is_an_integer_however_it_is_written(self) -> None:
        found = LOADED({"messages": [], "maxTokens": 5.0}, CreateMessageParams)
        assert found.max_tokens == 5
        assert type(found.max_tokens) is int

    @pytest.mark.parametrize("right", [5, 5.5])
    def test_a_number_stays_as_it_was_written(self, right: float) -> None:
        found = LOADED({"progressToken": "t", "progress": right}, ProgressParams)
        assert found.progress == right
        assert type(found.progress) is type(right)

    @pytest.mark.parametrize("wrong", ["5", True, None])
    def test_a_number_is_no_text_and_no_boolean(self, wrong: Any) -> None:
        problems_of({"progressToken": "t", "progress": wrong}, ProgressParams)

    @pytest.mark.parametrize("wrong", [0, 1, "true"])
    def test_a_boolean_is_nothing_else(self, wrong: Any) -> None:
        problems_of({"resultType": "complete", "content": [], "isError": wrong}, CallToolResult)

    @pytest.mark.parametrize("wrong", [5, True, ["a"]])
    def test_text_is_nothing_else(self, wrong: Any) -> None:
        problems_of({"cursor": wrong}, PageParams)

    @pytest.mark.parametrize("right", ["t", "5", 5, 0])
    def test_a_token_is_text_or_integer_and_stays_it(self, right: Any) -> None:
        found = LOADED({"progressToken": right, "progress": 1}, ProgressParams).progress_token
        assert found == right
        assert type(found) is type(right)

    @pytest.mark.parametrize("wrong", [True, None, 5.5, []])
    def test_a_token_is_nothing_else(self, wrong: Any) -> None:
        problems_of({"progressToken": wrong, "progress": 1}, ProgressParams)

    @pytest.mark.parametrize("wrong", ["loud", 5, None, ["info"], {}])
    def test_a_level_is_one_of_eight(self, wrong: Any) -> None:
        (problem,) = problems_of({"level": wrong, "data": 1}, LoggingMessageParams)
        assert '"debug" or "info"' in problem

    @pytest.mark.parametrize("wrong", ["text", 5, None, [], ["cursor"], True])
    def test_a_payload_is_an_object(self, wrong: Any) -> None:
        for tp in (PageParams, RequestParams, CallToolParams):
            assert problems_of(wrong, tp)[0].startswith("must be an object, not ")

    @pytest.mark.parametrize("wrong", ["ab", {"0": "a"}, None, 5])
    def test_a_list_is_an_array(self, wrong: Any) -> None:
        problems_of({"resultType": "complete", "content": wrong}, CallToolResult)

    def test_form_answers_are_flat(self) -> None:
        content = {"a": "x", "b": 1, "c": 1.5, "d": True, "e": ["y"]}
        assert LOADED({"action": "accept", "content": content}, ElicitResult).content == content
        for wrong in (None, {}, [1]):
            problems_of({"action": "accept", "content": {"a": wrong}}, ElicitResult)


class TestAbsent:
    def test_null_is_not_absent(self) -> None:
        nothing = {"resultType": "complete", "content": []}
        assert LOADED(nothing, CallToolResult).structured_content is ABSENT
        assert LOADED({**nothing, "structuredContent": None}, CallToolResult).structured_content is None

    def test_null_goes_out_where_null_means_something(self) -> None:
        dump = converter_for(LATEST).dump
        assert dump(CallToolResult([], structured_content=None))["structuredContent"] is None
        assert "structuredContent" not in dump(CallToolResult([]))
        assert dump(LoggingMessageParams("info", None))["data"] is None
        task = Task("1", "working", "2025-11-25T10:00:00Z", "2025-11-25T10:00:00Z", None)
        assert converter_for(V2025_11_25).dump(task)["ttl"] is None

    def test_none_never_goes_out_where_the_schema_has_no_null(self) -> None:
        assert converter_for(LATEST).dump(Tool("t", {}, description=None)) == {
            "name": "t",
            "inputSchema": {},
        }

    def test_required_data_may_be_null_but_not_missing(self) -> None:
        assert LOADED({"level": "info", "data": None}, LoggingMessageParams).data is None
        assert problems_of({"level": "info"}, LoggingMessageParams) == ["is missing @ $.data"]


class TestUnions:
    def test_tags_tell_contents_apart(self) -> None:
        json = [
            {"type": "text", "text": "a"},
            {"type": "resource_link", "name": "n", "uri": "x:y"},
            {"type": "resource", "resource": {"uri": "x:y", "blob": ""}},
        ]
        expected = [TextContent("a"), ResourceLink("n", "x:y"), EmbeddedResource(BlobResourceContents("x:y", ""))]
        assert LOADED(json, list[ContentBlock]) == expected
        assert converter_for(LATEST).dumper(list[ContentBlock])(expected) == json

    @pytest.mark.parametrize("tag", ["video", 5, None, ["text"], {}])
    def test_an_unknown_tag_is_refused(self, tag: Any) -> None:
        (problem,) = problems_of([{"type": tag, "text": "a"}], list[ContentBlock])
        assert problem.startswith('must have "type": "text" or "image"')
        assert problem.endswith("@ $[0]")

    def test_resource_contents_have_no_tag(self) -> None:
        assert LOADED({"uri": "a:b", "text": ""}, ResourceContents) == TextResourceContents("a:b", "")
        assert LOADED({"uri": "a:b", "blob": ""}, ResourceContents) == BlobResourceContents("a:b", "")
        problems_of({"uri": "a:b"}, ResourceContents)

    def test_a_question_without_a_mode_is_a_form(self) -> None:
        form = {"message": "m", "requestedSchema": {"type": "object", "properties": {}}}
        assert LOADED(form, ElicitParams) == ElicitFormParams("m", FormSchema({}))
        assert LOADED({**form, "mode": "form"}, ElicitParams).mode == "form"
        assert isinstance(LOADED({"mode": "url", "message": "m", "url": "u"}, ElicitParams), ElicitURLParams)
        for wrong in ("carrier pigeon", 5, ["url"], None):
            problems_of({**form, "mode": wrong}, ElicitParams)

    def test_what_a_form_asks_for(self) -> None:
        schema = {
            "type": "object",
            "properties": {
                "a": {"type": "string"},
                "b": {"type": "string", "enum": ["x"]},
                "c": {"type": "string", "enum": ["x"], "enumNames": ["X"]},
                "d": {"type": "array", "items": {"type": "string", "enum": ["x"]}},
            },
        }
        found = LOADED(schema, FormSchema)
        assert list(found.properties.values()) == [
            StringSchema(),
            UntitledSingleSelectEnumSchema(["x"]),
            LegacyTitledEnumSchema(["x"], ["X"]),
            UntitledMultiSelectEnumSchema(UntitledItems(["x"])),
        ]
        assert problems_of({"type": "object", "properties": {"e": {"type": "object"}}}, FormSchema)[0].endswith(
            "@ $.properties.e"
        )


class TestContentTooNew:
    """In a list it is left out as long as something remains; anywhere else, or if nothing would, it is refused."""

    old = converter_for(V2024_11_05)

    def test_left_out_of_a_list_on_the_way_out(self) -> None:
        result = CallToolResult([AudioContent("", "audio/wav"), TextContent("a"), ResourceLink("n", "x:y")])
        assert self.old.dump(result) == {"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "n: x:y"}]}

    def test_left_out_of_a_list_on_the_way_in(self) -> None:
        json = {"content": [{"type": "text", "text": "a"}, {"type": "audio", "data": "", "mimeType": "audio/wav"}]}
        assert self.old.load(json, CallToolResult) == CallToolResult([TextContent("a")])

    def test_refused_if_nothing_would_remain(self) -> None:
        with pytest.raises(WireError, match=r"^AudioContent does not exist in revision 2024-11-05$"):
            self.old.dump(CallToolResult([AudioContent("", "audio/wav")]))
        json = {"content": [{"type": "audio", "data": "", "mimeType": "audio/wav"}]}
        assert problems_of(json, CallToolResult, V2024_11_05)[0].endswith("@ $.content")

    def test_an_empty_list_is_just_empty(self) -> None:
        assert self.old.dump(CallToolResult([])) == {"content": []}

    def test_refused_where_it_stands_alone_even_if_further_out_is_a_list(self) -> None:
        audio = PromptMessage("user", AudioContent("", "audio/wav"))
        with pytest.raises(WireError, match="AudioContent does not exist in revision 2024-11-05"):
            self.old.dump(GetPromptResult([audio, PromptMessage("user", TextContent("a"))]))
        json = converter_for(V2025_03_26).dump(GetPromptResult([PromptMessage("user", TextContent("a")), audio]))
        assert problems_of(json, GetPromptResult, V2024_11_05) == [
            "AudioContent does not exist in revision 2024-11-05 @ $.messages[1].content"
        ]

    def test_what_is_left_is_still_checked(self) -> None:
        json = {"content": [{"type": "audio"}, {"type": "text", "text": 5}]}
        assert problems_of(json, CallToolResult, V2024_11_05) == [
            "must be a string, not an integer @ $.content[1].text"
        ]

    def test_a_form_is_not_shortened(self) -> None:
        form = FormSchema({"a": StringSchema(), "b": UntitledMultiSelectEnumSchema(UntitledItems(["x"]))})
        with pytest.raises(WireError, match="UntitledMultiSelectEnumSchema does not exist"):
            converter_for(V2025_06_18).dump(form)

    def test_a_sampling_message_has_one_content_before_2025_11_25(self) -> None:
        old, new = converter_for(V2025_06_18), converter_for(V2025_11_25)
        one = SamplingMessage("user", [TextContent("a")])
        two = SamplingMessage("user", [TextContent("a"), TextContent("b")])
        assert old.dump(one) == {"role": "user", "content": {"type": "text", "text": "a"}}
        assert len(new.dump(two)["content"]) == 2
        with pytest.raises(WireError, match="content holds what revision 2025-06-18 does not allow"):
            old.dump(two)
        assert problems_of(new.dump(one), SamplingMessage, V2025_06_18)[0].endswith("@ $.content")
        assert one.blocks == SamplingMessage("user", TextContent("a")).blocks

    def test_a_tool_use_is_refused_by_peers_that_know_none(self) -> None:
        with pytest.raises(WireError, match="ToolUseContent"):
            converter_for(V2025_06_18).dump(SamplingMessage("assistant", ToolUseContent("1", "t", {})))


class TestNarrowing:
    def test_structured_content_was_an_object(self) -> None:
        result = CallToolResult([], structured_content=[1])
        assert "structuredContent" not in converter_for(V2025_11_25).dump(result)
        assert converter_for(V2026_07_28).dump(result)["structuredContent"] == [1]
        problems_of({"content": [], "structuredContent": [1]}, CallToolResult, V2025_11_25)

    def test_output_schemas_described_objects(self) -> None:
        tool = Tool("t", {"type": "object"}, output_schema={"type": "array"})
        assert "outputSchema" not in converter_for(V2025_11_25).dump(tool)
        assert converter_for(V2026_07_28).dump(tool)["outputSchema"] == {"type": "array"}


class TestOpenJson:
    def test_it_is_handed_on_uncopied_and_in_order(self) -> None:
        arguments = {"z": {"deep": [1, None, {"x": 1.5}]}, "a": 1}
        params = LOADED({"name": "t", "arguments": arguments, "_meta": {"k": arguments}}, CallToolParams)
        assert params.arguments is arguments
        assert converter_for(LATEST).dump(params)["arguments"] is arguments
        schema = {"type": "object", "properties": {"z": {}, "a": {}}, "x-mine": True}
        assert converter_for(V2024_11_05).dump(Tool("t", schema))["inputSchema"] is schema

    def test_it_must_be_an_object_where_the_schema_says_so(self) -> None:
        for wrong in ([], "{}", 5):
            problems_of({"name": "t", "arguments": wrong}, CallToolParams)
            problems_of({"name": "t", "_meta": wrong}, CallToolParams)

    def test_prompt_arguments_are_text(self) -> None:
        assert problems_of({"name": "p", "arguments": {"a": "x", "b": 5}}, GetPromptParams) == [
            "must be a string, not an integer @ $.arguments.b"
        ]

    def test_a_result_without_a_shape_keeps_everything(self) -> None:
        json = {"resultType": "complete", "anything": [1]}
        found = LOADED(json, EmptyResult)
        assert found.extra == {"anything": [1]}
        assert converter_for(LATEST).dump(found) == json

    def test_what_came_is_not_changed(self) -> None:
        json = {"resultType": "complete", "x": 1}
        LOADED(json, EmptyResult)
        assert json == {"resultType": "complete", "x": 1}


class TestErrors:
    def test_every_problem_is_told_with_its_place(self) -> None:
        json = {
            "messages": [
                {"role": "user", "content": {"type": "text", "text": "fine"}},
                {"role": "nobody", "content": {"type": "text"}},
            ],
            "maxTokens": "5",
            "tools": [{"name": "t"}],
            "stopSequences": ["a", 1],
        }
        assert sorted(problems_of(json, CreateMessageParams)) == [
            "is missing @ $.messages[1].content.text",
            "is missing @ $.tools[0].inputSchema",
            'must be "user" or "assistant" @ $.messages[1].role',
            "must be a string, not an integer @ $.stopSequences[1]",
            "must be an integer, not a string @ $.maxTokens",
        ]

    def test_they_are_few_and_short_however_much_is_wrong(self) -> None:
        json = {"name": "p", "arguments": {f"{number}{'k' * 10_000}": 5 for number in range(1000)}}
        problems = problems_of(json, GetPromptParams)
        assert len(problems) == 10
        assert max(map(len, problems)) < 200
        assert len(problems_of(["x"] * 100_000, list[Tool])) == 10

    def test_values_are_not_repeated(self) -> None:
        assert "secret" not in str(problems_of({"action": "secret", "content": "secret"}, ElicitResult))

    def test_something_else_in_place_of_a_payload(self) -> None:
        dump = converter_for(LATEST).dump
        with pytest.raises(WireError, match="must be TextContent or ImageContent"):
            dump(CallToolResult(["just text"]))
        with pytest.raises(WireError, match="must be Tool, not"):
            dump(ListToolsResult([TextContent("a")]))

    def test_a_member_no_payload_may_have_is_found_when_the_class_is_first_used(self) -> None:
        with pytest.raises(TypeError, match="no payload class may have a member of type"):
            converter_for(LATEST).load([], set[str])


class TestConverter:
    def test_there_is_one_for_each_revision(self) -> None:
        assert {converter_for(revision).revision for revision in REVISIONS} == set(REVISIONS)
        assert converter_for(LATEST) is converter_for(LATEST)
        assert isinstance(converter_for(LATEST), WireConverter)

    def test_prepared_functions_are_kept(self) -> None:
        converter = converter_for(LATEST)
        assert converter.loader(CallToolParams) is converter.loader(CallToolParams)
        assert converter.dumper(CallToolResult) is converter.dumper(CallToolResult)

    def test_payloads_are_comfortable_to_write(self) -> None:
        assert TextContent("hi").type == "text"
        assert CancelledParams(5, "too late") == CancelledParams(request_id=5, reason="too late")
        assert CallToolParams("echo", {"text": "x"}).arguments == {"text": "x"}


# The public names


@pytest.mark.parametrize("revision", REVISIONS, ids=str)
def test_a_payload_goes_to_json_and_back_in_every_revision(revision: Revision) -> None:
    result = CallToolResult(content=[TextContent("hello")], is_error=False)
    value = trimcp.to_json(result, revision=revision)
    assert json.loads(json.dumps(value)) == value
    assert trimcp.from_json(value, CallToolResult, revision=revision).content == result.content
    assert trimcp.to_json(result, revision=revision.name) == value
    assert trimcp.from_json(value, CallToolResult, revision=revision.name).content == result.content


def test_the_latest_revision_and_lists_of_payloads_are_taken_without_more() -> None:
    assert trimcp.to_json([TextContent("a"), TextContent("b")]) == [
        {"text": "a", "type": "text"},
        {"text": "b", "type": "text"},
    ]
    assert trimcp.from_json([{"text": "a", "type": "text"}], list[TextContent]) == [TextContent("a")]


def test_what_is_no_payload_or_does_not_fit_is_refused() -> None:
    with pytest.raises(WireError, match="int is no payload"):
        trimcp.to_json(5)
    for call in (trimcp.to_json, partial(trimcp.from_json, tp=CallToolResult)):
        with pytest.raises(LocalError, match="no revision '2025-06-31'; trimcp speaks 2024-11-05"):
            call(CallToolResult(), revision="2025-06-31")
    with pytest.raises(ValueError, match=r"@ \$\.text"):
        trimcp.from_json({"text": 5, "type": "text"}, TextContent)


@pytest.mark.parametrize("revision", REVISIONS, ids=str)
class TestNull:
    """Many implementations write what they do not have as null."""

    def test_of_an_optional_member_is_the_same_as_none(self, revision: Any) -> None:
        load = converter_for(revision).load
        assert load({"name": "t", "arguments": None, "_meta": None}, CallToolParams) == CallToolParams("t")
        tool = {"name": "t", "inputSchema": {"type": "object", "x": None}, "description": None, "annotations": None}
        page = {"tools": [tool, {**tool, "icons": None, "title": None}], "nextCursor": None, "ttlMs": 0}
        page |= {"cacheScope": "public", "resultType": "complete"}
        found = load(page, ListToolsResult)
        assert found.next_cursor is None
        assert [tool.annotations for tool in found.tools] == [None, None]
        assert found.tools[0].input_schema == {"type": "object", "x": None}  # their author's, and never touched
        assert "null" not in json.dumps(converter_for(revision).dump(found)).replace('"x": null', "")

    def test_of_a_member_that_has_to_be_there_is_wrong(self, revision: Any) -> None:
        load = converter_for(revision).load
        with pytest.raises(WireError, match=r"must be a string, not null @ \$\.name"):
            load({"name": None, "arguments": None}, CallToolParams)
        with pytest.raises(WireError, match=r"must be an array, not null @ \$\.content"):
            load({"content": None, "resultType": "complete"}, CallToolResult)
        with pytest.raises(WireError, match=r"must be an object, not a string @ \$\.arguments"):
            load({"name": "t", "arguments": "x", "task": None}, CallToolParams)

    def test_is_a_value_where_anything_is_one(self, revision: Any) -> None:
        result = {"content": [], "structuredContent": None, "isError": None, "resultType": "complete"}
        loaded = converter_for(revision).load(result, CallToolResult)
        assert loaded.structured_content is (None if revision.modern else ABSENT)
        assert loaded.is_error is None


def test_structured_content_is_read_as_data() -> None:
    assert CallToolResult().data is None
    assert CallToolResult(structured_content={"n": 1}).data == {"n": 1}
    assert converter_for(V2026_07_28).dump(CallToolResult(structured_content=5))["structuredContent"] == 5
