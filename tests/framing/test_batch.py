from __future__ import annotations

import json

import pytest

from trimcp.framing.batch import Gather


def test_replies_go_out_together_with_the_last() -> None:
    gather = Gather()
    assert gather.open([1, "a", 2]) is None
    assert gather.add("a", b'"A"') is None
    assert gather.add(2, b"22") is None
    assert gather.held == 5
    array = gather.add(1, b"11")
    assert array is not None
    assert json.loads(array) == ["A", 22, 11]
    assert gather.held == 0


def test_a_reply_belongs_to_a_batch_until_it_came() -> None:
    gather = Gather()
    gather.open([1, 2])
    assert 1 in gather
    assert "1" not in gather
    gather.add(1, b"1")
    assert 1 not in gather
    with pytest.raises(KeyError):
        gather.add(1, b"1")


def test_errors_known_at_once_wait_for_the_others() -> None:
    gather = Gather()
    assert gather.open([1], [b'"broken"']) is None
    assert gather.add(1, b"1") == b'["broken",1]'


def test_nothing_to_wait_for() -> None:
    gather = Gather()
    assert gather.open([], [b"1", b"2"]) == b"[1,2]"
    assert gather.open([]) is None


def test_cancelled_requests_drop_out() -> None:
    gather = Gather()
    gather.open([1, 2])
    assert gather.add(1, b"1") is None
    assert gather.drop(2) == b"[1]"
    assert gather.drop(2) is None
    assert 2 not in gather


def test_where_all_were_cancelled_nothing_is_sent() -> None:
    gather = Gather()
    gather.open([1, 2])
    assert gather.drop(1) is None
    assert gather.drop(2) is None
    assert gather.open([1, 2]) is None


def test_batches_do_not_mix() -> None:
    gather = Gather()
    gather.open([1, 2])
    gather.open([3, 4], [b"0"])
    gather.add(3, b"3")
    gather.add(1, b"1")
    assert gather.held == 3
    assert gather.add(4, b"4") == b"[0,3,4]"
    assert gather.add(2, b"2") == b"[1,2]"


def test_an_id_waits_in_one_batch_only() -> None:
    gather = Gather()
    gather.open([1, 2])
    with pytest.raises(ValueError, match="1 of these"):
        gather.open([2, 3])
    assert 3 not in gather
    gather.add(1, b"1")
    assert gather.add(2, b"2") == b"[1,2]"
