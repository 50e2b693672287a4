"""Every message and payload of the five revisions, as plain attrs values. No I/O, no Trio.

The payloads that programs create or read are exported here; the others are in the modules (`content`, `tools`, ...).
"""

from trimcp.support.lazy import lazy_names as _lazy_names

# The only list of names; the stub for type checkers is generated from it: `python docs/stubs.py`.
_NAMES = {
    "trimcp.wire.common": "Annotations Icon Implementation Unreadable",
    "trimcp.wire.content": "AudioContent BlobResourceContents EmbeddedResource ImageContent ResourceLink TextContent "
    "TextResourceContents",
    "trimcp.wire.input_requests": "CreateMessageParams CreateMessageResult ElicitFormParams ElicitParams ElicitResult "
    "ElicitURLParams InputRequiredResult ModelHint ModelPreferences Root SamplingMessage",
    "trimcp.wire.lifecycle": "LoggingMessageParams ProgressParams",
    "trimcp.wire.prompts": "Completion GetPromptResult Prompt PromptMessage",
    "trimcp.wire.resources": "ReadResourceResult Resource ResourceTemplate",
    "trimcp.wire.tools": "CallToolResult Tool ToolAnnotations",
}

__getattr__, __dir__, __all__ = _lazy_names(__name__, _NAMES)
