"""What every test has for itself although others stand in the same process, and which tests run beside each other."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, settings

from trimcp import security

# An example has no 200 ms of a clock, nor those before the test a second: on a busy machine they would be over.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

ALONE: Final = os.environ.get("TRIMCP_ALONE", "")
"""Which tests `nox` asks for: "no" without those marked `alone`, "only" just those, and "" (a plain `pytest`) all."""

RAN: Final = os.environ.get("TRIMCP_RAN", "")
"""The file by which `nox` knows that one of its two runs had tests."""


@pytest.fixture(autouse=True)
def _fresh_security_events() -> None:
    """What earlier tests left out of the log is told in no later one's, a minute after."""
    security._bounds.end_all()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Do not even import the files without a test that runs alone, where only those are wanted."""
    if ALONE == "only" and collection_path.name.startswith("test_") and collection_path.suffix == ".py":
        return "mark.alone" not in collection_path.read_text("utf-8") or None
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out those of the other run."""
    if ALONE:
        wanted = [item for item in items if (item.get_closest_marker("alone") is not None) is (ALONE == "only")]
        left_out = [item for item in items if item not in set(wanted)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = wanted


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Note that there were tests."""
    if RAN and exitstatus != pytest.ExitCode.NO_TESTS_COLLECTED and not hasattr(session.config, "workerinput"):
        Path(RAN).touch()


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, dict[str, Any] | None, Any]:
    """Escape lone surrogates, which a process of xdist cannot send: it would end with the test that reports them."""
    return _escaped((yield))


def _escaped(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_escaped(name): _escaped(each) for name, each in value.items()}
    return type(value)(map(_escaped, value)) if isinstance(value, list | tuple) else value


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep the tests of a file together, for what they share, but where each has all to itself and takes its time."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return nodeid if file.startswith("tests/interaction/") else file

    return ByFile(config, log)
