"""Finding tools by words, for servers with more tools than a model's context should hold."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import trio

from trimcp.errors import ErrorReply, ToolError
from trimcp.protocol.connection import Encoded
from trimcp.server.tools import ToolOptions
from trimcp.session.context import Context
from trimcp.support.slotted import evolved
from trimcp.wire.codes import INVALID_PARAMS
from trimcp.wire.common import PageParams
from trimcp.wire.converter import to_json
from trimcp.wire.tools import CallToolParams, ListToolsResult, Tool

if TYPE_CHECKING:
    from trimcp.server.handlers.calling import Handler
    from trimcp.server.running import Running

_WORD: Final = re.compile(r"[A-Z]?[^\W\d_A-Z]+|[A-Z]+(?![^\W\d_A-Z])|\d+")
_LONGEST: Final = 500  # characters of what is searched,
_MOST_WORDS: Final = 32  # and its words
_PER_TURN: Final = 2_000  # looks at a text for a word between which others have no turn; each takes about a microsecond
_COUNTED_PER_TURN: Final = 10  # tools whose words are counted at once; each takes up to a millisecond
_LONGEST_TEXT: Final = 4_000  # characters of a description that are looked at
_WEIGHTS: Final = (("name", 3), ("title", 2), ("description", 1))
_SATURATION: Final = 1.2  # k1 of BM25: how soon a word that is repeated counts no more
_LENGTH: Final = 0.75  # b of BM25: how much a long text is held against its words
_MOST_PAGES: Final = 1_000
_MOST_COUNTED: Final = 20_000  # tools whose words are kept
_SHOWN: Final = ("name", "title", "description", "inputSchema", "annotations")


def _words(text: str) -> list[str]:
    """Return the words of a text: `getUserNames` and `get_user_names` are "get", "user" and "name"."""
    found = [word.casefold() for word in _WORD.findall(text[:_LONGEST_TEXT])]
    return [word[:-1] if len(word) > 3 and word.endswith("s") and word[-2] != "s" else word for word in found]


class ToolWords(NamedTuple):
    """The words that a tool is found by."""

    tool: Tool
    weights: Counter[str]
    total: int


def words_of(tool: Tool) -> ToolWords:
    """Return the words that a tool is found by, with their weights."""
    counts: Counter[str] = Counter()
    for member, weight in _WEIGHTS:
        for word in _words(getattr(tool, member) or ""):
            counts[word] += weight
    for parameter in list(tool.input_schema.get("properties") or ())[:100]:
        counts.update(_words(parameter))
    return ToolWords(tool, counts, counts.total())


async def rank(query: str, texts: Sequence[ToolWords]) -> list[Tool]:
    """Return the tools that have a word of the query, the best first, by BM25. Others have their turns meanwhile."""
    average = sum(text.total for text in texts) / max(len(texts), 1) or 1.0
    scores: defaultdict[int, float] = defaultdict(float)
    looked = 0
    for word in list(dict.fromkeys(_words(query[:_LONGEST])))[:_MOST_WORDS]:
        having = [at for at, text in enumerate(texts) if word in text.weights]
        rarity = math.log(1 + (len(texts) - len(having) + 0.5) / (len(having) + 0.5))
        for at in having:
            often, length = texts[at].weights[word], texts[at].total / average
            scores[at] += rarity * often * (_SATURATION + 1) / (often + _SATURATION * (1 - _LENGTH + _LENGTH * length))
        looked += len(texts)
        if looked >= _PER_TURN:
            looked = 0
            await trio.lowlevel.checkpoint()
    return [texts[at].tool for at in sorted(scores, key=lambda at: -scores[at])]


class ToolSearch:
    """The two tools of a server that find its others and call them."""

    def __init__(self, listed: frozenset[str], most: int, search: str, call: str) -> None:
        self._most = most
        self._own = frozenset((search, call))
        self._listed = listed | self._own
        self._call = call
        self._lists: dict[object, Handler] = {}  # of each run what lists all tools
        self._index: dict[str, ToolWords] = {}
        self.search_options: ToolOptions = {
            "name": search,
            "description": f"Find tools of this server by words, such as what they do. Call what you find by {call}.",
            "annotations": {"readOnlyHint": True},
        }
        self.call_options: ToolOptions = {
            "name": call,
            "description": f"Call a tool that {search} has found, with arguments that fit its inputSchema.",
            "structured": False,
        }

    async def search(self, ctx: Context[Any], query: str) -> dict[str, Any]:
        """Find tools."""
        tools = [tool for page in await self._pages(ctx) for tool in page.tools if tool.name not in self._own]
        best = (await rank(query, await self._counted(tools)))[: self._most]
        shown: list[Any] = [to_json(tool, revision=ctx.revision) for tool in best]
        return {"tools": [{key: tool[key] for key in _SHOWN if key in tool} for tool in shown]}

    async def call(self, name: str, arguments: dict[str, Any] | None = None) -> str:
        """Refuse what cannot be called: all other calls have become calls of their tools."""
        raise ToolError(f"{name[:100]} cannot be called by {self._call}")

    async def _pages(self, ctx: Context[Any]) -> list[ListToolsResult]:
        """Return the pages of the list of all tools, as the sender of a request would see it."""
        pages: list[ListToolsResult] = []
        while not pages or (pages[-1].next_cursor is not None and len(pages) < _MOST_PAGES):
            cursor = pages[-1].next_cursor if pages else None
            page = await self._lists[ctx.running](ctx, PageParams(cursor=cursor))
            pages.append(page.value if isinstance(page, Encoded) else page)
        return pages

    async def _counted(self, tools: Sequence[Tool]) -> list[ToolWords]:
        """Return the words of tools, those known as they are. Others have their turns meanwhile."""
        counted: list[ToolWords] = []
        fresh = 0
        for tool in tools:
            known = self._index.get(tool.name)
            if known is None or known.tool is not tool:
                if len(self._index) >= _MOST_COUNTED:
                    self._index.clear()
                known = self._index[tool.name] = words_of(tool)
                fresh += 1
                if fresh % _COUNTED_PER_TURN == 0:
                    await trio.lowlevel.checkpoint()
            counted.append(known)
        return counted

    @asynccontextmanager
    async def while_running(self, running: Running) -> AsyncIterator[None]:
        """Shorten the list, and have calls by the one tool become calls of the others, while the block runs."""
        running.replace("tools/list", partial(self._shortened, running))
        running.replace("tools/call", self._around)
        try:
            yield
        finally:
            del self._lists[running]

    def _shortened(self, running: Running, inner: Handler) -> Handler:
        self._lists[running] = inner

        async def listed(ctx: Context[Any], params: PageParams) -> Any:
            if params.cursor is not None:
                raise ErrorReply(INVALID_PARAMS, "invalid cursor: list again from the beginning")
            pages = await self._pages(ctx)
            tools = [tool for page in pages for tool in page.tools if tool.name in self._listed]
            return evolved(pages[0], tools=tools, next_cursor=None)

        return listed

    def _around(self, inner: Handler) -> Handler:
        async def call(ctx: Context[Any], params: CallToolParams) -> Any:
            arguments = params.arguments or {}
            name, given = arguments.get("name"), arguments.get("arguments")
            fits = isinstance(name, str) and name not in self._own and (given is None or isinstance(given, dict))
            if params.name == self._call and fits:
                params = evolved(params, name=name, arguments=given)
                ctx.internals[1].request.params = params  # what is told of the request names the tool
            return await inner(ctx, params)

        return call
