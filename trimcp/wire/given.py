"""What authors write for texts, icons, annotations and `_meta`: checked where it is written, not when a list is sent.

A payload may also be written as a dict with the names of the wire, as the specification and its examples do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeVar

from trimcp.errors import LocalError
from trimcp.wire.common import Icon, Implementation
from trimcp.wire.converter import WireError, converter_for
from trimcp.wire.fields import attributes, known_names, wire_name
from trimcp.wire.input_requests import FormSchema
from trimcp.wire.jsonrpc import Unencodable, encode
from trimcp.wire.revisions import LATEST

T = TypeVar("T")

_EXAMPLES: Final = {
    "ToolAnnotations": '{"readOnlyHint": True}',
    "Annotations": '{"audience": ["user"], "priority": 0.5}',
    "Icon": '{"src": "https://example.com/icon.png"}',
}


def given_name(name: str, value: Any) -> str:
    """Return a text that an author has to give, which may be "". Raises TypeError for anything else."""
    if not isinstance(value, str):
        raise TypeError(f"{name} is a text, not {value!r:.60}")
    given_text(name, value)
    return value


def given_text(name: str, value: Any) -> str | None:
    """Return a text that an author gave for a member; None for None and "". Raises TypeError for anything else."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise TypeError(f"{name} is a text, not {value!r:.60}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise TypeError(f"{name} is a text that cannot be sent: it has a lone surrogate") from None
    return value or None


def given_payload(name: str, value: Any, cls: type[T]) -> T:
    """Return the payload that an author gave, as such or as a dict with the names of the wire.

    Raises TypeError: it is neither, or a member is unknown or has the wrong type.
    """
    converter = converter_for(LATEST)
    raw = value
    try:
        if isinstance(value, cls):
            raw = converter.dump(value)
        elif not isinstance(value, Mapping):
            raise TypeError(f"{name} is {cls.__name__}(...) or a dict such as {_example(cls)}, not {value!r:.60}")
        for member in raw:
            if member not in known_names(cls):
                raise TypeError(f"{name} has no {member!r:.60}; {_nearest(cls, member)}")
        loaded: T = converter.load(dict(raw), cls)
        encode(converter.dump(loaded))
        return loaded
    except (WireError, Unencodable) as error:
        raise TypeError(f"{name}: {error}, as in {_example(cls)}") from None


def _example(cls: type) -> str:
    return _EXAMPLES.get(cls.__name__, "{...}")


def _nearest(cls: type, member: object) -> str:
    ours = {attribute.name: wire_name(attribute) for attribute in attributes(cls)}
    if member in ours:
        return f"in a dict it is {ours[str(member)]!r}"
    return f"there are {', '.join(ours.values())}"


def given_form(schema: Mapping[str, Any]) -> FormSchema:
    """Return the form that an author gave as a JSON Schema. Raises TypeError: it asks for more than flat values."""
    try:
        return converter_for(LATEST).load(dict(schema), FormSchema)
    except WireError as error:
        raise TypeError(f"a form may only ask for flat values: {error}") from None


def given_icons(name: str, value: Any) -> list[Icon] | None:
    """Return the icons that an author gave, each as `given_payload`; None for none."""
    if value is None:
        return None
    if isinstance(value, str | Mapping) or not hasattr(value, "__iter__"):
        raise TypeError(f"{name} is a list of icons, such as [{_example(Icon)}], not {value!r:.60}")
    return [given_payload(f"{name}[{place}]", icon, Icon) for place, icon in enumerate(value)] or None


def given_implementation(name: Any, version: Any, icons: Any, **texts: Any) -> Implementation:
    """Return what a program says of itself. Raises TypeError: a text or an icon is none."""
    return Implementation(
        name=given_name("name", name),
        version=given_name("version", version),
        icons=given_icons("icons", icons),
        **{member: given_text(member, text) for member, text in texts.items()},
    )


def given_settings(name: str, value: Any) -> dict[str, dict[str, Any]] | None:
    """Return settings by the identifier of an extension; None for none. Raises TypeError if they are no objects."""
    for id, settings in (given_meta(name, value) or {}).items():
        if not isinstance(settings, Mapping):
            raise TypeError(f"{name} has a dict of settings for each identifier, not {settings!r:.60} for {id!r:.60}")
    return None if value is None else {id: dict(settings) for id, settings in value.items()}


def given_meta(name: str, value: Any) -> dict[str, Any] | None:
    """Return the `_meta` that an author gave; None for none. Raises TypeError if it is no JSON object."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} is a dict of JSON values, not {value!r:.60}")
    try:
        encode(dict(value))
    except LocalError as error:
        raise TypeError(f"{name} is a dict of JSON values: {error}") from None
    return dict(value) or None
