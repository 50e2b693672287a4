"""Tools that are called at a URL."""

from __future__ import annotations

from typing import Any


class Callbacks:
    def check(self, url: str) -> None: ...
    async def resolve(self, url: str) -> Any: ...
