"""A Unix socket at which the user who runs a server looks at it, and acts: docs/reference/admin.md.

Requests and answers are lines of JSON, one answer for each request, in order. A picture is taken when it is asked for:
a viewer that hangs costs the server a task that waits, and nothing else.
"""

from __future__ import annotations

import math
import os
import socket
import stat
import struct
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import attrs
import orjson
import trio

from trimcp.channel import require_trio
from trimcp.errors import ConnectionLost, LocalError
from trimcp.security import security_event
from trimcp.support.cleaning import log_crash
from trimcp.support.nurseries import open_service_nursery
from trimcp.transports.http.h1.sockets import open_unix
from trimcp.watch.commands import plain
from trimcp.watch.observing import Observation, log
from trimcp.watch.picture import Observed

VERSION: Final = 1
"""The version of what is said at the socket; the first member of each answer."""

_LONGEST: Final = 64 * 1024  # bytes of a request
_LARGEST: Final = 64 * 1024 * 1024  # bytes of an answer, for a viewer
_ANSWERS: Final = 10.0  # seconds until an answer has come, but for the end of what is drained
_MOST: Final = 16  # viewers at a time
_PATIENCE: Final = 30.0  # seconds that a viewer may leave an answer unread
_CHUNK: Final = 64 * 1024
_CREDENTIALS: Final = struct.Struct("3i")  # process, user, group: struct ucred of unix(7)


def registry() -> Path:
    """Return the folder in which the sockets of this user's servers are, and make it if need be.

    It is `trimcp` below XDG_RUNTIME_DIR, or `trimcp-UID` in the directory for temporary files, with mode 0700. Raises
    LocalError: somebody else has made it, or it cannot be made.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(runtime, "trimcp") if runtime else Path(tempfile.gettempdir(), f"trimcp-{os.getuid()}")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise LocalError(f"{folder} cannot be made: {error.strerror}; name a path for the socket") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise LocalError(f"{folder} is not this user's alone (chmod 700); move it away, or name a path for the socket")
    return folder


# The server's side


@asynccontextmanager
async def serve_admin(
    server: Observed, path: str | os.PathLike[str] | None = None, *, group: str | None = None
) -> AsyncIterator[Path]:
    """Let this user, and root, look at a server and act on it at a Unix socket, while the block runs; yield its path.

    Args:
        server: the server, which runs in this process.
        path: of the socket; by default one named after the process in the folder that `trimcp ps` looks into. Another
            one is announced there.
        group: the name of some processes that are looked at as one; see `NetworkAdmin`.

    Raises:
        LocalError: there can be no socket.
    """
    require_trio()
    announced = registry() / f"{os.getpid()}.{id(server):x}{'' if group is None else f'-{group}'}.sock"
    place = announced if path is None else Path(path)
    with open_unix(place, backlog=_MOST) as sock, _announced(announced, place):
        async with open_service_nursery() as nursery:
            listener = trio.SocketListener(trio.socket.from_stdlib_socket(sock))
            viewer = partial(_serve, server, trio.Semaphore(_MOST))
            nursery.start_soon(trio.serve_listeners, viewer, [listener])  # which outlives a want of descriptors
            yield place
            nursery.cancel_scope.cancel()


@contextmanager
def _announced(link: Path, place: Path) -> Iterator[None]:
    if link == place:
        yield
        return
    link.unlink(missing_ok=True)
    link.symlink_to(place.absolute())
    try:
        yield
    finally:
        link.unlink(missing_ok=True)


async def _serve(server: Observed, places: trio.Semaphore, stream: trio.SocketStream) -> None:
    async with stream:
        try:
            places.acquire_nowait()
        except trio.WouldBlock:
            return  # there are as many viewers as there may be
        try:
            who = _who(stream.socket)
            if who is None:
                return
            with Observation(server, who=who) as observation:
                lines = Lines(partial(stream.receive_some, _CHUNK), _LONGEST)
                while (line := await lines.next()) is not None:
                    answer = await _answer(observation, line)
                    with trio.fail_after(_PATIENCE):
                        await stream.send_all(answer)
        except (trio.BrokenResourceError, trio.TooSlowError, ConnectionLost):
            pass  # the viewer is gone, or reads nothing
        except Exception as error:  # a bug here must not end the server that is looked at
            log_crash(log, error, "a viewer's request crashed")
        finally:
            places.release()


def _who(sock: trio.socket.SocketType) -> str | None:
    """Return who is at the other end, for the log; None, and it is logged, if it is neither this user nor root."""
    credentials = getattr(socket, "SO_PEERCRED", None)
    if credentials is None:  # elsewhere than on Linux the mode of the socket decides alone
        return "an operator"
    pid, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, credentials, _CREDENTIALS.size))
    if user in (0, os.getuid()):
        return f"user {user} (process {pid})"
    security_event("admin_refused", user=user, process=pid)
    return None


@attrs.define(eq=False)
class Lines:
    """The lines of what arrives in pieces, of at most so many bytes."""

    receive: Callable[[], Awaitable[bytes | bytearray]]  # returns b"" at the end
    most: int
    buffer: bytearray = attrs.field(init=False, factory=bytearray)

    async def next(self) -> bytes | None:
        """Return the next line; None once the other side has ended. ConnectionLost: it is too long."""
        buffer, seen = self.buffer, 0
        while (end := buffer.find(b"\n", seen)) < 0:
            seen = len(buffer)
            if seen > self.most:
                raise ConnectionLost("it sent a line that is too long")
            data = await self.receive()
            if not data:
                return None
            buffer += data
        line = bytes(buffer[:end])
        del buffer[: end + 1]
        return line


async def _answer(observation: Observation, line: bytes) -> bytes:
    try:
        return answer_line({"done": await perform(observation, orjson.loads(line))})
    except (LocalError, ValueError) as error:
        known = not isinstance(error, orjson.JSONDecodeError)
        return answer_line({"error": str(error) if known else _NO_REQUEST})


async def perform(observation: Observation, request: Any) -> Any:
    """Do what a request asks for and return what came of it. Raises LocalError or ValueError: it is refused."""
    try:
        act = _ACTS[request.pop("do")]
    except (ValueError, TypeError, KeyError, AttributeError):
        raise LocalError(_NO_REQUEST) from None
    try:
        found = act(observation, **request)
        return await found if hasattr(found, "__await__") else found
    except TypeError:
        raise LocalError("these members do not belong to this request, or have the wrong type") from None


def answer_line(answer: Mapping[str, Any]) -> bytes:
    """Return an answer as it is sent."""
    return orjson.dumps({"version": VERSION, **answer}, default=plain) + b"\n"


_ACTS: Final[Mapping[str, Callable[..., Any]]] = {
    "picture": Observation.picture,
    "cancel": Observation.cancel,
    "close": Observation.close,
    "drain": Observation.drain,
    "wire": Observation.wire,
}


_NO_REQUEST: Final = f"a request is a JSON object whose `do` is one of {', '.join(_ACTS)}"


# The viewer's side


@attrs.define(eq=False)
class AdminClient:
    """A connection to the socket of a server."""

    _stream: trio.SocketStream
    _answers: Lines

    async def ask(self, do: str, **members: Any) -> Any:
        """Send one request and return what was done.

        Raises:
            LocalError: the server refused it; the text says why.
            ConnectionLost: the server is gone, does not answer, or says what no server says.
        """
        try:
            with trio.fail_after(math.inf if do == "drain" else _ANSWERS):
                await self._stream.send_all(orjson.dumps({"do": do, **members}) + b"\n")
                line = await self._answers.next()
        except trio.BrokenResourceError as error:
            raise ConnectionLost("the server is gone") from error
        except trio.TooSlowError:
            raise ConnectionLost("the server does not answer") from None
        if line is None:
            raise ConnectionLost("the server is gone")
        try:
            answer = orjson.loads(line)
            if "error" not in answer:
                return answer["done"]
            error_text = str(answer["error"])
        except (ValueError, TypeError, KeyError, IndexError):
            raise ConnectionLost("what the server says cannot be read") from None
        raise LocalError(error_text)


@asynccontextmanager
async def connect_admin(path: str | os.PathLike[str]) -> AsyncIterator[AdminClient]:
    """Connect to the socket of a server while the block runs.

    Raises ConnectionLost: nobody listens there, or it is another user's.
    """
    try:
        stream = await trio.open_unix_socket(os.fspath(path))
    except OSError as error:
        raise ConnectionLost(f"cannot connect to {os.fspath(path)}: {error.strerror or error}") from error
    async with stream:
        yield AdminClient(stream, Lines(partial(stream.receive_some, _CHUNK), _LARGEST))


def announced_sockets(group: str | None = None) -> list[Path]:
    """Return the sockets of this user's servers that run, or of one group, and remove what ended ones have left."""
    found = []
    for path in sorted(registry().glob("*.sock" if group is None else f"*-{group}.sock")):
        try:
            os.kill(int(path.name.partition(".")[0]), 0)
        except (ValueError, ProcessLookupError):
            with suppress(OSError):
                path.unlink()
        except PermissionError:
            pass  # the number is another user's process now
        else:
            found.append(path)
    return found
