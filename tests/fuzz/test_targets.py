"""The fuzz targets, each on its corpus, on changes of it, and on any bytes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.corpus import SEEDS
from tests.fuzz.effort import FULL, effort
from tests.fuzz.targets import TARGETS
from tests.hostile.mutations import changed

Each = pytest.mark.parametrize("name", TARGETS)


@Each
def test_corpus(name: str) -> None:
    for data in SEEDS[name]:
        TARGETS[name](data)


@Each
def test_changes_of_the_corpus(name: str) -> None:
    rng = random.Random(name)
    for _ in range(20_000 if FULL else 300):
        data = rng.choice(SEEDS[name])
        for _ in range(rng.randrange(1, 4)):
            data = changed(rng, data)
        try:
            TARGETS[name](data)
        except Exception as error:
            error.add_note(f"the input was {data!r}")
            raise


@Each
def test_any_bytes(name: str) -> None:
    @effort(40, 5_000)
    @given(st.binary(max_size=200))
    def holds(data: bytes) -> None:
        TARGETS[name](data)

    holds()
