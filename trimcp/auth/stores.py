"""Where logins are kept: in memory, in a file, in the system's keyring, or wherever a program likes."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import trio

from trimcp.auth.credentials import Credentials, StoreKey
from trimcp.auth.metadata import json_object
from trimcp.errors import AuthorizationError
from trimcp.support.cleaning import one_line
from trimcp.support.files import MissingFile, UnusableFile, advice, read_file, replace_file

_SERVICE: Final = "trimcp"
_LOCK_SECONDS: Final = 10.0


class CredentialStore(ABC):
    """Keeps credentials, one for each key. Implement it to keep them elsewhere; no method may log what it is given."""

    @abstractmethod
    async def load(self, key: StoreKey) -> Credentials | None:
        """Return what is kept under this key, or None."""

    @abstractmethod
    async def save(self, key: StoreKey, credentials: Credentials) -> None:
        """Keep these in place of what was kept under this key."""

    @abstractmethod
    async def remove(self, key: StoreKey) -> bool:
        """Forget what is kept under this key; return whether there was something."""

    @abstractmethod
    async def keys(self) -> list[StoreKey]:
        """Return all keys under which something is kept."""

    @abstractmethod
    def exclusively(self, key: StoreKey) -> AbstractAsyncContextManager[None]:
        """Return a context manager during which no other task or process gets or refreshes a token for this key.

        Waiting for it can be cancelled.
        """


class MemoryStore(CredentialStore):
    """Keeps credentials until the program ends."""

    def __init__(self) -> None:
        self._kept: dict[StoreKey, Credentials] = {}
        self._locks: defaultdict[StoreKey, trio.Lock] = defaultdict(trio.Lock)

    async def load(self, key: StoreKey) -> Credentials | None:
        return self._kept.get(key)

    async def save(self, key: StoreKey, credentials: Credentials) -> None:
        self._kept[key] = credentials

    async def remove(self, key: StoreKey) -> bool:
        return self._kept.pop(key, None) is not None

    async def keys(self) -> list[StoreKey]:
        return list(self._kept)

    @asynccontextmanager
    async def exclusively(self, key: StoreKey) -> AsyncIterator[None]:
        async with self._locks[key]:
            yield


def default_path() -> Path:
    """Return where the command keeps logins: `trimcp/credentials.json` where the system keeps data of programs.

    Raises:
        AuthorizationError: the system does not know whose programs these are.
    """
    try:
        if sys.platform == "win32":
            base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
        elif sys.platform == "darwin":
            base = Path.home() / "Library" / "Application Support"
        else:
            base = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    except RuntimeError:
        raise AuthorizationError("there is no home directory to keep logins in; set XDG_DATA_HOME or HOME") from None
    return base / "trimcp" / "credentials.json"


def keeps_logins() -> bool:
    """Return whether the command keeps any logins, or something stands in their place."""
    try:
        return os.path.lexists(default_path())
    except AuthorizationError:
        return False


class FileStore(CredentialStore):
    """Keeps credentials in a file that only its owner can read (0600), shared by all processes that use it.

    It is replaced as a whole, so that a process that is killed leaves the old one or the new one. On Windows the
    file has the access rights of its folder. Its methods raise AuthorizationError if it cannot be read or written, or
    is none of this class.

    Args:
        path: of the file; by default `default_path()`. Its folder is made, for the owner alone.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path: Path = default_path() if path is None else Path(path)
        self._warned = False
        self._locks: defaultdict[StoreKey, trio.Lock] = defaultdict(trio.Lock)

    async def load(self, key: StoreKey) -> Credentials | None:
        text = (await self._read()).get(_entry(key))
        return None if text is None else _read_credentials(text, self.path, key)

    async def save(self, key: StoreKey, credentials: Credentials) -> None:
        text = credentials.to_json()
        await trio.to_thread.run_sync(self._change, _entry(key), text)

    async def remove(self, key: StoreKey) -> bool:
        return await trio.to_thread.run_sync(self._change, _entry(key), None)

    async def keys(self) -> list[StoreKey]:
        return [key for entry in await self._read() if (key := _key(entry)) is not None]

    @asynccontextmanager
    async def exclusively(self, key: StoreKey) -> AsyncIterator[None]:
        # The system lets go of what a process held that has ended.
        digest = hashlib.sha256(_entry(key).encode()).hexdigest()[:16]
        async with self._locks[key]:
            lock = await trio.to_thread.run_sync(self._lock, f".{self.path.name}.{digest}.lock")
            while not lock.is_locked:
                await trio.to_thread.run_sync(_try_lock, lock)
                if not lock.is_locked:
                    await trio.sleep(0.1)  # another process has it, and the system tells nobody when it lets go
            try:
                yield
            finally:
                lock.release()

    async def _read(self) -> dict[str, str]:
        return await trio.to_thread.run_sync(self._entries)

    def _entries(self) -> dict[str, str]:
        try:
            said = json_object(read_file(self.path, "the logins", secret=not self._warned, regular=True)) or {}
        except MissingFile:
            return {}
        except UnusableFile as error:
            raise AuthorizationError(str(error)) from None
        self._warned = True
        kept = said.get("logins")
        if not isinstance(kept, dict) or not all(isinstance(text, str) and _key(name) for name, text in kept.items()):
            raise AuthorizationError(f"{self.path} does not hold logins of trimcp; move it away to begin anew")
        return kept

    def _lock(self, name: str) -> Any:
        """Return a lock of this name beside the file, which nobody holds yet."""
        from filelock import FileLock

        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise AuthorizationError(f"{self.path.parent} cannot be made: {advice(error)}") from None
        return FileLock(self.path.with_name(name), thread_local=False, mode=0o600)

    def _change(self, entry: str, text: str | None) -> bool:
        lock = self._lock(f".{self.path.name}.lock")
        # Whoever has it only reads and writes the file, unless the system has stopped it.
        if not _try_lock(lock, _LOCK_SECONDS):
            raise AuthorizationError(f"{self.path} is locked by another process; end it, and try again")
        try:
            entries = self._entries()
            there = entry in entries
            if text is not None:
                entries[entry] = text
            elif there:
                del entries[entry]
            else:
                return False
            replace_file(self.path, json.dumps({"logins": entries}, indent=1).encode())
        except OSError as error:
            raise AuthorizationError(f"{self.path} cannot be written: {advice(error)}") from None
        finally:
            lock.release()
        return there


class KeyringStore(CredentialStore):
    """Keeps credentials in the keyring of the system, by the `keyring` package, and their keys in a file.

    Its methods raise AuthorizationError if the keyring is locked or missing, or holds something else.

    Args:
        path: of the file that names what there is and holds no secret; by default beside `default_path()`.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        try:
            self._keyring: Any = importlib.import_module("keyring")  # it is not ours to install
        except ImportError:
            raise AuthorizationError(
                'logins are kept in the keyring with: pip install "trimcp[auth]" keyring'
            ) from None
        self._index = FileStore(default_path().with_name("keyring.json") if path is None else path)

    async def load(self, key: StoreKey) -> Credentials | None:
        text = await self._ask("get_password", key)
        return None if text is None else _read_credentials(text, "the keyring", key)

    async def save(self, key: StoreKey, credentials: Credentials) -> None:
        # First its name: of a secret that nobody knows of nobody could log out.
        await trio.to_thread.run_sync(self._index._change, _entry(key), "")
        await self._ask("set_password", key, credentials.to_json())

    async def remove(self, key: StoreKey) -> bool:
        there = await self._ask("get_password", key) is not None
        if there:
            await self._ask("delete_password", key)
        await trio.to_thread.run_sync(self._index._change, _entry(key), None)
        return there

    async def _ask(self, what: str, key: StoreKey, *args: str) -> str | None:
        function = getattr(self._keyring, what)
        try:
            found: str | None = await trio.to_thread.run_sync(function, _SERVICE, _entry(key), *args)
        except Exception as error:  # of any backend
            why = one_line(str(error)) or type(error).__name__
            raise AuthorizationError(f"the keyring cannot be used: {why}; unlock it, or use FileStore") from None
        return found

    async def keys(self) -> list[StoreKey]:
        return await self._index.keys()

    def exclusively(self, key: StoreKey) -> AbstractAsyncContextManager[None]:
        return self._index.exclusively(key)


def _try_lock(lock: Any, seconds: float = 0) -> bool:
    """Take a lock, and return whether that was possible."""
    from filelock import Timeout

    try:
        lock.acquire(timeout=seconds)
    except Timeout:
        return False
    except (OSError, NotImplementedError) as error:
        raise AuthorizationError(f"{lock.lock_file} cannot be locked: {advice(error)}") from None
    return True


def _entry(key: StoreKey) -> str:
    return json.dumps([key.resource, key.identity])


def _key(entry: str) -> StoreKey | None:
    """Return the key of an entry, or None if it is none."""
    try:
        resource, identity = json.loads(entry)
        return StoreKey(resource, identity) if isinstance(identity, str) else None
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None


def _read_credentials(text: str, where: object, key: StoreKey) -> Credentials:
    try:
        return Credentials.from_json(text)
    except ValueError as error:
        raise AuthorizationError(f"{where}: {error}; log in again: trimcp login {key.resource}") from None
