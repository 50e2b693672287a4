# Written by docs/stubs.py from the list in __init__.py beside it.

from trimcp.wire.common import Annotations as Annotations
from trimcp.wire.common import Icon as Icon
from trimcp.wire.common import Implementation as Implementation
from trimcp.wire.common import Unreadable as Unreadable
from trimcp.wire.content import AudioContent as AudioContent
from trimcp.wire.content import BlobResourceContents as BlobResourceContents
from trimcp.wire.content import EmbeddedResource as EmbeddedResource
from trimcp.wire.content import ImageContent as ImageContent
from trimcp.wire.content import ResourceLink as ResourceLink
from trimcp.wire.content import TextContent as TextContent
from trimcp.wire.content import TextResourceContents as TextResourceContents
from trimcp.wire.input_requests import CreateMessageParams as CreateMessageParams
from trimcp.wire.input_requests import CreateMessageResult as CreateMessageResult
from trimcp.wire.input_requests import ElicitFormParams as ElicitFormParams
from trimcp.wire.input_requests import ElicitParams as ElicitParams
from trimcp.wire.input_requests import ElicitResult as ElicitResult
from trimcp.wire.input_requests import ElicitURLParams as ElicitURLParams
from trimcp.wire.input_requests import InputRequiredResult as InputRequiredResult
from trimcp.wire.input_requests import ModelHint as ModelHint
from trimcp.wire.input_requests import ModelPreferences as ModelPreferences
from trimcp.wire.input_requests import Root as Root
from trimcp.wire.input_requests import SamplingMessage as SamplingMessage
from trimcp.wire.lifecycle import LoggingMessageParams as LoggingMessageParams
from trimcp.wire.lifecycle import ProgressParams as ProgressParams
from trimcp.wire.prompts import Completion as Completion
from trimcp.wire.prompts import GetPromptResult as GetPromptResult
from trimcp.wire.prompts import Prompt as Prompt
from trimcp.wire.prompts import PromptMessage as PromptMessage
from trimcp.wire.resources import ReadResourceResult as ReadResourceResult
from trimcp.wire.resources import Resource as Resource
from trimcp.wire.resources import ResourceTemplate as ResourceTemplate
from trimcp.wire.tools import CallToolResult as CallToolResult
from trimcp.wire.tools import Tool as Tool
from trimcp.wire.tools import ToolAnnotations as ToolAnnotations

__all__ = [
    "Annotations",
    "AudioContent",
    "BlobResourceContents",
    "CallToolResult",
    "Completion",
    "CreateMessageParams",
    "CreateMessageResult",
    "ElicitFormParams",
    "ElicitParams",
    "ElicitResult",
    "ElicitURLParams",
    "EmbeddedResource",
    "GetPromptResult",
    "Icon",
    "ImageContent",
    "Implementation",
    "InputRequiredResult",
    "LoggingMessageParams",
    "ModelHint",
    "ModelPreferences",
    "ProgressParams",
    "Prompt",
    "PromptMessage",
    "ReadResourceResult",
    "Resource",
    "ResourceLink",
    "ResourceTemplate",
    "Root",
    "SamplingMessage",
    "TextContent",
    "TextResourceContents",
    "Tool",
    "ToolAnnotations",
    "Unreadable",
]
