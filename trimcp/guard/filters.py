"""Filters: functions that get each result of a tool, resource or prompt before it is sent, to change or withhold it.

They run outside the handler and its middleware, in the order they were added. A tool error is a result and is filtered.
A filter that crashes withholds the result. Protocol errors and questions to the user are not filtered.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import attrs
import orjson

from trimcp.errors import ErrorReply, ToolError
from trimcp.hidden import strip_hidden
from trimcp.support.bounds import check_members
from trimcp.support.slotted import evolved
from trimcp.wire.codes import INTERNAL_ERROR
from trimcp.wire.content import EmbeddedResource, ResourceLink, TextContent, TextResourceContents
from trimcp.wire.fields import ABSENT
from trimcp.wire.input_requests import InputRequiredResult
from trimcp.wire.prompts import GetPromptResult
from trimcp.wire.resources import ReadResourceResult
from trimcp.wire.tools import CallToolResult

Filter: TypeAlias = Callable[[Any, Any, Any], Any]
"""`def function(ctx, params, result)`, sync or async: returns the result to send, or raises to withhold it."""

Handler: TypeAlias = Callable[[Any, Any], Awaitable[Any]]

_LINK_TEXTS: Final = ("name", "title", "description", "uri")

FILTERED: Final[Mapping[str, type[Any]]] = {
    "tools/call": CallToolResult,
    "resources/read": ReadResourceResult,
    "prompts/get": GetPromptResult,
}
"""The methods whose results are filtered, with the classes of their results."""


@attrs.frozen(eq=False)
class AppliedFilter:
    """A filter with its methods and its patterns of names or URIs; no pattern means all."""

    function: Filter
    methods: frozenset[str]
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, function: Filter, names: str | Sequence[str] | None, methods: Sequence[str] | None) -> AppliedFilter:
        """Check the arguments and return the filter. Raises TypeError and ValueError as `Server.filter` does."""
        if not callable(function):
            raise TypeError(f"a filter is a function of (ctx, params, result), not {function!r}")
        chosen = frozenset(FILTERED if methods is None else check_members("methods", methods, str, "methods"))
        unknown = sorted(chosen - FILTERED.keys())
        if unknown or not chosen:
            raise ValueError(f"filters are for results of {', '.join(FILTERED)}, not of {unknown}")
        given = [names] if isinstance(names, str) else names
        return cls(function, chosen, () if given is None else check_members("names", given, str, "names"))


def filtered(method: str, handler: Handler, filters: Sequence[AppliedFilter]) -> Handler:
    payload = FILTERED[method]
    key = "uri" if method == "resources/read" else "name"

    async def call(ctx: Any, params: Any) -> Any:
        result = await handler(ctx, params)
        if isinstance(result, InputRequiredResult):
            return result
        names = [getattr(params, key)]
        if method == "tools/call" and "@" in names[0]:  # an older version of a tool is called as NAME@VERSION
            names.append(names[0].rpartition("@")[0])
        for applied in filters:
            fits = [name for name in names for pattern in applied.names if fnmatch.fnmatchcase(name, pattern)]
            if fits or not applied.names:
                result = await _apply(applied.function, ctx, params, result, payload)
        return result

    return call


async def _apply(function: Filter, ctx: Any, params: Any, result: Any, payload: type[Any]) -> Any:
    """Return the filtered result. Any exception of the filter withholds the result."""
    named = getattr(function, "__qualname__", type(function).__name__)
    try:
        if not isinstance(result, payload):
            raise TypeError(f"{type(result).__name__} cannot be filtered; {payload.__name__} can")
        found = function(ctx, params, result)
        if isinstance(found, Awaitable):
            found = await found
        if not isinstance(found, payload):
            raise TypeError(f"a filter returns {payload.__name__}, not {type(found).__name__}")
    except ToolError as refusal:
        if payload is not CallToolResult:
            raise ErrorReply(INTERNAL_ERROR, str(refusal), {"reason": "filter"}) from refusal
        return CallToolResult(content=[TextContent(str(refusal))], is_error=True)
    except Exception as error:  # a user's function; the content to withhold may be what crashed it
        error.add_note(f"in the filter {named}; the result was kept back")
        raise
    return found


# The texts of a result


def map_texts(result: Any, change: Callable[[str], str]) -> Any:
    """Return a result with `change` applied to every text: content, structured content with its keys, and `_meta`."""
    changed = {}
    if result.meta is not None:
        changed["meta"] = _map_json(result.meta, change)
    if isinstance(result, CallToolResult) and result.structured_content is not ABSENT:
        changed["structured_content"] = _map_json(result.structured_content, change)
    if isinstance(result, GetPromptResult) and result.description is not None:
        changed["description"] = change(result.description)
    return evolved(_with_blocks(result, [_map_block(block, change) for block in _blocks(result)]), **changed)


def _map_block(block: Any, change: Callable[[str], str]) -> Any:
    if isinstance(block, TextContent | TextResourceContents):
        return evolved(block, text=change(block.text))
    if isinstance(block, EmbeddedResource):
        return evolved(block, resource=_map_block(block.resource, change))
    if isinstance(block, ResourceLink):
        texts = {name: getattr(block, name) for name in _LINK_TEXTS}
        return evolved(block, **{name: change(text) for name, text in texts.items() if text is not None})
    return block


def _blocks(result: Any) -> list[Any]:
    if isinstance(result, GetPromptResult):
        return [message.content for message in result.messages]
    return list(result.contents if isinstance(result, ReadResourceResult) else result.content)


def _with_blocks(result: Any, blocks: list[Any]) -> Any:
    """Return a result with its blocks replaced; a prompt's messages without a block are left out."""
    if isinstance(result, GetPromptResult):
        pairs = zip(result.messages, blocks, strict=False)
        return evolved(result, messages=[evolved(message, content=block) for message, block in pairs])
    return evolved(result, **{"contents" if isinstance(result, ReadResourceResult) else "content": blocks})


def _map_json(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        changed = {change(str(key)): _map_json(member, change) for key, member in value.items()}
        if len(changed) < len(value):
            raise ValueError("two members of an object would have the same name")
        return changed
    if isinstance(value, list | tuple):
        return [_map_json(member, change) for member in value]
    return value


# Secrets. No pattern can be slow: each match is bounded in length and never backtracks.


class SecretPattern(NamedTuple):
    """One kind of secret."""

    name: str  # shown in place of the secret
    marks: list[str]  # lower-case texts; the pattern is tried only if one of them occurs
    pattern: re.Pattern[str]  # its first group, if it has one, is the secret; the rest is kept


# The beginning of a word, also after a newline escaped by JSON as two characters.
_WORD: Final = r"(?:(?<![A-Za-z0-9_-])|(?<=\\[nrt]))"

SECRETS: Final = tuple(
    SecretPattern(name, marks.split(), re.compile(pattern, re.ASCII))
    for name, marks, pattern in (
        # The end is optional: the key may be cut off. Before Python 3.11.5, a possessive group with alternatives takes
        # the beginning of the end, too; nothing that follows it here makes a greedy one go back.
        (
            "private key",
            "-----begin",
            r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----(?:[^-]|-(?!----)){0,16384}"
            r"(?:-----END [A-Z0-9 ]{0,48}-----)?",
        ),
        (
            "authorization",
            "authorization",
            r"(?i:authorization)\\?[\"']?[ \t]{0,4}[:=][ \t]{0,4}\\?[\"']?"
            r"([A-Za-z]{1,16}[ \t]{1,4}[^\s\"'\\,;]{1,4096}+)",
        ),
        (
            "bearer token",
            "bearer",
            rf"{_WORD}(?i:bearer)[ \t]{{1,8}}((?=[A-Za-z._~+/-]{{0,255}}[0-9])[\w.~+/=-]{{12,4096}}+)",
        ),
        ("password in a URL", "://", r"://[^\s/:@\"']{0,255}+:([^\s/@\"']{1,255}+)@"),
        ("JSON web token", "eyj", r"eyJ[\w-]{8,512}+\.eyJ[\w-]{8,4096}+\.[\w-]{0,1024}+"),
        ("AWS key", "akia asia", r"(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Za-z0-9])"),
        ("GitHub token", "ghp_ gho_ ghu_ ghs_ ghr_ github_pat_", r"(?:gh[pousr]|github_pat)_\w{30,255}+"),
        ("GitLab token", "glpat-", r"glpat-[\w-]{20,255}+"),
        ("Slack token", "xox xapp-", r"(?:xox[abeprs]|xapp)-[\w-]{10,255}+"),
        ("Stripe key", "sk_live_ sk_test_ rk_live_ rk_test_", r"[sr]k_(?:live|test)_\w{16,255}+"),
        ("API key", "sk-", rf"{_WORD}sk-[\w-]{{20,255}}+"),
        ("Google key", "aiza ya29.", r"AIza[\w-]{35}|ya29\.[\w-]{20,1024}+"),
        ("package registry token", "npm_ pypi-", r"npm_\w{36}|pypi-[\w-]{50,1024}+"),
        ("Hugging Face token", "hf_", rf"{_WORD}hf_\w{{30,255}}+"),
    )
)
"""The known kinds of secrets, in the order in which they are tried."""


# The filters


@attrs.frozen
class HiddenTextFilter:
    """Removes text that is not visible: escape sequences, control characters, invisible characters.

    `trimcp.hidden.hidden_text` defines it.
    """

    def __call__(self, ctx: Any, params: Any, result: Any) -> Any:
        return map_texts(result, strip_hidden)


@attrs.frozen
class SecretsFilter:
    """Masks texts that look like secrets: private keys, tokens of well-known services, bearer tokens, URL passwords.

    It finds only the kinds in `SECRETS`. Its patterns are bounded: no text can make it slow.

    Args:
        on_found: "mask" replaces a secret with a text such as "[masked: GitHub token]"; "refuse" withholds the result.
    """

    on_found: Literal["mask", "refuse"] = attrs.field(
        default="mask", validator=attrs.validators.in_(("mask", "refuse"))
    )

    def __call__(self, ctx: Any, params: Any, result: Any) -> Any:
        return map_texts(result, self._change)

    def _change(self, text: str) -> str:
        folded = text.lower()
        for secret in SECRETS:
            if any(mark in folded for mark in secret.marks):
                text = secret.pattern.sub(partial(self._masked, secret), text)
        return text

    def _masked(self, secret: SecretPattern, match: Any) -> str:
        if self.on_found == "refuse":
            raise ToolError(f"the result was kept back: it holds what looks like a secret ({secret.name})")
        mask = f"[masked: {secret.name}]"
        if not secret.pattern.groups:
            return mask
        whole, begin, end = match[0], match.start(1) - match.start(), match.end(1) - match.start()
        return f"{whole[:begin]}{mask}{whole[end:]}"


@attrs.frozen(eq=False)
class PatternFilter:
    """Replaces the matches of a pattern of your own.

    Results contain untrusted text, and most patterns with two `*` or `+` can be made extremely slow in `re`. Bound the
    repetitions (`{1,64}`), or compile the pattern with google-re2, whose time is linear.

    Args:
        pattern: compiled by `re`, or an object with the same `sub` method.
        replacement: the replacement for `sub`.
    """

    pattern: Any = attrs.field()
    replacement: str = "***"

    @pattern.validator
    def _check(self, attribute: object, value: Any) -> None:
        if not hasattr(value, "sub"):
            raise TypeError(f"a compiled pattern is needed, such as re.compile({value!r}); see what bounds it")

    def __call__(self, ctx: Any, params: Any, result: Any) -> Any:
        return map_texts(result, lambda text: self.pattern.sub(self.replacement, text))


@attrs.frozen
class SizeFilter:
    """Bounds the size of a result: texts are cut, with a note that says so; other content is refused.

    Structured content, images, audio and binary resources cannot be cut. A refused result of a tool becomes a tool
    error, any other a protocol error.

    Args:
        max_bytes: the sum of texts in UTF-8, base64, and structured content as JSON, without the note.
        on_excess: "cut" or "refuse".
    """

    max_bytes: int = attrs.field(validator=attrs.validators.gt(0))
    on_excess: Literal["cut", "refuse"] = attrs.field(
        default="cut", kw_only=True, validator=attrs.validators.in_(("cut", "refuse"))
    )

    def __call__(self, ctx: Any, params: Any, result: Any) -> Any:
        structured = getattr(result, "structured_content", ABSENT)
        fixed = 0 if structured is ABSENT else len(orjson.dumps(structured, default=str))
        blocks = _blocks(result)
        size = fixed + sum(_size(block) for block in blocks)
        if size <= self.max_bytes:
            return result
        if self.on_excess == "refuse" or fixed > self.max_bytes:
            raise ToolError(f"the result has {size} bytes; at most {self.max_bytes} are sent")
        room, kept = self.max_bytes - fixed, []
        for block in blocks:
            fits = _size(block) <= room
            if not fits and not isinstance(block, TextContent | TextResourceContents):
                raise ToolError(f"the result has {size} bytes; at most {self.max_bytes} are sent, and it cannot be cut")
            if not fits:
                note = f"\n[cut here: the whole result has {size} bytes, at most {self.max_bytes} are sent]"
                text = block.text.encode("utf-8", "surrogatepass")[:room].decode("utf-8", "ignore")
                kept.append(evolved(block, text=text + note))
                break
            room -= _size(block)
            kept.append(block)
        return _with_blocks(result, kept)


def _size(block: Any) -> int:
    held = block.resource if isinstance(block, EmbeddedResource) else block
    for name in ("text", "data", "blob"):
        value = getattr(held, name, None)
        if isinstance(value, str):
            return len(value) if value.isascii() else len(value.encode("utf-8", "surrogatepass"))
    return sum(len(getattr(held, name, None) or "") for name in _LINK_TEXTS)
