"""Who sends a request of the agent-tools protocol: a principal, and the agent that its token names."""

from __future__ import annotations

from typing import Final

import attrs

from trimcp.agent_tools.messages.errors import NotAllowed
from trimcp.budget import owner_of
from trimcp.principal import Principal
from trimcp.store.contexts import Owner as Owner

ANONYMOUS: Final = "anonymous"
"""The agent of a request without a principal."""

_CLAIMS: Final = ("azp", "client_id")


# Mutable only because making a frozen value takes attrs three times as long. Do not change it.
@attrs.define(eq=False)
class AgentCaller:
    """Who sends a request.

    Attributes:
        principal: as authenticated; None if the server does not authenticate.
        agent: the agent's id, from the token.
        address: what identifies the peer, such as its address without the port; None if the transport cannot tell.
        loopback: whether the request was sent to a loopback address or a Unix socket.
        owner: whose its contexts and tools are.
        account: whose share its calls count into: its principal's, else its address's (`budget.owner_of`).
    """

    principal: Principal | None = None
    agent: str = ANONYMOUS
    address: str | None = None
    loopback: bool = False
    owner: Owner = attrs.field(init=False)
    account: str = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.owner = "" if self.principal is None else self.principal.id, self.agent
        self.account = owner_of(self.principal, self.address)


def agent_of(principal: Principal | None, claim: str | None = None, said: str | None = None) -> str:
    """Return the agent's id: what its token says, never only what the request says.

    Without a `claim` it is the client that the token was issued to, and the principal itself if the token names none.
    Raises NotAllowed if the token lacks the claim, or the header, which `said` is, names another agent.
    """
    if principal is None:
        agent = ANONYMOUS
    elif claim is not None:
        found = principal.claims.get(claim)
        if not isinstance(found, str) or not found:
            raise NotAllowed(f"the token does not name an agent: it has no claim {claim}")
        agent = found
    else:
        named = principal.client_id or next(
            (principal.claims[name] for name in _CLAIMS if name in principal.claims), ""
        )
        agent = named if isinstance(named, str) and named else principal.id
    if said is not None and said != agent:
        raise NotAllowed("the header names another agent than the token")
    return agent
