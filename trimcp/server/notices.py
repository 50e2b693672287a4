"""A client's notification as middleware and its handlers see it: who sent it, and nothing to answer."""

from __future__ import annotations

from typing import Any

import attrs

from trimcp.protocol.events import Admission
from trimcp.wire.common import Implementation
from trimcp.wire.revisions import Revision

__all__ = ["Notice"]


@attrs.frozen(eq=False, repr=False)
class Notice:
    """One notification from a client.

    Attributes:
        method: its method, such as `notifications/roots/list_changed`.
        admission: who sent it.
        state: what the server's lifespan made.
    """

    method: str
    admission: Admission
    state: Any

    @property
    def revision(self) -> Revision:
        """The revision it is spoken in."""
        return self.admission.revision

    @property
    def peer(self) -> Implementation | None:
        """The sender's name and version as it reports them (unverified), or None."""
        return self.admission.peer

    @property
    def principal(self) -> str | None:
        """Who the transport says the sender is; None where nobody authenticates."""
        return self.admission.principal
