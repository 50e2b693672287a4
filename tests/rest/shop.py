"""The document of a shop, and an API that answers as it is told."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx2

USER = {
    "type": "object",
    "required": ["name", "id"],
    "properties": {
        "id": {"type": "integer", "readOnly": True},
        "name": {"type": "string", "example": "Ada"},
        "boss": {"$ref": "#/components/schemas/User"},
    },
}
SHOP: dict[str, Any] = {
    "openapi": "3.1.0",
    "info": {"title": "Shop", "version": "2"},
    "servers": [{"url": "https://{place}.example/v1", "variables": {"place": {"default": "shop"}}}],
    "security": [{"key": []}],
    "components": {
        "schemas": {"User": USER},
        "parameters": {"Id": {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}},
        "securitySchemes": {
            "key": {"type": "apiKey", "in": "header", "name": "X-Key"},
            "query": {"type": "apiKey", "in": "query", "name": "k"},
            "cookie": {"type": "apiKey", "in": "cookie", "name": "sid"},
            "basic": {"type": "http", "scheme": "Basic"},
            "token": {"type": "oauth2", "flows": {}},
        },
    },
    "paths": {
        "/users/{id}": {
            "parameters": [{"$ref": "#/components/parameters/Id"}],
            "get": {"operationId": "getUser", "summary": "Get a user", "tags": ["people"]},
            "delete": {"operationId": "deleteUser", "tags": ["admin"], "security": []},
            "put": {
                "operationId": "putUser",
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/User"}}},
                },
            },
        },
        "/users": {
            "get": {
                "parameters": [
                    {"name": "tags", "in": "query", "schema": {"type": "array"}},
                    {"name": "ids", "in": "query", "explode": False, "schema": {"type": "array"}},
                    {"name": "piped", "in": "query", "style": "pipeDelimited", "schema": {"type": "array"}},
                    {"name": "where", "in": "query", "style": "deepObject", "schema": {"type": "object"}},
                    {"name": "json", "in": "query", "content": {"application/json": {"schema": {"type": "object"}}}},
                    {"name": "old", "in": "query", "description": "Old ones, too.", "schema": {"type": "boolean"}},
                    {"name": "X-Trace", "in": "header", "schema": {"type": "string"}},
                    {"name": "Authorization", "in": "header", "schema": {"type": "string"}},
                    {"name": "theme", "in": "cookie", "schema": {"type": "string"}},
                ]
            },
            "post": {
                "operationId": "form",
                "deprecated": True,
                "requestBody": {
                    "content": {"application/x-www-form-urlencoded": {"schema": {"type": "object"}}},
                },
            },
        },
    },
}
Answers = Callable[[httpx2.Request], httpx2.Response]


class Streamed(httpx2.AsyncByteStream):
    """A body that arrives from a network."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self.data


class FakeApi(httpx2.AsyncBaseTransport):
    """What an API was asked, and what it answers."""

    def __init__(self, answer: Answers | None = None) -> None:
        self.asked: list[httpx2.Request] = []
        self.answer: Answers = answer or (lambda request: httpx2.Response(200, json={"ok": True}))
        self.client = httpx2.AsyncClient(transport=self)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        await request.aread()
        self.asked.append(request)
        answer = self.answer(request)
        assert isinstance(answer.stream, httpx2.ByteStream)
        return httpx2.Response(answer.status_code, headers=answer.headers, stream=Streamed(b"".join(answer.stream)))
