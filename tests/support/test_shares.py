"""Who gives way in a full table, without a table."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.yardsticks import assert_costs
from trimcp.support.shares import FAR, Places, Shares


class Held:
    """One of what there are only so many of."""

    def __init__(self, owner: str, name: str, *, idle: bool = True) -> None:
        self.owner = owner
        self.name = name
        self.idle = idle

    def __repr__(self) -> str:
        return self.name


def made(much: int = FAR, **owners: tuple[int, int]) -> tuple[Shares[Held], dict[str, list[Held]]]:
    """Shares of owners, of which each holds so many that were never used, and so many idle ones that were."""
    shares: Shares[Held] = Shares(much)
    everything: dict[str, list[Held]] = {}
    for owner, (fresh, used) in owners.items():
        everything[owner] = [Held(owner, f"{owner}{n}") for n in range(fresh + used)]
        for n, held in enumerate(everything[owner]):
            shares.add(held)
            if n >= fresh:
                shares.use(held)
    return shares, everything


def test_what_was_never_used_goes_first_the_oldest_of_who_holds_most() -> None:
    shares, of = made(ada=(2, 0), eve=(3, 5), bob=(1, 0))
    for expected in (of["eve"][0], of["eve"][1], of["eve"][2]):
        found = shares.giving_way("newcomer")
        assert found is expected
        shares.remove(found)
    # Eve holds five that were used, and they do not go for somebody who holds next to nothing less.
    assert shares.giving_way("newcomer") is of["ada"][0]


def test_what_was_used_goes_only_for_somebody_who_holds_far_less() -> None:
    shares, of = made(eve=(0, 2 * FAR), ada=(0, 1))
    assert shares.giving_way("newcomer") is of["eve"][0]
    assert shares.giving_way("ada") is of["eve"][0]
    shares.remove(of["eve"][0])
    assert shares.giving_way("newcomer") is of["eve"][1]
    assert shares.giving_way("ada") is None, "she holds more than a sixteenth"
    assert shares.giving_way("eve") is None


def test_what_is_idle_may_go_more_easily() -> None:
    shares, of = made(2, eve=(0, 4))
    assert shares.giving_way("newcomer") is of["eve"][0]
    of["eve"][0].idle = False
    assert shares.giving_way("newcomer") is of["eve"][1]
    for held in of["eve"]:
        held.idle = False
    assert shares.giving_way("newcomer") is None
    shares, of = made(2, eve=(0, FAR))
    for held in of["eve"]:
        held.idle = False
    assert shares.giving_way("newcomer") in of["eve"], "who holds sixteen times as much ends with a call under way"


def test_one_makes_room_for_itself_with_what_it_never_used() -> None:
    shares, of = made(eve=(2, 100), ada=(1, 0))
    assert shares.giving_way("eve") is of["eve"][0]
    shares, of = made(eve=(0, 100), ada=(1, 0))
    assert shares.giving_way("eve") is None, "not with what is another's"
    assert shares.giving_way("ada") is of["eve"][0]


def test_an_equal_gives_nothing() -> None:
    shares, _ = made(ada=(1, 0), bob=(0, 1))
    assert shares.giving_way("bob") is None
    assert shares.giving_way("newcomer") is not None


@pytest.mark.parametrize("used", [False, True])
def test_counts_are_right_whatever_comes_and_goes(used: bool) -> None:
    shares, of = made(eve=(3, 3))
    extra = Held("ada", "extra")
    shares.add(extra, used=used)
    shares.use(extra)
    assert (len(shares._shares), shares.held("eve"), shares.held("ada"), shares.held("bob")) == (2, 6, 1, 0)
    for held in of["eve"]:
        shares.remove(held)
        shares.remove(held)
    shares.remove(Held("bob", "hers"))
    shares.remove(extra)
    assert shares._shares == {}
    assert shares.giving_way("newcomer") is None
    assert not shares._by_count


def test_those_who_were_looked_at_in_vain_do_not_hide_the_others() -> None:
    """Only some are looked at for one newcomer, and others for the next."""
    shares, of = made(**{f"owner{n}": (0, 2) for n in range(200)}, last=(2, 0))
    found = [shares.giving_way("newcomer") for _ in range(20)]
    assert of["last"][0] in found
    shares, of = made(2, eve=(0, 600))
    for held in of["eve"][:-1]:
        held.idle = False
    found = [shares.giving_way("ada") for _ in range(20)]
    assert of["eve"][-1] in found


def test_a_newcomer_costs_the_same_however_many_there_are() -> None:
    """Against a yardstick: the same in a small table."""

    def newcomers(owners: int, each: int) -> Callable[[], None]:
        shares, _ = made(**{f"owner{n}": (0, each) for n in range(owners)})

        def come() -> None:
            for _ in range(50):
                shares.giving_way("newcomer")

        return come

    small = newcomers(16, 17)
    assert_costs(newcomers(5_000, 2), at_most=20, times=small)
    assert_costs(newcomers(1, 10_000), at_most=20, times=small)


class Piece:
    """Work under way that leaves its place when it has to give way."""

    def __init__(self, places: Places[Piece], owner: str, key: int) -> None:
        self.place = (places, owner, key)
        self.why = ""
        assert places.admit(owner, key, self)

    def evict(self, why: str) -> None:
        self.why = why
        places, owner, key = self.place
        places.leave(owner, key)


def test_places_are_counted_by_owner_and_key() -> None:
    places: Places[Piece] = Places(3, "call")
    mine = Piece(places, "ada", 1)
    assert (places.find("ada", 1), places.find("ada", 2), places.find("bob", 1)) == (mine, None, None)
    assert list(places) == [mine]
    places.leave("bob", 1)
    places.leave("ada", 2)
    assert places.taken == 1
    places.leave("ada", 1)
    places.leave("ada", 1)
    assert (places.taken, list(places), places._owners) == (0, [], {})


def test_one_place_is_made_for_who_has_far_less_and_none_for_an_equal() -> None:
    places: Places[Piece] = Places(3 * FAR, "call")
    eve = [Piece(places, "eve", n) for n in range(3 * FAR)]
    for n in range(2):
        Piece(places, "ada", n)
        assert [piece.why != "" for piece in eve].index(False) == n + 1, "the oldest first"
    assert not places.admit("ada", 9, eve[0])
    assert not places.admit("eve", 99, eve[0])
    assert places.taken == 3 * FAR


def test_a_hoarder_behind_many_owners_is_found_and_a_newcomer_costs_little() -> None:
    def newcomers(owners: int) -> Callable[[], None]:
        places: Places[Piece] = Places(owners, "call")
        for n in range(owners):
            Piece(places, f"owner{n}", 0)

        def come() -> None:
            for _ in range(50):
                places.make_room("newcomer")

        return come

    assert_costs(newcomers(10_000), at_most=20, times=newcomers(100))
    places: Places[Piece] = Places(1_000 + FAR, "call")
    for n in range(1_000):
        Piece(places, f"owner{n}", 0)
    eve = [Piece(places, "eve", n) for n in range(FAR)]
    assert True in [places.make_room("newcomer") for _ in range(5)]
    assert eve[0].why
