"""Finding tools by words, for servers with more tools than a model's context should hold."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

from trimcp.errors import ToolError
from trimcp.server.registry import Registry
from trimcp.server.tools import ToolEntry, ToolOptions
from trimcp.session.context import Context
from trimcp.support.slotted import evolved
from trimcp.wire.converter import to_json
from trimcp.wire.tools import CallToolParams, Tool

if TYPE_CHECKING:
    from trimcp.server.calling import Handler
    from trimcp.server.running import Running

_WORD: Final = re.compile(r"[A-Z]?[^\W\d_A-Z]+|[A-Z]+(?![^\W\d_A-Z])|\d+")
_LONGEST: Final = 500  # characters of what is searched
_LONGEST_TEXT: Final = 4_000  # characters of a description that are looked at
_WEIGHTS: Final = (("name", 3), ("title", 2), ("description", 1))
_SATURATION: Final = 1.2  # k1 of BM25: how soon a word that is repeated counts no more
_LENGTH: Final = 0.75  # b of BM25: how much a long text is held against its words
_SHOWN: Final = ("name", "title", "description", "inputSchema", "annotations")


def _words(text: str) -> list[str]:
    """Return the words of a text: `getUserNames` and `get_user_names` are "get", "user" and "name"."""
    found = [word.casefold() for word in _WORD.findall(text[:_LONGEST_TEXT])]
    return [word[:-1] if len(word) > 3 and word.endswith("s") and word[-2] != "s" else word for word in found]


def _counted(tool: Tool) -> Counter[str]:
    counts: Counter[str] = Counter()
    for member, weight in _WEIGHTS:
        for word in _words(getattr(tool, member) or ""):
            counts[word] += weight
    for parameter in list(tool.input_schema.get("properties") or ())[:100]:
        counts.update(_words(parameter))
    return counts


def rank(query: str, texts: Sequence[Counter[str]]) -> list[int]:
    """Return the indices of the texts that have a word of the query, the best first, by BM25."""
    average = sum(text.total() for text in texts) / max(len(texts), 1) or 1.0
    scores: defaultdict[int, float] = defaultdict(float)
    for word in dict.fromkeys(_words(query[:_LONGEST])):
        having = [at for at, text in enumerate(texts) if word in text]
        rarity = math.log(1 + (len(texts) - len(having) + 0.5) / (len(having) + 0.5))
        for at in having:
            often, length = texts[at][word], texts[at].total() / average
            scores[at] += rarity * often * (_SATURATION + 1) / (often + _SATURATION * (1 - _LENGTH + _LENGTH * length))
    return sorted(scores, key=lambda at: -scores[at])


class ToolSearch:
    """The two tools of a server that find its others and call them."""

    def __init__(self, tools: Registry[ToolEntry], most: int, search: str, call: str) -> None:
        self._tools, self._most = tools, most
        self._own = frozenset((search, call))
        self._call = call
        self._index: dict[str, tuple[ToolEntry, Counter[str]]] = {}
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
        seen = list(self._seen(ctx))
        best = rank(query, [text for _, text in seen])[: self._most]
        shown: list[Any] = [to_json(seen[at][0].listed, revision=ctx.revision) for at in best]
        return {"tools": [{key: tool[key] for key in _SHOWN if key in tool} for tool in shown]}

    async def call(self, name: str, arguments: dict[str, Any] | None = None) -> str:
        """Refuse what cannot be called: all other calls have become calls of their tools."""
        raise ToolError(f"there is no tool named {name[:100]} to call here; search for it")

    def _seen(self, ctx: Context[Any]) -> Iterator[tuple[ToolEntry, Counter[str]]]:
        """Yield the tools that the sender of a request would see in the list, each with its words."""
        before, self._index = self._index, {}
        for name, entry, listed in self._tools.items():
            if listed and name not in self._own:
                known = before.get(name)
                known = (entry, _counted(entry.listed)) if known is None or known[0] is not entry else known
                self._index[name] = known
                if self._sees(ctx, entry):
                    yield known

    def _sees(self, ctx: Context[Any], entry: ToolEntry) -> bool:
        permission = entry.permission
        if permission is not None and (permission.hides(ctx.admission) or not permission.shown_to(ctx.principal)):
            return False
        return entry.listed.visible_to("model")

    @asynccontextmanager
    async def while_running(self, running: Running) -> AsyncIterator[None]:
        """Have calls by the one tool become calls of the others while the block runs."""
        running.around_calls(self._around)
        yield

    def _around(self, inner: Handler) -> Handler:
        async def call(ctx: Context[Any], params: CallToolParams) -> Any:
            arguments = params.arguments or {}
            name, given = arguments.get("name"), arguments.get("arguments")
            if params.name == self._call and isinstance(name, str) and (given is None or isinstance(given, dict)):
                entry = self._tools.get(name)
                if entry is not None and name not in self._own and self._sees(ctx, entry):
                    params = evolved(params, name=name, arguments=given)
                    ctx.internals[1].request.params = params  # what is told of the request names the tool
            return await inner(ctx, params)

        return call
