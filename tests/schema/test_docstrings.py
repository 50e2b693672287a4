"""Tests of `trimcp.schema.docstrings`: three styles, one reading."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimcp.schema.docstrings import parse

GOOGLE = """Fetch the forecast.

    It is only a guess.

    Args:
        city: The city, or
            a village.
        days (int, optional): How many: at most 14.
        *names: More of them.
        **extra: And others.

    Returns:
        str: a text.

    Raises:
        ValueError: never.
    """
NUMPY = """Fetch the forecast.

    It is only a guess.

    Parameters
    ----------
    city : str
        The city, or
        a village.
    days : int, optional
        How many: at most 14.
    *names
        More of them.
    **extra : dict
        And others.

    Returns
    -------
    str
        a text.
    """
SPHINX = """Fetch the forecast.

    It is only a guess.

    :param city: The city, or
        a village.
    :type city: str
    :param int days: How many: at most 14.
    :param names: More of them.
    :keyword extra: And others.
    :returns: a text.
    :raises ValueError: never.
    """


@pytest.mark.parametrize("text", [GOOGLE, NUMPY, SPHINX], ids=["google", "numpy", "sphinx"])
def test_the_three_styles_say_the_same(text: str) -> None:
    found = parse(text)
    assert found.description == "Fetch the forecast.\n\nIt is only a guess."
    assert found.parameters == {
        "city": "The city, or a village.",
        "days": "How many: at most 14.",
        "names": "More of them.",
        "extra": "And others.",
    }


def test_text_after_a_section_is_kept() -> None:
    found = parse("Do it.\n\nArgs:\n    a: One.\n\nMore words.\n\nExample:\n    >>> f(1)\n")
    assert found.description == "Do it.\n\nMore words.\n\nExample:\n    >>> f(1)"
    assert found.parameters == {"a": "One."}


def test_attributes_of_classes_and_joined_numpy_names() -> None:
    assert parse("A point.\n\nAttributes:\n    x: across\n").parameters == {"x": "across"}
    assert parse("F.\n\nParameters\n----------\nx, y : int\n    Where.\n").parameters == {"x": "Where.", "y": "Where."}


@pytest.mark.parametrize("text", [None, "", "   ", "Args:", "Args:\n", ":param x", "Parameters\n---------"])
def test_poor_docstrings_are_harmless(text: str | None) -> None:
    assert parse(text).parameters == {}


def test_ordinary_prose_is_left_alone() -> None:
    text = "Parameters are nice.\n\nThe returns: none of them."
    assert parse(text).description == text


@given(st.text())
def test_nothing_makes_it_raise(text: str) -> None:
    parse(text)
