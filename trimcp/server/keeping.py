"""What a server keeps of a legacy session beyond its process, and how another process makes the session from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import attrs

from trimcp.protocol.bound_methods import methods_of
from trimcp.protocol.request_state import Sealer
from trimcp.protocol.states import Handshake
from trimcp.server.handlers.pools import Pools
from trimcp.server.handlers.shared_turns import TurnDesk
from trimcp.server.offering import Offering
from trimcp.server.registry import Change
from trimcp.server.subscribing import Subscribers
from trimcp.session.push import Pushed
from trimcp.store.shared import SharedStore
from trimcp.wire.jsonrpc import JSON
from trimcp.wire.lifecycle import InitializeParams

_IDS = 1 << 20  # requests of one holder to the client, for which there are ids


@attrs.frozen(eq=False)
class Keeper:
    """Writes down the sessions of one run, and makes them anew."""

    server: Offering
    subscribers: Subscribers
    pools: Pools

    def state_of(self, pushed: Pushed) -> dict[str, JSON]:
        """Return the state of a session after its handshake, as JSON."""
        session = pushed.session
        legacy = session.engine.legacy
        assert legacy.revision is not None
        params = InitializeParams(
            protocol_version=legacy.revision.name,
            capabilities=legacy.capabilities,  # type: ignore[arg-type] # a client's
            client_info=legacy.peer,  # type: ignore[arg-type]
        )
        return {
            "initialize": methods_of(legacy.revision)["initialize"].dump_params(params),
            "ready": legacy.handshake is Handshake.READY,
            "log_level": legacy.log_level,
            "subscriptions": self.subscribers.uris_of(session),
        }

    def restore(self, pushed: Pushed, state: Mapping[str, Any], fence: int) -> Callable[[], object]:
        """Give a new session the state of one that another process held.

        Returns a function that tells it what it may have missed: nobody heard of changes while nobody held it.

        Raises ErrorReply, ValueError, KeyError or TypeError: it is no such state. It is judged as a client's words are.
        """
        session = pushed.session
        legacy = session.engine.legacy
        revision, _ = legacy.initialize(state["initialize"])
        level = methods_of(revision)["logging/setLevel"].load_params({"level": state["log_level"]}).level
        if state["ready"]:
            legacy.initialized()
            self.subscribers.attach(session)
            self.subscribers.watch(session, [str(uri) for uri in state["subscriptions"]])
        legacy.log_level = level
        # An answer to what the former holder asked must not be one to what this one asks.
        session.engine.skip_ids(fence * _IDS)
        return partial(self.subscribers.tell_everything, session)

    @contextmanager
    def listening(self, listener: Callable[[str, bool], object]) -> Iterator[None]:
        """Call `listener` with each change here while the block runs: the list or the resource's URI, and if a list."""

        def tell(change: Change | str) -> None:
            is_list = isinstance(change, Change)
            listener(change.value if isinstance(change, Change) else change, is_list)

        self.server.changes.relays.append(tell)
        try:
            yield
        finally:
            self.server.changes.relays.remove(tell)

    def publish(self, changed: str, is_list: bool) -> None:
        """Tell clients of a change that another process has told. Raises ValueError: there is no such list."""
        self.server.changes.publish(Change(changed) if is_list else changed)

    @property
    def lacks_state_key(self) -> bool:
        """Whether `requestState` is signed with a key that only this process knows."""
        return self.server.sealer.keys is None

    def use_state_key(self, key: bytes) -> None:
        """Sign `requestState` with a key that other processes know, too."""
        sealer = self.server.sealer
        self.server.sealer = Sealer([key], sealer.lifetime, sealer.cipher)

    def share_turns(self, store: SharedStore, tell: Callable[[str, str], object]) -> TurnDesk:
        """Count turns under quotas in a store, and return what asks for them; see `TurnDesk`."""
        self.pools.desk = desk = TurnDesk(store, tell)
        return desk
