"""SQLite files: claimed, opened, and worked on by one thread at a time.

Whatever goes wrong with a file or its disk is one `UnusableFile`, whose text names the file and says what to do.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import attrs
import trio

from trimcp.support.cleaning import one_line
from trimcp.support.files import UnusableFile, WrongFile, claim_file

T = TypeVar("T")


@attrs.frozen
class FileKind:
    """A kind of SQLite file: how it is told from others, and how it is made."""

    what: str  # it keeps, such as "contexts"
    mark: int  # `application_id` of such a file
    forms: tuple[str, ...]  # statements, each of which leads to the next form of the tables (`user_version`)
    pragmas: tuple[str, ...]
    temporary: bool = False  # emptied when it is opened, removed when it is closed

    @property
    def shared(self) -> bool:
        """Whether several processes may use one file at once."""
        return not self.temporary and os.name == "posix"


# In one statement, since another process may be making the file at this moment.
_KINDS: Final = (
    "SELECT application_id, user_version, (SELECT count(*) FROM sqlite_master) "
    "FROM pragma_application_id, pragma_user_version"
)
_WAIT: Final = 5.0  # seconds that a process waits for another's transaction
_BUSY: Final = 5  # SQLITE_BUSY
_used: Final[set[tuple[int, int]]] = set()  # device and number of the files that this process has open


def _place_of(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


@attrs.define(eq=False)
class Database:
    """An open file, for one thread at a time.

    The lock that `claim_file` takes is not SQLite's: a process loses that one when it closes any other descriptor of
    the file.

    Raises:
        UnusableFile: it cannot be opened, or another store has it.
        WrongFile: it is another kind of file, which was not changed.
    """

    path: Path
    kind: FileKind
    connection: Any = attrs.field(init=False)
    _turns: trio.CapacityLimiter = attrs.field(init=False, factory=lambda: trio.CapacityLimiter(1))
    _error: type[Exception] = attrs.field(init=False)
    _lock: int = attrs.field(init=False)
    _place: tuple[int, int] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        # Not imported at the top: some builds of Python lack it, and most servers do not need it.
        import sqlite3

        self._error = sqlite3.Error
        self._lock = self._claim()
        self._place = _place_of(os.fstat(self._lock))
        _used.add(self._place)
        try:
            with self.faults():
                self.connection = sqlite3.connect(
                    self.path, timeout=_WAIT, check_same_thread=False, isolation_level=None
                )
                try:
                    self._prepare()
                except BaseException:  # an interrupt too: the connection has the file open
                    self.connection.close()
                    raise
        except BaseException:  # an interrupt too: the file would stay claimed
            self._give_up()
            raise

    def _claim(self) -> int:
        """Open or make the file; return a descriptor that holds the lock until it is closed."""
        what, name, wrong = self.kind.what, repr(str(self.path)), self._wrong("it is no such database")
        busy = f"the {what} in {name} are in use by another process or store; each needs a file of its own"
        if self._find() in _used:
            raise UnusableFile(busy)  # a second descriptor would cost the first one its locks
        descriptor = claim_file(self.path, fits=self._fits, wrong=wrong, busy=busy, shared=self.kind.shared)
        if self.kind.temporary:
            os.ftruncate(descriptor, 0)  # SQLite discards the log beside an empty file
        return descriptor

    def _find(self) -> tuple[int, int] | None:
        """Return which file the path names now."""
        try:
            return _place_of(os.stat(self.path))
        except (OSError, ValueError):
            return None

    def _fits(self, head: bytes) -> bool:
        """Whether a file that begins like this is empty or may be ours; what others wrote is never emptied."""
        if not head or not head.startswith(b"SQLite format 3\0"):
            return not head
        return not self.kind.temporary or int.from_bytes(head[68:72], "big") == self.kind.mark

    def _wrong(self, why: str) -> str:
        return f"{str(self.path)!r} is no store of {self.kind.what}: {why}; name another file"

    def _prepare(self) -> None:
        kind = self.kind
        if not kind.shared:
            self.ask("PRAGMA locking_mode = EXCLUSIVE")
        mark, form, tables = self.connection.execute(_KINDS).fetchone()
        if mark != kind.mark and (mark or form or tables):
            raise WrongFile(self._wrong("it is a database of another program"))
        if form > len(kind.forms):
            raise WrongFile(self._wrong(f"a newer trimcp wrote it (form {form}; this one knows {len(kind.forms)})"))
        self._use_write_ahead_log()
        for pragma in kind.pragmas:
            self.ask(f"PRAGMA {pragma}")
        if form < len(kind.forms):
            with self.transaction():  # in which another process may have been before
                for statement in kind.forms[self.ask("PRAGMA user_version") :]:
                    for part in statement.split(";"):
                        self.ask(part)
                self.ask(f"PRAGMA user_version = {len(kind.forms)}")
                self.ask(f"PRAGMA application_id = {kind.mark}")

    def _use_write_ahead_log(self) -> None:
        """Have changes written to a log first, which others may be doing with the same file at this moment.

        SQLite waits for them, up to `_WAIT`, where a transaction begins, but not where the kind of log changes.
        """
        until = time.monotonic() + _WAIT
        while True:
            try:
                self.ask("PRAGMA journal_mode = WAL")
            except self._error as error:
                if getattr(error, "sqlite_errorcode", 0) & 0xFF != _BUSY or time.monotonic() > until:
                    raise
            else:
                return
            self.ask("BEGIN EXCLUSIVE")  # once nobody else reads or writes
            self.ask("COMMIT")

    def ask(self, statement: str, *values: object) -> Any:
        """Execute a statement, and return the first value of its first row, or None if it has none."""
        row = self.connection.execute(statement, values).fetchone()
        return None if row is None else row[0]

    @contextmanager
    def faults(self, *others: type[Exception]) -> Iterator[None]:
        """Raise an UnusableFile in place of SQLite's errors, and of `others`, which only a damaged file causes."""
        wrong: tuple[type[Exception], ...] = (self._error, UnicodeDecodeError, *others)  # SQLite's own texts, too
        try:
            yield
        except UnusableFile:
            raise
        except wrong as error:
            raise UnusableFile(
                f"cannot keep {self.kind.what} in {str(self.path)!r}: {one_line(str(error))}; {self._advice(error)}"
            ) from error

    def _advice(self, error: Exception) -> str:
        """Return what to do about an error, by SQLite's primary code for it."""
        match getattr(error, "sqlite_errorname", "").split("_")[:2]:
            case ["SQLITE", "FULL"]:
                return "free some space, and it goes on"
            case ["SQLITE", "BUSY" | "LOCKED"]:
                return "end the other program that has it open"
            case ["SQLITE", "READONLY" | "PERM" | "AUTH"]:
                return "give the file and its folder to the user who runs this"
            case ["SQLITE", "CORRUPT" | "NOTADB"] | [""]:
                return f"move it away with {self.path.name}-wal to begin anew"
            case _:
                return "check the disk"

    @contextmanager
    def transaction(self) -> Iterator[Any]:
        """Yield the connection, and commit what the block does with it, or undo all of it."""
        connection = self.connection
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield connection
            connection.execute("COMMIT")
        except BaseException:  # an interrupt too: what is half written is not left to the next write
            if connection.in_transaction:  # SQLite undoes it by itself after some errors
                connection.execute("ROLLBACK")
            raise

    async def read(self, function: Callable[[Database], T]) -> T:
        """Call a function that changes nothing, in a thread."""
        return await trio.to_thread.run_sync(self._read, function, limiter=self._turns)

    def _read(self, function: Callable[[Database], T]) -> T:
        with self.faults(ValueError, TypeError):
            return function(self)

    async def change(self, function: Callable[[Database], T]) -> T:
        """Call a function in a thread, and return its result once its changes are committed; all of them, or none."""
        return await trio.to_thread.run_sync(self._change, function, limiter=self._turns)

    def _change(self, function: Callable[[Database], T]) -> T:
        with self.faults(), self.transaction():
            self._check_there()
            return function(self)

    def _check_there(self) -> None:
        """Raise UnusableFile if the path names this file no more: what is written to it now is lost with it."""
        if self._find() != self._place:
            raise UnusableFile(f"{str(self.path)!r} was moved, replaced or deleted while it was in use; start again")

    def close(self) -> None:
        """Close it; then others may use it. A temporary one is removed."""
        self.connection.close()
        try:
            if self.kind.temporary:
                # On a full disk the write-ahead log may be left over.
                for path in (Path(f"{self.path}-wal"), self.path):
                    path.unlink(missing_ok=True)
        finally:
            self._give_up()

    def _give_up(self) -> None:
        os.close(self._lock)
        _used.discard(self._place)
