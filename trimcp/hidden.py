"""Finds, shows or removes text that a person cannot see but that a model or a terminal reads.

Names, descriptions and results come from peers that may be hostile. Invisible characters can carry instructions to a
model that its user does not see. Direction overrides make text look like other text. Escape sequences move a
terminal's cursor. Every pattern here is bounded: the running time is proportional to the length of the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

import attrs

from trimcp.support.slotted import valued

__all__ = ["HiddenText", "hidden_text", "show_hidden", "strip_hidden"]

# Several scripts and many emoji need a joiner between two characters beyond ASCII.
_PLAIN: Final = r"[^\x00-\x7f\u200b-\u200f\u2060-\u2064\ufeff\U000e0000-\U000e01ef]"
_HIDDEN: Final = re.compile(
    r"(?P<escape>(?:\x1b\[|\x9b)[0-?]{0,64}[ -/]{0,16}[@-~]?"
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c]{0,4096}(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b(?:[ -/]{0,16}[0-~])?)"
    r"|(?P<control>[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\ufff9-\ufffb]|\r(?!\n))"
    r"|(?P<direction>[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069])"
    r"|(?P<tag>[\U000e0000-\U000e007f]{1,4096})"
    rf"|(?P<invisible>[\u200b\u2060-\u206f\ufeff\u180e\u00ad\u115f\u1160\u3164\uffa0\U000e0100-\U000e01ef]"
    rf"|(?<![\ufe00-\ufe0f])[\ufe00-\ufe0f](?=[\ufe00-\ufe0f])|(?<=[\ufe00-\ufe0f])[\ufe00-\ufe0f]"
    rf"|(?<!{_PLAIN})[\u200c\u200d]|[\u200c\u200d](?!{_PLAIN}))"
)

_MOST_ROUNDS: Final = 4  # of removing what appears once other text is removed; after that, each character is checked


@attrs.frozen
@valued
class HiddenText:
    """One piece of text that a person cannot see.

    Attributes:
        kind: "escape" (a terminal's control sequence), "control" (other control characters), "direction" (changes the
            direction of writing), "tag" (invisible letters) or "invisible" (zero width, or a filler).
        at: index of its first character.
        text: the characters; for tags, the letters that they encode.
    """

    kind: str
    at: int
    text: str


def hidden_text(text: str) -> list[HiddenText]:
    """Return every piece of a text that a person cannot see, in order; empty if there is none.

    Line ends and tabs are not hidden text, nor are joiners that a script or an emoji needs. Check the names and
    descriptions of an untrusted server with it before you pass them to a model.

    Args:
        text: a peer's text, such as a tool's description.
    """
    return list(_find(text))


def _find(text: str) -> Iterator[HiddenText]:
    if text.isascii() and text.isprintable():
        return
    for match in _HIDDEN.finditer(text):
        kind, found = match.lastgroup or "", match[0]
        if kind == "tag":
            found = "".join(chr(ord(letter) - 0xE0000) for letter in found)
        yield HiddenText(kind, match.start(), found)


def strip_hidden(text: str) -> str:
    """Return a text without the parts that a person cannot see. Visible text is not changed."""
    if text.isascii() and text.isprintable():
        return text
    # Removed text may have separated two halves of another piece.
    for _ in range(_MOST_ROUNDS):
        shorter = _HIDDEN.sub("", text)
        if shorter == text:
            return text
        text = shorter
    return "".join(character for character in text if not _HIDDEN.match(character))


def show_hidden(text: str) -> str:
    """Return a text in which each hidden character is replaced by its code point, such as `<U+202E>`."""
    if text.isascii() and text.isprintable():
        return text
    return _HIDDEN.sub(lambda match: "".join(f"<U+{ord(character):04X}>" for character in match[0]), text)
