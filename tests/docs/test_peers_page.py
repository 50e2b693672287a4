"""The page about other implementations names each one that is tried, with the version that is tried."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "peers.md").read_text("utf-8")
SERVERS = tomllib.loads((ROOT / "tests" / "interop" / "real_servers.toml").read_text("utf-8"))["servers"]
PEERS = tomllib.loads((ROOT / "benchmarks" / "peers.toml").read_text("utf-8"))


def test_the_table_of_servers_is_the_list_that_is_tried() -> None:
    rows = re.findall(r"^\| `([^`]+)` \((PyPI|npm)\)", PAGE, re.MULTILINE)
    assert sorted(rows) == sorted((each["package"], {"pypi": "PyPI", "npm": "npm"}[each["from"]]) for each in SERVERS)
    assert len(rows) >= 20


def test_the_sdks_are_named_with_the_versions_that_are_tried() -> None:
    python, go, rust, java = PEERS["python"], PEERS["go"], PEERS["cargo"], PEERS["maven"]
    short = [re.search(r"==(\d+\.\d+)", python[name])[1] for name in ("mcp", "mcp-1", "fastmcp")]  # type: ignore[index]
    typescript = ".".join(PEERS["npm"]["@modelcontextprotocol/client"].split(".")[:2])
    named = [f"Python SDK {short[0]}", f"Python SDK {short[1]}", f"FastMCP {short[2]}", f"client` {typescript}"]
    named += [f"Go SDK {go['go-sdk'].lstrip('v').rpartition('.')[0]}", f"`rmcp` {rust['rmcp'].rpartition('.')[0]}"]
    named += [f"Java SDK {java['java-1']} and {java['java-2']}"]
    assert [each for each in named if each not in PAGE] == []
