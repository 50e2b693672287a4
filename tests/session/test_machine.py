"""Two sessions against each other, in virtual time: hypothesis invents what is called, when it ends, and what breaks.

Whatever it invents, every call ends, the tools know why they were stopped, and in the end both sides are at rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import attrs
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

import trimcp
from tests.fuzz.effort import effort
from tests.session.support import at_rest
from trimcp.channel import MessageChannel
from trimcp.session.incoming.job import CancelReason
from trimcp.session.session import Session
from trimcp.testing import FaultyChannel, SlowChannel, connected
from trimcp.wire.codes import INTERNAL_ERROR
from trimcp.wire.revisions import REVISIONS, Revision

Kind: TypeAlias = Literal["echo", "sleep", "ask", "progress", "logs", "crash", "reason", "background"]
KINDS: Sequence[Kind] = ("echo", "sleep", "ask", "progress", "logs", "crash", "reason", "background")


OUTCOMES = {"done", "tool error", "cancelled", "refused", "ConnectionLost", "RemoteError", "InvalidReply"}


@attrs.frozen
class Step:
    """One call.

    Attributes:
        kind: of tool.
        seconds: it takes, or its client takes to answer.
        after: seconds before it begins.
        patience: seconds until it is given up.
        count: of what it repeats.
    """

    kind: Kind
    seconds: float
    after: float
    patience: float
    count: int


@attrs.frozen
class Faults:
    """What the client's channel does to what it sends. Those that lose an answer for good come alone, with an end."""

    seed: int = 0
    cut: float = 0
    stall: float = 0
    reorder: float = 0
    garble: float = 0
    duplicate: float = 0
    slow: float = 0

    def __call__(self, channel: MessageChannel) -> MessageChannel:
        names = ("seed", "cut", "stall", "reorder", "garble", "duplicate")
        spoiled = FaultyChannel(channel, **{name: getattr(self, name) for name in names})
        return SlowChannel(spoiled, send_delay=self.slow, receive_delay=self.slow)


TIMES = st.sampled_from([0.0, 0.1, 0.5, 1.0, 3.0])
STEPS = st.builds(
    Step,
    st.sampled_from(KINDS),
    seconds=TIMES,
    after=TIMES,
    patience=st.sampled_from([0.05, 0.3, 1.0, 5.0, 100.0]),
    count=st.integers(0, 5),
)
CHANCES = st.sampled_from([0.0, 0.0, 0.05, 0.3])
FAULTS = st.none() | st.builds(
    Faults,
    seed=st.integers(0, 99),
    cut=st.sampled_from([0.0, 0.0, 0.0, 0.02, 0.2]),
    stall=CHANCES,
    reorder=CHANCES,
    garble=CHANCES,
    duplicate=CHANCES,
    slow=st.sampled_from([0.0, 0.0, 0.2]),
)


@attrs.define
class World:
    """A server, a client, and what became of every call.

    Attributes:
        started, ended: handlers.
        reasons: why handlers were stopped, as they could read it.
        outcomes: of calls, in the order they ended.
    """

    started: int = 0
    ended: int = 0
    reasons: list[CancelReason | None] = attrs.field(factory=list)
    outcomes: list[str] = attrs.field(factory=list)
    crossed: list[Any] = attrs.field(factory=list)

    def server(self) -> trimcp.Server[None]:
        server: trimcp.Server[None] = trimcp.Server("server")

        @server.tool
        async def run(kind: str, mark: int, seconds: float, count: int, *, ctx: trimcp.Context) -> str:
            self.started += 1
            try:
                await self._run(ctx, kind, seconds, count)
            except trio.Cancelled:
                unwound = ctx.revision.modern and kind == "ask" and ctx.cancel_reason is None
                if not unwound:  # only to ask the client, and to run again with its answer
                    self.reasons.append(ctx.cancel_reason)
                raise
            finally:
                self.ended += 1
            return str(mark)

        return server

    async def _run(self, ctx: trimcp.Context, kind: str, seconds: float, count: int) -> None:
        if kind == "sleep":
            await trio.sleep(seconds)
        elif kind == "ask":
            for n in range(count):
                await ctx.elicit(f"question {n}, {seconds}", trimcp.form(str, name="name"))
        elif kind == "progress":
            for n in range(count):
                await ctx.report_progress(n + 1, total=count)
                await trio.sleep(seconds / 5)
        elif kind == "logs":
            for _ in range(count):
                await ctx.info("x" * 100)
        elif kind == "background":
            for _ in range(count):
                ctx.request.start_soon(self._background, seconds)
            await trio.sleep(seconds / 2)
        elif kind == "crash":
            await trio.sleep(seconds)
            raise RuntimeError("secret of the handler")

    async def _background(self, seconds: float) -> None:
        """Work of a request that may be longer than the request."""
        self.started += 1
        try:
            await trio.sleep(seconds if seconds < 1 else float("inf"))
        finally:
            self.ended += 1

    def client(self) -> trimcp.Client:
        client = trimcp.Client("client")

        @client.elicitation
        async def answer(params: trimcp.ElicitParams) -> trimcp.ElicitResult:
            await trio.sleep(float(params.message.rpartition(" ")[2]))
            return trimcp.ElicitResult(action="accept", content={"name": "n"})

        return client

    async def call(self, session: trimcp.ClientSession, mark: int, step: Step) -> None:
        """Make one call; however it ends, it ends."""
        await trio.sleep(step.after)
        arguments = {"kind": step.kind, "mark": mark, "seconds": step.seconds, "count": step.count}
        outcome = "cancelled"
        with trio.move_on_after(step.patience):
            try:
                async with session.calling("run", arguments) as call:
                    result = await call.result()
                    progress = [each.progress async for each in call.progress]
            except (trimcp.ConnectionLost, trimcp.RemoteError, trimcp.InvalidReply) as error:
                outcome = type(error).__name__ + ("!" if "secret" in str(error) else "")
                if isinstance(error, trimcp.RemoteError) and error.code != INTERNAL_ERROR:
                    outcome = "refused"  # its time was over as the server looked at it
            else:
                outcome = "done"
                text = "".join(block.text for block in result.content if isinstance(block, trimcp.TextContent))
                if result.is_error:
                    assert "secret" not in text
                    outcome = "tool error"
                elif text != str(mark):
                    self.crossed.append((mark, text))
                if progress != sorted(set(progress)):
                    self.crossed.append((mark, progress))
        self.outcomes.append(outcome)


async def play(steps: Sequence[Step], revision: Revision, faults: Faults | None, world: World) -> None:
    """Make all calls side by side, then see what is left."""
    sessions: list[Session] = []
    try:
        with trio.fail_after(10_000):
            async with connected(
                world.server(), world.client(), revision=revision, wrap=faults, framed=faults is not None
            ) as session:
                assert isinstance(session.peer, Session)
                sessions += [session.session, session.peer]
                async with trio.open_nursery() as nursery:
                    for mark, step in enumerate(steps):
                        nursery.start_soon(world.call, session, mark, step)
                assert len(world.outcomes) == len(steps), "every call ends"
                await trio.sleep(60)  # what is stalled arrives
                assert session.statistics().pending == 0
                if session.session.lost is None and (faults is None or not faults.garble):
                    for each in sessions:
                        at_rest(each)
    except (trimcp.ConnectionLost, trimcp.RemoteError, trimcp.InvalidReply):
        assert faults is not None, "nothing breaks that was not broken on purpose"
    for each in sessions:
        at_rest(each)
    assert world.started == world.ended
    assert set(world.outcomes) <= OUTCOMES
    assert not world.crossed, "nobody gets another's answer, and progress grows"


def holds(steps: Sequence[Step], revision: Revision, faults: Faults | None) -> None:
    world = World()
    trio.run(play, steps, revision, faults, world, clock=MockClock(autojump_threshold=0))
    # A client gives calls up, or its patience, which travels with them, ends first on the server's side. What else ends
    # them is the end of the connection, and only faults bring that.
    allowed = {CancelReason.PEER, CancelReason.DEADLINE} | ({CancelReason.DISCONNECTED} if faults else set())
    assert set(world.reasons) <= allowed, world.reasons
    if faults is None:
        assert len(world.reasons) <= world.outcomes.count("cancelled")
        assert not {"ConnectionLost", "InvalidReply"} & set(world.outcomes)
        assert world.outcomes.count("RemoteError") <= sum(step.kind == "crash" for step in steps)


@effort(60, 3_000)
@given(st.lists(STEPS, min_size=1, max_size=8), st.sampled_from(REVISIONS))
def test_calls_side_by_side(steps: list[Step], revision: Revision) -> None:
    holds(steps, revision, None)


@effort(80, 4_000)
@given(st.lists(STEPS, min_size=1, max_size=8), st.sampled_from(REVISIONS), FAULTS)
def test_calls_over_a_channel_that_fails(steps: list[Step], revision: Revision, faults: Faults | None) -> None:
    holds(steps, revision, faults)
