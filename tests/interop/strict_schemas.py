"""Puts schemas through what a package makes of them for a model that follows them strictly. Runs beside that package.

    python strict_schemas.py openai-agents < schemas.json

Prints what each tool's schema became, or why it became nothing.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from typing import Any


def openai_agents(name: str, schema: dict[str, Any]) -> Any:
    from agents.strict_schema import ensure_strict_json_schema

    return ensure_strict_json_schema(schema)


def pydantic_ai(name: str, schema: dict[str, Any]) -> Any:
    from pydantic_ai.profiles.openai import OpenAIJsonSchemaTransformer

    return OpenAIJsonSchemaTransformer(schema, strict=True).walk()


def google_adk(name: str, schema: dict[str, Any]) -> Any:
    from google.adk.tools._gemini_schema_util import _to_gemini_schema

    return _to_gemini_schema(schema).model_dump(mode="json", exclude_none=True)


def langchain(name: str, schema: dict[str, Any]) -> Any:
    from langchain_core.utils.function_calling import convert_to_openai_tool

    return convert_to_openai_tool({"title": name, "description": name, **schema}, strict=True)


CONVERSIONS: dict[str, Callable[[str, dict[str, Any]], Any]] = {
    "openai-agents": openai_agents,
    "pydantic-ai": pydantic_ai,
    "google-adk": google_adk,
    "langchain": langchain,
}


def main() -> None:
    convert = CONVERSIONS[sys.argv[1]]
    found = {}
    for name, schema in json.load(sys.stdin).items():
        try:
            found[name] = {"made": convert(name, copy.deepcopy(schema))}
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
