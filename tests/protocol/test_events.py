from __future__ import annotations

from typing import Any

import attrs
import pytest

from trimcp import Context, Notice, ThreadContext
from trimcp.protocol.events import Admission, Admitted
from trimcp.wire.capabilities import ClientCapabilities
from trimcp.wire.common import Implementation
from trimcp.wire.revisions import LATEST
from trimcp.worker_program.serve import RemoteContext

TRACE = {"traceparent": "00-0-0-01", "tracestate": "a=b"}


@attrs.define
class Letter(Admitted):
    admission: Admission


def letter(meta: dict[str, Any] | None) -> Letter:
    return Letter(Admission(LATEST, Implementation("c", "1"), ClientCapabilities(), meta=meta, principal="ada"))


def test_the_sender_is_told_from_the_admission() -> None:
    one = letter({**TRACE, "baggage": 3, "mine": True})
    assert (one.revision, one.peer, one.principal) == (LATEST, one.admission.peer, "ada")
    assert one.capabilities is one.admission.capabilities
    assert one.meta is one.admission.meta
    assert one.trace == TRACE  # baggage is text or nothing


def test_without_meta_there_is_an_empty_one() -> None:
    assert (letter(None).meta, letter(None).trace) == ({}, {})


@pytest.mark.parametrize("view", [Context, ThreadContext, RemoteContext, Notice])
def test_whatever_handlers_meet_says_it_in_the_same_words(view: Any) -> None:
    for name in ("revision", "peer", "capabilities", "principal", "meta", "trace"):
        assert getattr(view, name) is getattr(Admitted, name)
    assert view.admission is not Admitted.admission  # its own, and so no dead end
