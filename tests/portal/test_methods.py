"""The stand-ins have what a session has: the methods are listed once, in `ClientSession`."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
from typing import Any

import pytest

import trimcp
from trimcp.client.session import ClientSession
from trimcp.portal.methods import FACTS, INTERNAL, public_methods
from trimcp.session.outgoing.calls import Call
from trimcp.session.outgoing.listening import Subscription

KINDS_OF: dict[str, Any] = {"blocking": trimcp.blocking, "asyncio": trimcp.asyncio}


def test_every_public_name_of_a_session_is_a_verb_a_fact_or_internal() -> None:
    public = {name for name in dir(ClientSession) if not name.startswith("_")}
    known = {name for name, _, _ in public_methods(ClientSession)} | FACTS | INTERNAL
    assert public - known == set()
    assert {"call_tool", "calling", "listen", "list_tools", "statistics"} <= {
        name for name, _, _ in public_methods(ClientSession)
    }


@pytest.mark.parametrize("kind", KINDS_OF)
@pytest.mark.parametrize(
    ("opened", "origin"), [("Session", ClientSession), ("Call", Call), ("Subscription", Subscription)]
)
def test_a_face_has_every_verb_with_its_parameters_and_text(kind: str, opened: str, origin: type) -> None:
    made = getattr(KINDS_OF[kind], f"{kind.capitalize()}{opened}")
    assert [*public_methods(origin)]
    for name, method, _ in public_methods(origin):
        assert inspect.signature(getattr(made, name)) == inspect.signature(method)
        assert getattr(made, name).__doc__ == method.__doc__
    for name in FACTS & {*dir(origin)}:
        assert isinstance(getattr(made, name), property)


def test_who_does_not_use_a_face_does_not_import_one() -> None:
    program = (
        "import sys, trimcp; trimcp.Client('c'); trimcp.Server('s'); trimcp.ClientSession;"
        "print([name for name in sys.modules if name.startswith('trimcp.portal') or name == 'asyncio'])"
    )
    shown = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert shown.stdout == "[]\n"


def test_the_module_of_asyncio_is_not_pythons() -> None:
    assert trimcp.asyncio is not asyncio
    assert trimcp.asyncio.__name__ == "trimcp.portal.asyncio"
