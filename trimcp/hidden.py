"""Text that a person does not see and a model or a terminal does: found, shown, or taken out.

Names, descriptions and results come from peers that may be hostile. Characters without a shape can carry orders to a
model past its user's eyes, those that turn the direction of writing make text look like another, and escape sequences
move a terminal's cursor. Every pattern here is bounded: no text takes longer than its length.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

import attrs

from trimcp.values import valued

__all__ = ["HiddenText", "hidden_text", "show_hidden", "strip_hidden"]

# A joiner between two characters beyond ASCII is how several scripts and many pictures are written.
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

_MOST_ROUNDS: Final = 4  # of taking out what only shows once something else is gone; then each character is looked at


@attrs.frozen
@valued
class HiddenText:
    """One piece of text that is not seen.

    Attributes:
        kind: "escape" (a terminal's control sequence), "control" (other control characters), "direction" (turns the
            direction of writing), "tag" (letters without a shape) or "invisible" (no width, or a filler).
        at: where it begins.
        text: what stands there; for tags the letters they stand for.
    """

    kind: str
    at: int
    text: str


def hidden_text(text: str) -> list[HiddenText]:
    """Return every piece of a text that is not seen, in its order; an empty list for an honest text.

    Line ends and tabs are no hidden text, nor are joiners where a script or a picture needs them. Look at names and
    descriptions of a server you do not trust before you show them to a model.

    Args:
        text: of a peer, such as a tool's description.
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
    """Return a text without what is not seen. What can be seen stays as it is."""
    if text.isascii() and text.isprintable():
        return text
    # What was taken out may have stood between the halves of another piece.
    for _ in range(_MOST_ROUNDS):
        shorter = _HIDDEN.sub("", text)
        if shorter == text:
            return text
        text = shorter
    return "".join(character for character in text if not _HIDDEN.match(character))


def show_hidden(text: str) -> str:
    """Return a text in which each character that is not seen is shown as its number, such as `<U+202E>`."""
    if text.isascii() and text.isprintable():
        return text
    return _HIDDEN.sub(lambda match: "".join(f"<U+{ord(character):04X}>" for character in match[0]), text)
