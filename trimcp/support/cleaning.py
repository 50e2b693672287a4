"""Makes text from peers safe to log and keep: masks secrets, cuts long strings, escapes control characters.

Traces, audits and security events use it for all that they write. It handles JSON values, not messages.
"""

from __future__ import annotations

import hashlib
import logging
import re
import traceback
import unicodedata
from collections.abc import Mapping
from typing import Any, Final

MASK: Final = "***"
"""The text that replaces a secret."""

_LONGEST: Final = 300  # characters
_LONGEST_FIELD: Final = 200
_LONGEST_QUOTED: Final = 100
_MOST_SHAPES: Final = 32
_SECRET: Final = re.compile(
    r"authorization|cookie|passw(or)?d|passphrase|secret|credential|(api|access|private)[-_]?key"
    r"|request[-_]?state|^pwd$|token(?!s)",
    re.IGNORECASE,
)
_NO_SECRET: Final = frozenset({"progresstoken", "progress_token"})
_IN_TEXT: Final = re.compile(
    r"([?&](?:[\w.-]*(?:token|key|secret|password)|code|state|sig|signature)=|"
    r"(?P<header>authorization[\"']?[:=\s]{1,4}[\"']?)?\b(?P<scheme>bearer|basic)\s+)(?P<word>[^\s&#\"']+)",
    re.IGNORECASE,
)
# What may follow a scheme in a sentence. A token of lower-case letters alone is short only if somebody made it up.
_PROSE: Final = re.compile(r"[a-z]{1,15}[.,;:!?)]*")
_NAMED: Final = re.compile(
    r"(auth|authentication|authorization|challenge|credentials|error|headers?|is|not|or|scheme|tokens?|was)\b"
)
_KINDS: Final = {bool: "boolean", int: "number", float: "number", type(None): "null"}

# Control characters could move the cursor, overwrite earlier text or paste into the shell. Format characters (such as
# bidirectional overrides) could make the text look different. Line separators could fake log lines.
_HIDDEN: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Zl", "Zp"})


def mask(value: Any, key: str = "") -> Any:
    """Return a JSON value with secrets replaced by "***" and long strings cut.

    A secret is any value except an object under a key that names one (authorization, token, password, requestState,
    ...), and inside any string what follows "Bearer" or a query parameter such as `token=`.
    """
    if isinstance(value, Mapping):
        return {name: mask(member, name) for name, member in value.items()}
    if names_a_secret(key) and value is not None and not isinstance(value, bool):
        return MASK
    if isinstance(value, list):
        return [mask(member) for member in value]
    if isinstance(value, str):
        return shorten(mask_text(value[: 2 * _LONGEST]), len(value))
    return value


def mask_text(text: str) -> str:
    """Return a text with "***" for what follows "Bearer" or a query parameter such as `token=`. Nothing is cut.

    Words of a sentence stay, as in "the bearer is not valid"; in a header, or alone, whatever follows is a secret.
    """
    return _IN_TEXT.sub(_masked, text)


def _masked(found: re.Match[str]) -> str:
    scheme, word = found["scheme"], found["word"]
    in_text = found["header"] is None
    alone = found.start() == 0 and found.end() == len(found.string.rstrip())
    # With a capital it is the scheme's name, as in a header that somebody quotes: few words follow that in a sentence.
    if scheme and in_text and not alone and _PROSE.fullmatch(word) and (scheme.islower() or _NAMED.match(word)):
        return found[0]
    return f"{found[1]}{MASK}"


def names_a_secret(key: str) -> bool:
    """Return whether the value under this key is treated as a secret."""
    return bool(_SECRET.search(key)) and key.lower() not in _NO_SECRET


def shorten(text: str, length: int | None = None) -> str:
    """Return at most the first 300 characters of a text. If cut, its length is appended (`length`, if given)."""
    length = len(text) if length is None else length
    return text if length <= _LONGEST else f"{text[:_LONGEST]}... ({length} characters)"


def shapes(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return the type and size of each argument, without its content.

    At most 32 are listed; the key "..." counts the others.
    """
    found = {harmless(name): _shape(arguments[name]) for name, _ in zip(arguments, range(_MOST_SHAPES), strict=False)}
    if len(arguments) > _MOST_SHAPES:
        found["..."] = f"{len(arguments) - _MOST_SHAPES} more"
    return found


def _shape(value: Any) -> str:
    if isinstance(value, str):
        return f"string({len(value)})"
    if isinstance(value, list):
        return f"array({len(value)})"
    if isinstance(value, Mapping):
        return f"object({len(value)})"
    return _KINDS.get(type(value), type(value).__name__)


def harmless(text: str, longest: int = _LONGEST_FIELD) -> str:
    """Return text that is safe in a log field: ASCII, without control characters and quotes, of bounded length."""
    if len(text) > longest:
        text = text[:longest] + "..."
    if text.isascii() and text.isprintable() and '"' not in text and "\\" not in text:
        return text
    return text.encode("unicode_escape").decode("ascii").replace('"', "\\x22")


def in_quotes(value: Any) -> str:
    """Return a peer's text in quotes: ASCII, escaped and cut to 200 characters."""
    shown = ascii(value if not isinstance(value, str) else value[:_LONGEST_QUOTED])
    return shown if len(shown) <= 2 * _LONGEST_QUOTED else f"{shown[: 2 * _LONGEST_QUOTED]}..."


def clean(text: str) -> str:
    """Return text with every character that could control a terminal made visible; line ends and tabs stay."""
    if text.isascii():
        return text if text.isprintable() else text.replace("\r\n", "\n").translate(_VISIBLE_ASCII)
    return "".join(_visible(character) for character in text.replace("\r\n", "\n"))


def _visible(character: str) -> str:
    if character in "\n\t" or unicodedata.category(character) not in _HIDDEN:
        return character
    return character.encode("unicode_escape").decode("ascii")


_VISIBLE_ASCII: Final[dict[int, str]] = {
    code: _visible(chr(code)) for code in range(128) if _visible(chr(code)) != chr(code)
}


def one_line(text: str, width: int = 200) -> str:
    """Return text as one line of at most `width` characters, with characters that control a terminal made visible."""
    line = " ".join(clean(text[: 4 * width]).split())
    return line if len(line) <= width else line[: width - 1] + "…"


def traceback_text(error: BaseException) -> str:
    """Return an exception's traceback for a log, in which exception texts cannot imitate log lines.

    Exception texts may quote peers. So their second and later lines begin with "    | ", and control characters are
    escaped. Where Python cannot write it, as of an exception with a `__getattr__` that fails, it has only the type and
    the lines.
    """
    try:
        text = _told(error)
    except Exception as failure:  # of a user's class: a crash must not cost more because nobody can print it
        where = "".join(traceback.format_tb(error.__traceback__))
        text = f"{where}{type(error).__qualname__}: <its traceback cannot be written: {type(failure).__qualname__}>"
    return clean(text).rstrip("\n")


def _told(error: BaseException) -> str:
    told: Any = traceback.TracebackException(type(error), error, error.__traceback__, compact=True)
    waiting = [told]
    while waiting:
        one = waiting.pop()
        for name in ("_str", "msg"):  # what `format` writes; the first has no public name
            if isinstance(text := getattr(one, name, None), str):
                setattr(one, name, _quoted(text))
        if isinstance(notes := getattr(one, "__notes__", None), list | tuple):
            one.__notes__ = [_quoted(note) if isinstance(note, str) else note for note in notes]
        waiting += [each for each in (one.__cause__, one.__context__, *(one.exceptions or ())) if each is not None]
    return "".join(told.format())


def _quoted(text: str) -> str:
    return clean(text).replace("\n", "\n    | ")


def log_crash(
    logger: logging.Logger,
    error: BaseException,
    message: str,
    *args: object,
    level: int = logging.ERROR,
    extra: Mapping[str, object] | None = None,
) -> None:
    """Log an exception that ends here with its traceback, in which no text can imitate a log line.

    Every traceback in a log of this package is written by this: an exception's text may quote a peer.

    `message`, `args`, `extra`: what failed, as for `logger.log`.
    """
    if not logger.isEnabledFor(level):
        return
    file, line, function, _ = logger.findCaller(stacklevel=2)
    told = (type(error), error, error.__traceback__)
    record = logger.makeRecord(logger.name, level, file, line, message, args, told, function, extra)
    record.exc_text = traceback_text(error)  # formatters use this instead of their own
    logger.handle(record)


def digest(secret: str) -> str:
    """Return twelve hexadecimal digits that identify a secret in a log without revealing it."""
    return hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest()[:12]
