"""FastMCP's own skills, as a server of a folder or as a client of one server. Runs where `fastmcp` is installed.

    python tests/interop/fastmcp_skills.py serve FOLDER
    python tests/interop/fastmcp_skills.py read URL URI

The client prints what it found and verified as JSON.
"""

import asyncio
import json
import sys

from asgi_serving import serve
from fastmcp import Client, FastMCP
from fastmcp.skills.client import SkillsClientExtension
from fastmcp.skills.provider import SkillsDirectoryProvider


async def read(url: str, uri: str) -> None:
    async with Client(url, extensions=[SkillsClientExtension()]) as client:
        listed = [skill.uri for skill in await client.list_skills()]
        skill = await client.read_skill(uri)
        files = {path: len(content) for path, content in skill.files.items()}
        print(json.dumps([client.protocol_version, listed, files]))


if sys.argv[1] == "serve":
    serve(FastMCP("skills", providers=[SkillsDirectoryProvider(sys.argv[2])]).http_app())
else:
    asyncio.run(read(*sys.argv[2:]))
