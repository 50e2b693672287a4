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


FORMS = {
    "bullets": "Args:\n    - city: Where.\n    - days: How many.",
    "stars": "Args:\n    * city: Where.\n    * days: How many.",
    "numbers": "Args:\n    1. city: Where.\n    2) days: How many.",
    "backticks": "Args:\n    `city`: Where.\n    `days` (int): How many.",
    "bullets and backticks": "Args:\n    - `city` (`str`): Where.\n    - `days` (int, optional): How many.",
    "bold": "Args:\n    **city**: Where.\n    **days** (int): How many.",
    "a bold colon": "Args:\n    - **city:** Where.\n    - **days:** How many.",
    "dashes": "Args:\n    city - Where.\n    days -- How many.",
    "long dashes": "Args:\n    city – Where.\n    days (int) — How many.",
    "bullets and dashes": "Args:\n    - city - Where.\n    - days - How many.",
    "a type in backticks": "Args:\n    `city: str` - Where.\n    - `days: int` - How many.",
    "a type in brackets": "Args:\n    city [str]: Where.\n    days <int>: How many.",
    "a type with brackets": "Args:\n    city (tuple[()], str): Where.\n    days (Callable[[], int]): How many.",
    "on the next line": "Args:\n    city:\n        Where.\n    days (int):\n        How many.",
    "on the next line, no colon": "Args:\n    city\n        Where.\n    days (int)\n        How many.",
    "lower case": "args:\n    city: Where.\n    days: How many.",
    "not indented": "Args:\ncity: Where.\ndays: How many.",
    "an empty line": "Args:\n\n    city: Where.\n\n    days: How many.",
    "a heading": "### Parameters\n\n- `city`: Where.\n- `days`: How many.",
    "a bold heading": "**Parameters:**\n\n- **city** (str): Where.\n- **days** (int): How many.",
    "input": "Inputs:\n    city: Where.\n    days: How many.",
    "numpy on one line": "Parameters\n----------\ncity: Where it is.\n    Where.\ndays : int\n    How many.",
    "numpy in backticks": "Parameters\n----------\n`city` : str\n    Where.\n**days** : int\n    How many.",
    "sphinx in backticks": ":param `city`: Where.\n:param int days: How many.",
    "epytext": "@param city: Where.\n@param days: How many.\n@return: nothing",
    "wrapped": "Args:\n    city: Where.\n    days: How\n      many.",
}


@pytest.mark.parametrize("section", FORMS.values(), ids=FORMS)
def test_the_usual_forms_of_a_section_are_read(section: str) -> None:
    found = parse(f"Do it.\n\n{section}\n", ["city", "days"])
    assert found.parameters == {"city": "Where.", "days": "How many."}
    assert found.description == "Do it."


@pytest.mark.parametrize(
    "names", ["city, days", "city and days", "`city`, `days`", "- city / days", "**city**, **days**"]
)
def test_several_names_in_a_line(names: str) -> None:
    found = parse(f"Do it.\n\nArgs:\n    {names}: Both.", ["city", "days"])
    assert found.parameters == {"city": "Both.", "days": "Both."}


@pytest.mark.parametrize(
    "text",
    [
        "Do it.\n\nargs:\n    as for the other tool, but in metres",
        "Do it.\n\nArgs:\n    Everything that the shell takes; see its manual.",
        "Do it with these\nargs:\n    one after the other.",
        "Do it.\n\nArgs:\n    nothing: there is no such parameter",
        "Do it.\n\nParameters\n----------\nas for the other tool, but in metres",
        ":param nothing: there is no such parameter",
        "Args: city and days, both in English.",
    ],
)
def test_what_is_not_understood_stays_in_the_description(text: str) -> None:
    assert parse(text, ["city", "days"]) == (text, {})


def test_a_line_that_names_no_parameter_is_kept_beside_those_that_do() -> None:
    found = parse("Do it.\n\nArgs:\n    city: Where.\n    Note: in English.\n      Always.", ["city"])
    assert found.parameters == {"city": "Where."}
    assert found.description == "Do it.\n\nArgs:\n    Note: in English.\n      Always."


def test_a_description_on_the_line_of_a_numpy_name() -> None:
    found = parse("Do it.\n\nParameters\n----------\ncity: The city to ask.\ndays : int, optional")
    assert found.parameters == {"city": "The city to ask."}


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
