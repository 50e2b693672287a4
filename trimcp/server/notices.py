"""A client's notification as middleware and its handlers see it: who sent it, and nothing to answer."""

from __future__ import annotations

from typing import Any

import attrs

from trimcp.protocol.events import Admission, Admitted

__all__ = ["Notice"]


@attrs.frozen(eq=False, repr=False)
class Notice(Admitted):
    """One notification from a client.

    Attributes:
        method: its method, such as `notifications/roots/list_changed`.
        admission: who sent it.
        state: what the server's lifespan made.
    """

    method: str
    admission: Admission
    state: Any
