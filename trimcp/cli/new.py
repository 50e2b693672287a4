"""`trimcp new`: a project to begin with: a server, its tests, and what runs it in a container or under systemd."""

from __future__ import annotations

import keyword
import re
import sys
from pathlib import Path
from typing import Final

import click

from trimcp.cli.conversation import own_version
from trimcp.cli.exits import NEW_EXIT_CODES, Failure
from trimcp.cli.options import Subcommand
from trimcp.cli.screen import Screen
from trimcp.cli.text import theirs

_NAME: Final = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_TAKEN: Final = sys.stdlib_module_names | {"trimcp", "tests", "trio", "pytest"}

_PYPROJECT: Final = """\
[build-system]
requires = ["hatchling>=1.25"]
build-backend = "hatchling.build"

[project]
name = "NAME"
version = "0.1.0"
description = "A server of the Model Context Protocol."
readme = "README.md"
requires-python = ">=3.11"
dependencies = ["trimcp[cli]>=VERSION"]

[project.optional-dependencies]
dev = ["trimcp[reload]", "pytest>=8.3", "pytest-trio>=0.8", "mypy>=1.13", "pyright>=1.1.390"]

[project.scripts]
NAME = "MODULE.server:main"

[tool.hatch.build.targets.wheel]
packages = ["MODULE"]

[tool.pytest.ini_options]
trio_mode = true
testpaths = ["tests"]

[tool.mypy]
strict = true
files = ["MODULE", "tests"]

[tool.pyright]
include = ["MODULE", "tests"]
"""

_README: Final = """\
# NAME

A server of the Model Context Protocol, with trimcp.

    pip install -e ".[dev]"
    pytest && mypy && pyright
    trimcp call MODULE/server.py greet name=Ada
    trimcp run MODULE/server.py --http --reload
    trimcp install MODULE/server.py --host claude-desktop

`Dockerfile` puts it into a container, `deploy/NAME.service` under systemd. Before others can reach it, say who may
come: a file with a name and a token for each, or an authorization server (`trimcp run --help`).
"""

_SERVER: Final = '''\
"""The server: what it offers to clients."""

from __future__ import annotations

import trimcp

server = trimcp.Server("NAME", version="0.1.0")


@server.tool(annotations={"readOnlyHint": True})
async def greet(name: str, *, times: int = 1, ctx: trimcp.Context) -> str:
    """Greet somebody.

    Args:
        name: who is greeted.
        times: how often.
    """
    if not 1 <= times <= 10:
        raise trimcp.ToolError("greet between once and ten times")
    for number in range(times):
        await ctx.report_progress(number + 1, times)
    return f"Hello, {name}! " * (times - 1) + f"Hello, {name}!"


@server.resource("greeting://{language}")
async def greeting(language: str) -> str | None:
    """The greeting of a language."""
    return {"en": "Hello", "de": "Hallo", "no": "Hei"}.get(language)


def main() -> None:
    """Serve over standard input and output, as desktop hosts start it."""
    trimcp.run_stdio(server)


if __name__ == "__main__":
    main()
'''

_TEST: Final = '''\
"""The server, seen by a client in the same process."""

from __future__ import annotations

import trimcp
from trimcp.testing import connected, every_revision
from trio.testing import MockClock

from MODULE.server import server


@every_revision
async def test_greet(revision: trimcp.Revision, autojump_clock: MockClock) -> None:
    async with connected(server, revision=revision) as session:
        assert (await session.call_tool("greet", {"name": "Ada"})).text == "Hello, Ada!"
        assert (await session.call_tool("greet", {"name": "Ada", "times": 11})).is_error


async def test_progress(autojump_clock: MockClock) -> None:
    async with connected(server) as session, session.calling("greet", {"name": "Ada", "times": 3}) as call:
        assert [progress.progress async for progress in call.progress] == [1, 2, 3]


async def test_resources(autojump_clock: MockClock) -> None:
    async with connected(server) as session:
        assert (await session.read_resource("greeting://no")).text == "Hei"
'''

_DOCKERFILE: Final = """\
FROM python:3.12-slim
COPY . /src
RUN pip install --no-cache-dir /src && rm -r /src
USER nobody
EXPOSE 8000
HEALTHCHECK CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/healthz')"]
ENTRYPOINT ["trimcp", "run", "MODULE.server:server", "--http", "--host", "0.0.0.0", "--access-log", "--log-json"]
# The public name that clients use; --token-file or --auth-issuer says who may come.
CMD ["--allowed-host", "mcp.example.com"]
"""

_SERVICE: Final = """\
# Install the project into /opt/NAME: python3 -m venv /opt/NAME && /opt/NAME/bin/pip install .
[Unit]
Description=NAME, a server of the Model Context Protocol
After=network.target

[Service]
Type=notify
ExecStart=/opt/NAME/bin/trimcp run MODULE.server:server --http --port 8000 \\
    --allowed-host mcp.example.com --token-file ${CREDENTIALS_DIRECTORY}/tokens --grace 20 --access-log
LoadCredential=tokens:/etc/NAME/tokens
TimeoutStopSec=30
Restart=on-failure
DynamicUser=yes
NoNewPrivileges=yes
PrivateTmp=yes
ProtectSystem=strict
ProtectHome=yes

[Install]
WantedBy=multi-user.target
"""

_FILES: Final = {
    "pyproject.toml": _PYPROJECT,
    "README.md": _README,
    "MODULE/__init__.py": '"""A server of the Model Context Protocol."""\n',
    "MODULE/py.typed": "",
    "MODULE/server.py": _SERVER,
    "tests/test_server.py": _TEST,
    "Dockerfile": _DOCKERFILE,
    ".dockerignore": ".git\n.venv\n**/__pycache__\n",
    ".gitignore": ".venv/\n__pycache__/\n*.egg-info/\ndist/\n",
    "deploy/NAME.service": _SERVICE,
}


@click.command(cls=Subcommand, epilog=NEW_EXIT_CODES)
@click.argument("name")
@click.option(
    "--directory", metavar="PATH", type=click.Path(path_type=Path), help="Where it goes; by default a folder NAME here."
)
def new(name: str, directory: Path | None) -> None:
    """Begin a project: a server with its tests, a Dockerfile and a unit of systemd. Nothing that exists is changed.

    \b
    Examples:
      trimcp new weather
      trimcp new city-maps --directory ~/projects/maps
    """
    module = name.replace("-", "_")
    if _NAME.fullmatch(name) is None or len(name) > 60:
        raise Failure(f"{theirs(name)} is no name for a project: lower-case letters, digits and -, at most 60")
    if keyword.iskeyword(module) or module in _TAKEN:
        raise Failure(
            f"{name} is the name of something that Python or the project needs; choose another, such as my-{name}"
        )
    folder = directory or Path(name)
    screen = Screen()
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise Failure(f"{theirs(folder)} is there already, and is not an empty folder; nothing was changed")
        for path, text in _FILES.items():
            file = folder / _filled(path, name, module)
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("x", encoding="utf-8") as opened:
                opened.write(_filled(text, name, module))
            screen.note(f"wrote {theirs(file)}")
    except OSError as error:
        raise Failure(f"the project cannot be written: {theirs(error.strerror or error)}") from None
    screen.note(f'\nGo on with:  cd {theirs(folder)} && pip install -e ".[dev]" && pytest')


def _filled(text: str, name: str, module: str) -> str:
    return text.replace("MODULE", module).replace("NAME", name).replace("VERSION", own_version())
