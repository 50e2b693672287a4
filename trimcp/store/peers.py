"""A file that processes share. They wake each other by Unix datagrams that say "look"; the file has all the rest."""

from __future__ import annotations

import os
import secrets
import socket
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import ClassVar, Final

import attrs
import trio

from trimcp.store.database import Database, FileKind
from trimcp.support.files import UnusableFile, advice

_LOOK: Final = b"!"
_AT_ONCE: Final = 1_000  # datagrams taken in one turn; more say nothing more


class FilePeers:
    """The processes on one file, this one among them: each has a socket in a folder beside the file.

    A datagram that finds a full queue is no loss: those before it say the same. A process that was killed leaves its
    socket, which the next one to wake it removes.

    Raises:
        UnusableFile: the folder cannot be used, or others may write there.
    """

    def __init__(self, path: Path) -> None:
        folder = Path(f"{path}-peers")
        try:
            folder.mkdir(0o700, exist_ok=True)
            self._folder: int = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise UnusableFile(f"cannot use {str(folder)!r}: {advice(error)}") from error
        try:
            status = os.fstat(self._folder)
            if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
                raise UnusableFile(f"others may write to {str(folder)!r}: remove it")
            # A path of Linux, since that of a socket has 107 bytes at most.
            shown = f"/proc/self/fd/{self._folder}"
            self._prefix: str = shown if os.path.isdir(shown) else str(folder)
            self.name: str = f"{os.getpid()}-{secrets.token_hex(8)}"
            self._socket: socket.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                self._socket.setblocking(False)
                self._socket.bind(f"{self._prefix}/{self.name}")
            except OSError as error:
                self._socket.close()
                raise UnusableFile(f"cannot make a socket in {str(folder)!r}: {advice(error)}") from error
        except BaseException:  # an interrupt too
            os.close(self._folder)
            raise
        self.alone: bool = True  # whether no other was there when this was found out last
        self.wake()

    def wake(self) -> None:
        """Have all others look. Never waits: one that does not read has been told."""
        others = 0
        for name in os.listdir(self._folder):
            if name != self.name and self.wake_one(name):
                others += 1
        self.alone = not others

    def wake_one(self, name: str) -> bool:
        """Have another one look, and return whether it is there: its process has not ended."""
        try:
            self._socket.sendto(_LOOK, f"{self._prefix}/{name}")
        except (ConnectionRefusedError, FileNotFoundError):
            with suppress(OSError):
                os.unlink(name, dir_fd=self._folder)
            return False
        except OSError:  # its queue is full
            pass
        return True

    @property
    def woken(self) -> bool:
        """Whether another has said to look."""
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except OSError:  # nothing to read
            return False
        return True

    def clear(self) -> None:
        """Take what was said. Look afterwards: what is said from now on counts again."""
        self.alone = False  # for the time being: one of them has spoken
        with suppress(OSError):
            for _ in range(_AT_ONCE):
                self._socket.recv(1)

    async def wait(self) -> None:
        """Wait until another says to look."""
        await trio.lowlevel.wait_readable(self._socket)

    def close(self) -> None:
        trio.lowlevel.notify_closing(self._socket)
        self._socket.close()
        with suppress(OSError):
            os.unlink(self.name, dir_fd=self._folder)
        os.close(self._folder)


@attrs.define(eq=False)
class SharedFile:
    """A store in an SQLite file, and the other processes on it, where the system has sockets for that."""

    path: Path = attrs.field(converter=Path)
    _database: Database | None = attrs.field(init=False, default=None)
    _peers: FilePeers | None = attrs.field(init=False, default=None)
    _kind: ClassVar[FileKind]

    @asynccontextmanager
    async def _used(self, end: Callable[[Database], object] = Database.close) -> AsyncIterator[Database]:
        """Keep the file open while the block runs; `end` closes it, in a thread.

        Raises:
            OSError: it cannot be opened, or another store of this process has it; where it cannot be shared (Windows),
                another process.
            ValueError: it is another kind of file, which was not changed.
        """
        self._database = database = await trio.to_thread.run_sync(Database, self.path, self._kind)
        try:
            self._peers = FilePeers(self.path) if self._kind.shared else None
            yield database
        finally:
            self._database, peers, self._peers = None, self._peers, None
            # A thread that has the file cannot be given up: its lock would stay until the process ends.
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(end, database)
            if peers is not None:
                peers.close()

    @property
    def _open(self) -> Database:
        if self._database is None:
            raise OSError(f"the {self._kind.what} in {str(self.path)!r} are not open")
        return self._database

    async def _wait_woken(self) -> None:
        """Wait until another says to look; for ever where the system has no sockets for it."""
        if self._peers is None:
            await trio.sleep_forever()
        else:
            await self._peers.wait()

    def _clear(self) -> None:
        """Take what others said; see `FilePeers.clear`."""
        if self._peers is not None:
            self._peers.clear()

    def _wake(self) -> None:
        """Have the others look."""
        if self._peers is not None:
            self._peers.wake()
