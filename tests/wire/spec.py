"""The official schemas as test data: where they are, which payload stands for which definition, sample values.

They are looked for beside the checkout (`../shared/spec`) or at `TRIMCP_SPEC`: a folder of `REVISION/schema.json`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from jsonschema.validators import validator_for

from trimcp.wire import capabilities, common, content, input_requests, lifecycle, prompts, resources, tools
from trimcp.wire.methods import METHODS
from trimcp.wire.revisions import Revision

ROOT = Path(__file__).parents[2]
SPEC = Path(os.environ.get("TRIMCP_SPEC") or ROOT.parent / "shared" / "spec")


def require_spec() -> None:
    """Skip the calling test module, and say why, where the schemas are not at hand."""
    if not SPEC.is_dir():
        pytest.skip(
            "the official schemas are not here: point TRIMCP_SPEC at a folder of REVISION/schema.json",
            allow_module_level=True,
        )


PAYLOADS: dict[str, Any] = {
    # What stands under its own name in the schemas, except params: those are found by their method.
    "Annotations": common.Annotations,
    "AudioContent": content.AudioContent,
    "BlobResourceContents": content.BlobResourceContents,
    "BooleanSchema": input_requests.BooleanSchema,
    "CacheableResult": common.Cacheable,
    "CallToolRequestParams": tools.CallToolParams,
    "CallToolResult": tools.CallToolResult,
    "CancelTaskResult": lifecycle.GetTaskResult,
    "CancelledNotificationParams": lifecycle.CancelledParams,
    "ClientCapabilities": capabilities.ClientCapabilities,
    "CompleteRequestParams": prompts.CompleteParams,
    "CompleteResult": prompts.CompleteResult,
    "ContentBlock": content.ContentBlock,
    "CreateMessageRequestParams": input_requests.CreateMessageParams,
    "CreateMessageResult": input_requests.CreateMessageResult,
    "CreateTaskResult": lifecycle.CreateTaskResult,
    "DiscoverResult": lifecycle.DiscoverResult,
    "ElicitRequestFormParams": input_requests.ElicitFormParams,
    "ElicitRequestParams": input_requests.ElicitParams,
    "ElicitRequestURLParams": input_requests.ElicitURLParams,
    "ElicitResult": input_requests.ElicitResult,
    "EmbeddedResource": content.EmbeddedResource,
    "EmptyResult": common.EmptyResult,
    "EnumSchema": input_requests.PrimitiveSchema,
    "GetPromptRequestParams": prompts.GetPromptParams,
    "GetPromptResult": prompts.GetPromptResult,
    "GetTaskPayloadResult": lifecycle.GetTaskPayloadResult,
    "GetTaskResult": lifecycle.GetTaskResult,
    "Icon": common.Icon,
    "ImageContent": content.ImageContent,
    "Implementation": common.Implementation,
    "InitializeRequestParams": lifecycle.InitializeParams,
    "InitializeResult": lifecycle.InitializeResult,
    "InputRequest": input_requests.InputRequest,
    "InputRequests": dict[str, input_requests.InputRequest],
    "InputRequiredResult": input_requests.InputRequiredResult,
    "InputResponse": input_requests.InputResponse,
    "InputResponses": dict[str, input_requests.InputResponse],
    "LegacyTitledEnumSchema": input_requests.LegacyTitledEnumSchema,
    "ListPromptsResult": prompts.ListPromptsResult,
    "ListResourceTemplatesResult": resources.ListResourceTemplatesResult,
    "ListResourcesResult": resources.ListResourcesResult,
    "ListRootsResult": input_requests.ListRootsResult,
    "ListTasksResult": lifecycle.ListTasksResult,
    "ListToolsResult": tools.ListToolsResult,
    "LoggingMessageNotificationParams": lifecycle.LoggingMessageParams,
    "MetaObject": common.Meta,
    "ModelHint": input_requests.ModelHint,
    "ModelPreferences": input_requests.ModelPreferences,
    "MultiSelectEnumSchema": input_requests.PrimitiveSchema,
    "NotificationParams": common.NotificationParams,
    "NumberSchema": input_requests.NumberSchema,
    "PaginatedRequestParams": common.PageParams,
    "PrimitiveSchemaDefinition": input_requests.PrimitiveSchema,
    "ProgressNotificationParams": lifecycle.ProgressParams,
    "Prompt": prompts.Prompt,
    "PromptArgument": prompts.PromptArgument,
    "PromptMessage": prompts.PromptMessage,
    "PromptReference": prompts.PromptReference,
    "ReadResourceRequestParams": resources.ReadResourceParams,
    "ReadResourceResult": resources.ReadResourceResult,
    "RelatedTaskMetadata": lifecycle.RelatedTaskMetadata,
    "RequestParams": common.RequestParams,
    "Resource": resources.Resource,
    "ResourceLink": content.ResourceLink,
    "ResourceReference": prompts.ResourceTemplateReference,
    "ResourceTemplate": resources.ResourceTemplate,
    "ResourceTemplateReference": prompts.ResourceTemplateReference,
    "ResourceUpdatedNotificationParams": resources.ResourceUpdatedParams,
    "Result": common.EmptyResult,
    "Root": input_requests.Root,
    "SamplingMessage": input_requests.SamplingMessage,
    "SamplingMessageContentBlock": content.SamplingContent,
    "ServerCapabilities": capabilities.ServerCapabilities,
    "SetLevelRequestParams": lifecycle.SetLevelParams,
    "SingleSelectEnumSchema": input_requests.PrimitiveSchema,
    "StringSchema": input_requests.StringSchema,
    "SubscribeRequestParams": resources.SubscribeParams,
    "SubscriptionFilter": lifecycle.SubscriptionFilter,
    "SubscriptionsAcknowledgedNotificationParams": lifecycle.SubscriptionsAcknowledgedParams,
    "SubscriptionsListenRequestParams": lifecycle.SubscriptionsListenParams,
    "SubscriptionsListenResult": lifecycle.SubscriptionsListenResult,
    "Task": lifecycle.Task,
    "TaskMetadata": lifecycle.TaskMetadata,
    "TaskStatusNotificationParams": lifecycle.TaskStatusParams,
    "TextContent": content.TextContent,
    "TextResourceContents": content.TextResourceContents,
    "TitledMultiSelectEnumSchema": input_requests.TitledMultiSelectEnumSchema,
    "TitledSingleSelectEnumSchema": input_requests.TitledSingleSelectEnumSchema,
    "Tool": tools.Tool,
    "ToolAnnotations": tools.ToolAnnotations,
    "ToolChoice": tools.ToolChoice,
    "ToolExecution": tools.ToolExecution,
    "ToolResultContent": content.ToolResultContent,
    "ToolUseContent": content.ToolUseContent,
    "UnsubscribeRequestParams": resources.SubscribeParams,
    "UntitledMultiSelectEnumSchema": input_requests.UntitledMultiSelectEnumSchema,
    "UntitledSingleSelectEnumSchema": input_requests.UntitledSingleSelectEnumSchema,
}
"""The payload, or union or dict of payloads, of each definition."""

ERROR_DATA: dict[str, Any] = {
    "MissingRequiredClientCapabilityError": lifecycle.MissingCapabilityData,
    "URLElicitationRequiredError": input_requests.URLElicitationRequiredData,
    "UnsupportedProtocolVersionError": lifecycle.UnsupportedVersionData,
}
"""The payload in `error.data` of each error that has one."""

NO_PAYLOADS = {
    # JSON-RPC's own envelope, and errors without data of their own.
    *("Error", "HeaderMismatchError", "InternalError", "InvalidParamsError", "InvalidRequestError"),
    *("JSONRPCBatchRequest", "JSONRPCBatchResponse", "JSONRPCError", "JSONRPCErrorResponse", "JSONRPCMessage"),
    *("JSONRPCNotification", "JSONRPCRequest", "JSONRPCResponse", "JSONRPCResultResponse"),
    *("MethodNotFoundError", "Notification", "PaginatedRequest", "ParseError", "Request", "RequestId"),
    # Unions of whole messages, and the envelope around each result.
    *("ClientNotification", "ClientRequest", "ClientResult"),
    *("ServerNotification", "ServerRequest", "ServerResult"),
    *("CallToolResultResponse", "CompleteResultResponse", "DiscoverResultResponse", "GetPromptResultResponse"),
    *("ListPromptsResultResponse", "ListResourceTemplatesResultResponse", "ListResourcesResultResponse"),
    *("ListToolsResultResponse", "ReadResourceResultResponse", "SubscriptionsListenResultResponse"),
    # Names for a JSON type or an enumeration.
    *("Cursor", "JSONArray", "JSONObject", "JSONValue", "LoggingLevel", "ProgressToken", "ResultType"),
    *("Role", "TaskStatus"),
    # What stands in `_meta`: the engine reads it by the names in `common`, and checks it with errors of its own.
    *("NotificationMetaObject", "RequestMetaObject", "ResultMetaObject", "SubscriptionsListenResultMetaObject"),
    # Bases that nothing on the wire is by itself.
    *("Annotated", "BaseMetadata", "Icons", "PaginatedResult", "ResourceContents", "ResourceRequestParams"),
    *("InputResponseRequestParams", "TaskAugmentedRequestParams"),
}
"""Definitions that are deliberately no payloads."""


@cache
def schema(revision: Revision) -> dict[str, Any]:
    """The whole schema of that revision."""
    document: dict[str, Any] = json.loads((SPEC / revision.name / "schema.json").read_text("utf-8"))
    return document


def definitions(revision: Revision) -> dict[str, Any]:
    """Its definitions by name."""
    document = schema(revision)
    found: dict[str, Any] = document.get("$defs") or document["definitions"]
    return found


def method_of(definition: dict[str, Any]) -> str | None:
    """The method, if the definition is that of a message."""
    name: str | None = definition.get("properties", {}).get("method", {}).get("const")
    return name


def payloads(revision: Revision) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """A name, the payload type and the schema, for everything on the wire of that revision."""
    for name, definition in definitions(revision).items():
        method = method_of(definition)
        if name in PAYLOADS:
            yield name, PAYLOADS[name], definition
        elif name in ERROR_DATA:
            yield name, ERROR_DATA[name], definition["properties"]["error"]["allOf"][1]["properties"]["data"]
        elif method is not None and "params" in definition["properties"]:
            yield name, METHODS[method].params, definition["properties"]["params"]


def problems(value: Any, part: dict[str, Any], revision: Revision) -> list[str]:
    """What the official schema finds wrong with a value."""
    if fits(value, part, revision):
        return []
    document = schema(revision)
    validator = validator_for(document)(_rooted(part, revision))
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(value)]


def fits(value: Any, part: dict[str, Any], revision: Revision) -> bool:
    """Whether the official schema finds nothing wrong with a value."""
    key = (revision, id(part))  # the parts live in cached documents, so their ids stay theirs
    if key not in _VALIDATORS:
        _VALIDATORS[key] = jsonschema_rs.validator_for(_rooted(part, revision), validate_formats=False)
    return bool(_VALIDATORS[key].is_valid(value))


_VALIDATORS: dict[tuple[Revision, int], Any] = {}


def _rooted(part: dict[str, Any], revision: Revision) -> dict[str, Any]:
    """A part of a schema as a schema of its own, with all it may refer to."""
    document = schema(revision)
    return {name: document[name] for name in ("$schema", "$defs", "definitions") if name in document} | part


def samples(part: dict[str, Any], revision: Revision) -> list[Any]:
    """Values that fit a schema: least and most members, and every alternative it offers at least once."""
    if part.get("$ref", "").endswith(("/JSONObject", "/JSONValue")):  # open, and defined by themselves
        return [{}, {"any": ["thing", 1, True]}]
    if "$ref" in part:
        return samples(definitions(revision)[part["$ref"].rsplit("/", 1)[1]], revision)
    if "const" in part:
        return [part["const"]]
    if "enum" in part:
        return list(part["enum"])
    if "anyOf" in part:
        return [sample for option in part["anyOf"] for sample in samples(option, revision)]
    if "allOf" in part:
        halves = [samples(half, revision) for half in part["allOf"]]
        return [{**first, **second} for first, second in _together(halves[0], halves[1])]
    if part.get("type") == "object" or "properties" in part:
        return _objects(part, revision)
    if part.get("type") == "array":
        inner = samples(part.get("items", {}), revision)
        return [[], inner]
    kinds = part.get("type", ["object", "array", "string", "integer", "boolean", "null"])
    return [_PLAIN[kind] for kind in ([kinds] if isinstance(kinds, str) else kinds)]


_PLAIN: dict[str, Any] = {
    "string": "text",
    "integer": 1,
    "number": 0.5,
    "boolean": True,
    "null": None,
    "object": {"a": [1, None]},
    "array": [{"b": "c"}],
}


def _objects(part: dict[str, Any], revision: Revision) -> list[Any]:
    members = {name: samples(member, revision) for name, member in part.get("properties", {}).items()}
    if not members:
        extra = part.get("additionalProperties")
        value = samples(extra, revision) if isinstance(extra, dict) and extra else ["anything"]
        return [{}, {f"key {number}": one for number, one in enumerate(value)}]
    least = {name: members[name][0] for name in part.get("required", [])}
    rows = zip_longest(*members.values(), fillvalue=_SAME)
    full = [_row(dict(zip(members, row, strict=True)), members) for row in rows]
    return [least, *full]


_SAME = object()


def _row(row: dict[str, Any], members: dict[str, list[Any]]) -> dict[str, Any]:
    return {name: members[name][-1] if value is _SAME else value for name, value in row.items()}


def _together(first: list[Any], second: list[Any]) -> Iterator[tuple[Any, Any]]:
    for one, two in zip_longest(first, second, fillvalue=_SAME):
        yield (first[-1] if one is _SAME else one), (second[-1] if two is _SAME else two)
