"""What an installed trimcp has to do, in a bare environment and outside of a checkout: `python smoke.py VERSION`.

It needs nothing but trimcp, so it is no test for pytest: `nox -s release` runs it with what was built.
"""

from __future__ import annotations

import sys
from importlib.metadata import metadata, requires, version
from pathlib import Path

import trio

import trimcp


def check(what: str, holds: bool) -> None:
    if not holds:
        sys.exit(f"what was installed is not right: {what}")
    print(f"ok: {what}")


async def talk(target: trimcp.Target) -> str:
    """Call a tool over this target."""
    async with trimcp.Client("smoke").connect(target) as session:
        return (await session.call_tool("double", {"text": "ab"})).text


async def serve() -> None:
    """Serve in this process, over HTTP and over a pipe of its own."""
    server = make_server()
    check("a server in this process answers", await talk(server) == "abab")
    async with trio.open_nursery() as nursery:

        async def start(task_status: trio.TaskStatus[list[str]]) -> None:
            await trimcp.serve_http(server, port=0, task_status=task_status)

        (url,) = await nursery.start(start)
        check("a server over HTTP answers", await talk(trimcp.http(url)) == "abab")
        nursery.cancel_scope.cancel()
    child = trimcp.stdio(sys.executable, __file__, "--serve")
    check("a server in a process of its own answers", await talk(child) == "abab")


def make_server() -> trimcp.Server[None]:
    server: trimcp.Server[None] = trimcp.Server("smoke")

    @server.tool
    async def double(text: str) -> str:
        return text * 2

    return server


def main() -> None:
    wanted = sys.argv[1]
    if wanted == "--serve":
        trimcp.run_stdio(make_server())
        return
    home = Path(trimcp.__file__).parent
    check("it is not that of a checkout", "site-packages" in home.parts)
    check(f"its version is {wanted}", version("trimcp") == wanted)
    about = metadata("trimcp")
    check("its metadata name licence, Python and readme", about["License-Expression"] == "Apache-2.0")
    check("it says which Python it needs", about["Requires-Python"] == ">=3.11")
    check("its readme is the description", len(str(about.get_payload())) > 1_000)
    optional = {line.partition("extra == ")[2].strip("'\"") for line in requires("trimcp") or () if "extra ==" in line}
    check(f"it has its extras: {', '.join(sorted(optional))}", {"auth", "cli", "grpc", "skills"} <= optional)
    check("types come with it", (home / "py.typed").is_file() and (home / "__init__.pyi").is_file())
    check("no test comes with it", not (home.parent / "tests").exists())
    check("every public name can be loaded", all(hasattr(trimcp, name) for name in trimcp.__all__))
    trio.run(serve)


if __name__ == "__main__":
    main()
