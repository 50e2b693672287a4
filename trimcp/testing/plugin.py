"""The pytest plugin: fails a test that leaks tasks, descriptors, threads, processes or sessions.

It does nothing, and imports nothing but pytest, until a test has the marker `trimcp_leaks`, uses the fixture of that
name, or the project's configuration sets `trimcp_leaks = true`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from trimcp.testing.leaks import LeakWatch

_NAME = "trimcp_leaks"
_HARMLESS = ("_pytest.", "pytest_trio.")  # packages whose fixtures do not close what a test opens
_WATCH = pytest.StashKey["LeakWatch"]()
_LATER = pytest.StashKey[bool]()
_PASSED = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the configuration options."""
    parser.addini(_NAME, "fail every test that leaves a task, socket, thread, ... behind", type="bool", default=False)
    parser.addini(f"{_NAME}_allow", "kinds and names of what may stay", type="linelist", default=[])


def pytest_configure(config: pytest.Config) -> None:
    """Add the marker."""
    words = "fail the test if it leaves a task, socket, descriptor, thread, child process or session behind"
    config.addinivalue_line("markers", f"{_NAME}(allow=[], watch=True): {words}")


@pytest.fixture
def trimcp_leaks(request: pytest.FixtureRequest) -> LeakWatch:
    """Watch this test for leaks. `found()` returns those so far, and `allow(...)` ignores some."""
    watch: LeakWatch = request.node.stash[_WATCH]
    return watch


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    """Note the state before any fixture runs."""
    watch = _watch_for(item)
    if watch is not None:
        item.stash[_WATCH] = watch
        item.stash[_LATER] = item.stash[_PASSED] = False
        watch.begin()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    """Ignore what a fixture creates for more than one test."""
    watch = _watching(request)
    if watch is None:
        return (yield)
    if fixturedef.scope != "function":
        with watch.excused():
            return (yield)
    closes = inspect.isgeneratorfunction(fixturedef.func) or "request" in fixturedef.argnames
    if closes and not fixturedef.func.__module__.startswith(_HARMLESS):
        request.node.stash[_LATER] = True  # its teardown may close what the test opens
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Check a test that passed, unless a fixture's teardown may still close what it opened."""
    watch = item.stash.get(_WATCH, None)
    if watch is None:
        return (yield)
    _watch_body(item, watch)
    result = yield
    if item.stash[_LATER]:
        item.stash[_PASSED] = True
    else:
        _judge(watch)
    return result


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """Check a test after the teardown of its fixtures, and stop watching it."""
    watch = item.stash.get(_WATCH, None)
    if watch is None:
        return (yield)
    del item.stash[_WATCH]
    try:
        result = yield
        if item.stash[_PASSED]:
            _judge(watch)
        return result
    finally:
        watch.end()


def _watch_for(item: pytest.Item) -> LeakWatch | None:
    """Return a watch if the test is to be watched, otherwise None."""
    markers = list(item.iter_markers(_NAME))
    wanted = bool(item.config.getini(_NAME))
    if markers:
        wanted = markers[0].kwargs.get("watch", True)  # the closest marker decides
    if _NAME in getattr(item, "fixturenames", ()):
        wanted = True
    if not wanted:
        return None
    from trimcp.testing.leaks import LeakWatch

    allowed = list(item.config.getini(f"{_NAME}_allow"))
    for marker in markers:
        allow = marker.kwargs.get("allow", ())
        allowed += [allow] if isinstance(allow, str) else allow
    return LeakWatch(allowed)


def _watching(request: pytest.FixtureRequest) -> LeakWatch | None:
    """Return the watch of the test whose fixture is being set up; `request.node` may be a module or a session."""
    item = getattr(request, "_pyfuncitem", None)
    return None if item is None else item.stash.get(_WATCH, None)


def _watch_body(item: Any, watch: LeakWatch) -> None:
    """Check an async test when its body ends, before the remaining tasks are cancelled."""
    test = getattr(item.obj, "hypothesis", None)
    body = item.obj if test is None else test.inner_test
    if not inspect.iscoroutinefunction(body):
        return

    @functools.wraps(body)
    async def watched(*args: Any, **kwargs: Any) -> None:
        await body(*args, **kwargs)
        await watch.body_ended()

    if test is None:
        item.obj = watched
    else:
        test.inner_test = watched


def _judge(watch: LeakWatch) -> None:
    leaks = watch.found()
    if leaks:
        from trimcp.testing.leaks import spell

        pytest.fail(spell(leaks), pytrace=False)
