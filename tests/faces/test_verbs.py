"""The faces have what a session has: the methods are listed once, in `ClientSession`."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
from typing import Any

import pytest

import trimcp
from trimcp.client.session import ClientSession
from trimcp.faces.verbs import FACTS, INTERNAL, verbs
from trimcp.session.calls import Call
from trimcp.session.listening import Subscription

FACES: dict[str, Any] = {"blocking": trimcp.blocking, "asyncio": trimcp.asyncio}


def test_every_public_name_of_a_session_is_a_verb_a_fact_or_internal() -> None:
    public = {name for name in dir(ClientSession) if not name.startswith("_")}
    known = {name for name, _, _ in verbs(ClientSession)} | FACTS | INTERNAL
    assert public - known == set()
    assert {"call_tool", "calling", "listen", "list_tools", "statistics"} <= {
        name for name, _, _ in verbs(ClientSession)
    }


@pytest.mark.parametrize("kind", FACES)
@pytest.mark.parametrize(
    ("opened", "origin"), [("Session", ClientSession), ("Call", Call), ("Subscription", Subscription)]
)
def test_a_face_has_every_verb_with_its_parameters_and_text(kind: str, opened: str, origin: type) -> None:
    face = getattr(FACES[kind], f"{kind.capitalize()}{opened}")
    assert [*verbs(origin)]
    for name, verb, _ in verbs(origin):
        assert inspect.signature(getattr(face, name)) == inspect.signature(verb)
        assert getattr(face, name).__doc__ == verb.__doc__
    for name in FACTS & {*dir(origin)}:
        assert isinstance(getattr(face, name), property)


def test_who_does_not_use_a_face_does_not_import_one() -> None:
    program = (
        "import sys, trimcp; trimcp.Client('c'); trimcp.Server('s'); trimcp.ClientSession;"
        "print([name for name in sys.modules if name.startswith('trimcp.faces') or name == 'asyncio'])"
    )
    shown = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert shown.stdout == "[]\n"


def test_the_module_of_asyncio_is_not_pythons() -> None:
    assert trimcp.asyncio is not asyncio
    assert trimcp.asyncio.__name__ == "trimcp.faces.asyncio"
