"""Files that a user names: read whole and bounded, or claimed for one process, as SQLite's are."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final

from trimcp.errors import LocalError
from trimcp.support.cleaning import one_line

_MOST: Final = 16 * 1024 * 1024
_BINARY: Final = getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)

_log = logging.getLogger("trimcp.support.files")


class UnusableFile(LocalError, OSError):
    """A file cannot be read, written or claimed; the text names it and says what to do."""


class WrongFile(UnusableFile, ValueError):
    """A file is of another kind than it should be, or damaged. It was not changed."""


class MissingFile(UnusableFile, FileNotFoundError):
    """There is no such file, or no folder for it."""


def read_file(path: str | os.PathLike[str], what: str, *, secret: bool = False, regular: bool = False) -> bytes:
    """Return what is in a file, of at most 16 MiB.

    Raises UnusableFile: it cannot be read, or is too large; `MissingFile` where there is none.

    Args:
        path: of the file. A pipe is read to its end, as of a shell's `<(...)`.
        what: what should be in it, for errors, such as "the tokens", or "".
        secret: it holds secrets: warn where others than its owner may read or change it.
        regular: refuse pipes and devices.
    """
    path = Path(path)
    try:
        # A pipe that nobody writes to would be waited for, unless it is refused below.
        descriptor = os.open(path, os.O_RDONLY | _BINARY | (getattr(os, "O_NONBLOCK", 0) if regular else 0))
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if regular and stat.S_ISDIR(status.st_mode) == stat.S_ISREG(status.st_mode):
                raise UnusableFile(f"cannot read {_named(what, path)}: it is no file; move it away")
            if secret:
                _warn(path, status)
            data = file.read(_MOST + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, UnusableFile):
            raise
        raise _kind(error)(f"cannot read {_named(what, path)}: {advice(error)}") from error
    if len(data) > _MOST:
        raise WrongFile(
            f"cannot read {_named(what, path)}: it is larger than {_MOST // 1024 // 1024} MiB; name another file"
        )
    return data


def replace_file(path: Path, data: bytes, *, keep_mode: bool = False) -> None:
    """Put a file with these bytes in the place of another, as a whole or not at all.

    It is its owner's alone (0600), or with `keep_mode` has the permissions of the one that it replaces. Raises OSError:
    it cannot be written; then nothing is left of it.
    """
    import tempfile  # few programs write such files

    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # nobody else's from the beginning
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if keep_mode and path.exists():
            os.chmod(name, stat.S_IMODE(path.stat().st_mode))
        os.replace(name, path)
    except BaseException:  # a full disk or an interrupt: half a file, perhaps of secrets, does not stay
        Path(name).unlink(missing_ok=True)
        raise


def read_text(path: str | os.PathLike[str], what: str, *, secret: bool = False) -> str:
    """Return the text in a file, which is UTF-8, perhaps with a byte order mark; see `read_file`.

    Raises UnusableFile: it cannot be read. Raises WrongFile: it is no UTF-8; the error does not quote it.
    """
    try:
        return read_file(path, what, secret=secret).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise WrongFile(f"cannot read {_named(what, path)}: it is not UTF-8; save it as text in UTF-8") from None


def _named(what: str, path: Path | str | os.PathLike[str]) -> str:
    shown = one_line(str(path), 4_000)
    return f"{what} from {shown}" if what else shown


def _kind(error: Exception) -> type[UnusableFile]:
    return MissingFile if isinstance(error, FileNotFoundError) else UnusableFile


def advice(error: Exception) -> str:
    """Return what is wrong with a file and what to do about it, in a few words."""
    match error:
        case FileNotFoundError():
            return "No such file or directory; check the path"
        case IsADirectoryError() | NotADirectoryError():
            return "it is a folder, or not in one; name a file"
        case PermissionError():
            return "Permission denied; give it to the user who runs this"
        case OSError(strerror=str(why)):
            return f"{why}; check the path and the disk"
        case _:
            return f"{one_line(str(error))}; check the path"


def _warn(path: Path, status: os.stat_result) -> None:
    """Say that a file with secrets is not its owner's alone."""
    if os.name != "posix" or not stat.S_ISREG(status.st_mode):
        return
    if status.st_mode & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        _log.warning("others can read or change the secrets in %s (mode %03o): chmod 600 %s", path, mode, path)
    elif status.st_uid not in (0, os.geteuid()):
        _log.warning("the secrets in %s belong to another user, who can read and change them", path)


def claim_file(path: Path, *, fits: Callable[[bytes], bool], wrong: str, busy: str, shared: bool = False) -> int:
    """Open a file for this process alone, making it if need be; return a descriptor that holds the lock.

    With `shared` others may have it that claim it so, too.

    Whoever closes the descriptor gives the file up. It becomes its owner's alone (0600).

    A link is not followed: where others can write, it could name another file. `fits` tells whether the first hundred
    bytes, or none, are of the right kind of file. Raises WrongFile with the text `wrong` if they are not: the file was
    not changed. Raises UnusableFile: it cannot be opened, or another process has it (`busy`).
    """
    flags = os.O_RDWR | os.O_CREAT | _BINARY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        descriptor = os.open(path, flags, 0o600)
    except (OSError, ValueError) as error:
        raise _kind(error)(f"cannot use {one_line(str(path))!r}: {advice(error)}") from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise WrongFile(wrong)
        try:
            import fcntl
        except ImportError:  # Windows, where a file that another process has open cannot be replaced anyway
            pass
        else:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        if not fits(os.read(descriptor, 100)):
            raise WrongFile(wrong)
        if os.name == "posix":
            os.fchmod(descriptor, 0o600)
    except BaseException as error:  # an interrupt too: the descriptor holds the lock
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise UnusableFile(busy) from error
        if isinstance(error, OSError) and not isinstance(error, UnusableFile):
            raise UnusableFile(f"cannot use {str(path)!r}: {advice(error)}") from error
        raise
    return descriptor
