"""How a client finds the era and revision to use: a pure decision table over the results of its probes.

On stdio-like channels a client that supports both eras sends `server/discover` first (2026-07-28
basic/transports/stdio, "Backward Compatibility"). The table gives the next step for each answer. It does not depend on
a single error code, since legacy servers use various ones. `decide` is called until it returns USE or FAIL.

    outcome of the probe                      next
    ----------------------------------------  ---------------------------------------------
    DiscoverResult with a common revision     USE it
    DiscoverResult without one                INITIALIZE if we know a legacy one, else FAIL
    -32022 with a common modern revision      DISCOVER again with it (once)
    -32022 with a common legacy revision      INITIALIZE with the newest of them
    -32022 without one                        FAIL
    another modern error (-32020, -32021)     FAIL: the server is modern and sent the reason
    any other error, nonsense, silence, or no
    answer on a connection that stays open    INITIALIZE
    the child process ended on the probe      RESPAWN, then INITIALIZE

    outcome of initialize (`decide_again`)    next
    ----------------------------------------  ---------------------------------------------
    -32022, or a list with a common modern
    revision, as modern servers send          DISCOVER (unless that was done twice)
    -32022 or -32602 with another common
    legacy one                                INITIALIZE with it
    any other error, or the connection ended,
    with a probe before it                    RESPAWN, then INITIALIZE (where requests share a connection)
    the same without a probe before it        FAIL with it

If no legacy revision is offered, the last two rows of the first table are FAIL, with the result of the probe as the
reason. A probe stays open while `initialize` is under way: a server that starts slowly finds both in its input, and
when it answers the probe with a DiscoverResult, that is used.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from enum import Enum, auto
from typing import Any

import attrs

from trimcp.support.slotted import valued
from trimcp.wire.codes import HEADER_MISMATCH, INVALID_PARAMS, MISSING_CAPABILITY, UNSUPPORTED_VERSION
from trimcp.wire.revisions import REVISIONS, Era, Revision


class Met(Enum):
    """The result of a probe."""

    DISCOVERED = auto()
    ERROR = auto()
    NONSENSE = auto()
    SILENCE = auto()
    UNANSWERED = auto()
    DIED = auto()


class Next(Enum):
    """The next step."""

    DISCOVER = auto()
    USE = auto()
    INITIALIZE = auto()
    RESPAWN = auto()
    FAIL = auto()


@attrs.frozen
@valued
class ProbeResult:
    """The result of a probe: `versions` for DISCOVERED, `code` and `data` for ERROR, and `why` for a reason."""

    met: Met
    versions: Sequence[str] = ()
    code: int = 0
    data: Any = None
    why: str = ""


@attrs.frozen
@valued
class Decision:
    """The next step, the revision to use, and why (for the log and for error messages)."""

    next: Next
    revision: Revision | None
    why: str


def _best(names: Sequence[Any], offered: Sequence[Revision], era: Era) -> Revision | None:
    return next((r for r in sorted(offered, reverse=True) if r.era is era and r.name in names), None)


def opening(offered: Sequence[Revision] = REVISIONS) -> Decision:
    """Return a client's first step, for the revisions that it offers."""
    newest = max(offered)
    if newest.era is Era.LEGACY:
        return Decision(Next.INITIALIZE, newest, "only legacy revisions are offered")
    return Decision(Next.DISCOVER, newest, "probing for the modern era")


def _listed(data: Any) -> Sequence[Any]:
    """Return the revisions that the data of a -32022 names."""
    supported = data.get("supported") if isinstance(data, dict) else None
    return supported if isinstance(supported, list) else ()


def decide(outcome: ProbeResult, offered: Sequence[Revision] = REVISIONS, *, probed: int = 1) -> Decision:
    """Return the next step after the `probed`-th probe had this result."""
    names = outcome.versions or _listed(outcome.data)
    legacy = _best(names, offered, Era.LEGACY) or max((r for r in offered if r.era is Era.LEGACY), default=None)
    fallback = Decision(Next.INITIALIZE, legacy, "the server is of the legacy era")
    if outcome.met is Met.DISCOVERED:
        common = _best(names, offered, Era.MODERN)
        if common is not None:
            return Decision(Next.USE, common, "the server was discovered")
        reason = f"the server speaks {_names(names)}, we offer {_names([r.name for r in offered])}"
        return fallback if legacy is not None else Decision(Next.FAIL, None, reason)
    if outcome.met is Met.ERROR and outcome.code == UNSUPPORTED_VERSION:
        common = _best(names, offered, Era.MODERN)
        if common is not None and probed < 2:
            return Decision(Next.DISCOVER, common, "the server named a revision we know")
        if _best(names, offered, Era.LEGACY) is not None:
            return attrs.evolve(fallback, why="the server speaks only legacy revisions")
        return Decision(
            Next.FAIL,
            None,
            f"no common revision: the server speaks {_names(names)}, we offer {_names([r.name for r in offered])}",
        )
    if outcome.met is Met.ERROR and outcome.code in (HEADER_MISMATCH, MISSING_CAPABILITY):
        return Decision(Next.FAIL, None, f"a modern server refused the probe (code {outcome.code}): {outcome.why}")
    if legacy is None:
        return Decision(Next.FAIL, None, _failure(outcome))
    if outcome.met is Met.DIED:
        return Decision(Next.RESPAWN, legacy, "the server died on the probe; it is of the legacy era")
    return fallback


def decide_again(
    code: int, data: Any, tried: Container[Revision], offered: Sequence[Revision] = REVISIONS, *, probed: int
) -> Decision:
    """Return the next step after the server refused `initialize`, last with this error, after `probed` probes."""
    names = _listed(data)
    modern = _best(names, offered, Era.MODERN)
    legacy = _best(names, [r for r in offered if r not in tried], Era.LEGACY)
    if code == UNSUPPORTED_VERSION or modern is not None:
        if modern is None and legacy is None:
            modern = max((r for r in offered if r.era is Era.MODERN), default=None)
        if modern is not None and probed < 2:
            return Decision(Next.DISCOVER, modern, "the server refused initialize as a modern one does")
    elif code != INVALID_PARAMS:  # so the legacy specification refuses a revision (basic/lifecycle, "Error Handling")
        legacy = None
    if legacy is not None:
        return Decision(Next.INITIALIZE, legacy, "the server named a legacy revision we know")
    return Decision(Next.FAIL, None, "the server refused initialize")


def _failure(outcome: ProbeResult) -> str:
    """Return the reason to fail when there is nothing else to try."""
    if outcome.met is Met.ERROR:
        answered = f" (it answered server/discover: {outcome.why})" if outcome.why else ""
        return f"the server is of the legacy era, and no legacy revision is offered{answered}"
    if outcome.met is Met.NONSENSE:
        return f"server/discover was not answered as it has to be: {outcome.why}"
    return f"server/discover was not answered{f': {outcome.why}' if outcome.why else ''}"


def _names(names: Sequence[Any]) -> str:
    return ", ".join(str(name)[:40] for name in list(names)[:8]) or "nothing we know"
