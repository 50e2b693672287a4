"""The options of tools, resources and prompts: which there are, and what each may be."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypedDict

from trimcp.session.limits import Quota
from trimcp.support.bounds import check_instance, check_members, check_number, check_truth
from trimcp.support.slotted import slotted
from trimcp.wire.common import Annotations, Icon
from trimcp.wire.given import given_icons, given_meta, given_payload, given_text
from trimcp.wire.tools import ToolAnnotations

if TYPE_CHECKING:
    from trimcp.guard.permission import Allow, Visible
    from trimcp.store.tasks import Restart

log: logging.Logger = logging.getLogger("trimcp.server")


class ListedOptions(TypedDict, total=False):
    """The options that tools, resources and prompts share, each with a default.

    Attributes:
        name: by default the function's, or the last part of a resource's URI.
        title: a display name.
        description: by default the docstring without its parameter section.
        icons: sent in the listing; each an `Icon` or a dict such as `{"src": "https://example.com/icon.png"}`.
        meta: sent in the listing as `_meta`.
        quota: how many calls may run at once, begin per second and wait; resources of one template share it. By default
            `Limits.tool`, `Limits.resource` or `Limits.prompt`.
        scopes: the scopes that a token needs, all of them; without them it is not listed either.
        allow: a sync or async function that allows or denies each request, or for a tool has the user asked.
        visible: a sync function of who asks (an `Admission`) that decides who sees it; for others it does not exist.
    """

    name: str | None
    title: str | None
    description: str | None
    icons: Iterable[Icon | Mapping[str, Any]] | None
    meta: Mapping[str, Any] | None
    quota: Quota | None
    scopes: Iterable[str]
    allow: Allow | None
    visible: Visible | None


def listed_members(options: Mapping[str, Any], name: str, description: str) -> dict[str, Any]:
    """Return the members common to all listings, from checked options and these defaults."""
    return {
        "name": options.get("name") or name,
        "title": options.get("title") or None,
        "description": options.get("description") or given_text("the docstring", description),
        "icons": options.get("icons") or None,
        "meta": options.get("meta") or None,
    }


def name_of(options: Mapping[str, Any], function_name: str, what: str) -> str:
    """Return the name of a tool or prompt: the option's, or its function's. Raises TypeError for a lambda's."""
    name: str = options.get("name") or function_name
    if name == "<lambda>":
        raise TypeError(f'a lambda has no name: give the {what} one, as by name="..."')
    return name


def check_options(options: Mapping[str, Any], known: type) -> dict[str, Any]:
    """Return the options, with payloads in place of dicts.

    Raises TypeError: one is not a key of the TypedDict (the text suggests the closest one), or its value is none that
    its list could have.
    """
    names = list(known.__annotations__)
    checked: dict[str, Any] = {}
    for name, value in options.items():
        if name not in names:
            from difflib import get_close_matches  # only needed for the error

            near = get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}"
            raise TypeError(f"there is no option {name!r}; {hint}")
        if name == "annotations":
            kind = Annotations if "mime_type" in names else ToolAnnotations  # resources have others than tools
            checked[name] = None if value is None else given_payload(name, value, kind)
        else:
            check = _CHECKS.get(name)
            checked[name] = value if check is None else check(name, value)
    return checked


def check_scopes(name: str, value: Any, wanted: str = "scopes, such as ['read']") -> tuple[str, ...]:
    """Return scopes, or other texts (`wanted`). Raises TypeError unless they are several texts."""
    return () if value is None else check_members(name, value, str, wanted)


def check_version(name: str, value: Any) -> str | None:
    """Return the version of a tool. Raises TypeError, ValueError: it is none."""
    if value is None or (isinstance(value, str) and 0 < len(value) <= 64 and value.isprintable() and "@" not in value):
        return value
    error = ValueError if isinstance(value, str) else TypeError
    raise error(f"{name} is a text of at most 64 characters without @, such as '2.1', not {value!r:.60}")


def check_quota(name: str, value: Any) -> Any:
    """Return a quota as given. Raises TypeError for anything else."""
    check_instance(name, value, Quota, "trimcp.Quota")
    return value


def check_schema(name: str, value: Any) -> Any:
    """Return a JSON Schema as given. Raises TypeError if it is no object; its keywords are checked later."""
    if value is not None and not isinstance(value, Mapping):
        raise TypeError(f"{name} is a JSON Schema, such as {{'type': 'object'}}, not {value!r:.60}")
    given_meta(name, value)  # it is sent as it is
    return value


def check_cache_scope(name: str, value: Any) -> Any:
    """Return for whom something may be cached. Raises TypeError: that is neither "public" nor "private"."""
    if value not in ("public", "private"):
        raise TypeError(f"{name} is 'public' or 'private', not {value!r:.60}")
    return value


_CHECKS: Final[dict[str, Callable[[str, Any], Any]]] = {
    **dict.fromkeys(("name", "title", "description", "mime_type"), given_text),
    "icons": given_icons,
    "meta": given_meta,
    "quota": check_quota,
    "scopes": check_scopes,
    "tags": partial(check_scopes, wanted="texts, such as ['admin']"),
    "version": check_version,
    **dict.fromkeys(("input_schema", "output_schema"), check_schema),
    "structured": check_truth,
    "confirm": partial(check_truth, optional=True),
    "size": partial(check_number, whole=True, zero=True, optional=True),
    "ttl_ms": partial(check_number, whole=True, zero=True),
    "cache_scope": check_cache_scope,
}
"""What checks an option; others are checked where they are used."""


def check_method(name: object, decorator: str, example: str) -> None:
    """Raise TypeError if a decorator was given no name, but for example the function."""
    if not isinstance(name, str):
        raise TypeError(f'{decorator} needs a name: @server.{decorator}("{example}"), not {name!r:.60}')


TaskMode: TypeAlias = Literal["allowed", "required", "never"]
"""Whether calls of a tool become tasks: those that take long, each, or none."""

_SOON: Final = 1.0  # seconds in which a call that may become a task is answered without one


@slotted(frozen=True)
class TaskRule:
    """How the calls of one tool become tasks."""

    required: bool
    after: float  # seconds in which its answer is the answer to the call
    restart: Restart


def task_rule(name: str, mode: object, after: float | None, restart: Any) -> TaskRule | None:
    """Return the rule that a tool's options make, or None if it never becomes a task. Raises TypeError, ValueError."""
    if mode not in ("allowed", "required", "never"):
        raise TypeError(f"task is 'allowed', 'required' or 'never', not {mode!r:.60}")
    if restart not in ("fail", "resume", "again"):
        raise TypeError(f"restart is 'fail', 'resume' or 'again', not {restart!r:.60}")
    check_number("task_after", after, zero=True, optional=True)
    if mode != "allowed" and after is not None:
        raise TypeError("task_after is for task='allowed': the seconds in which a call is answered without a task")
    if mode == "never":
        return None
    if mode == "required":
        log.info("the tool %s runs as a task only: a client that does not declare tasks gets an error", name)
    return TaskRule(mode == "required", 0.0 if mode == "required" else _SOON if after is None else after, restart)
