"""How hard the fuzzing tries: a little and always the same in the plain suite, all of it under `nox -s fuzz`."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Final

from hypothesis import HealthCheck, Phase, settings

__all__ = ["FULL", "MUTATIONS", "PATIENCE", "count", "effort"]

FULL: Final = bool(os.environ.get("TRIMCP_FUZZ"))
"""Whether this is `nox -s fuzz`."""

MUTATIONS: Final = 20_000
"""Of each kind, on each transport, in full: promise 12."""


PATIENCE: Final = 900.0 if FULL else 200.0
"""Seconds after which a test over real transports has hung."""


def count(few: int) -> int:
    """How many mutations a test makes: `few` in the plain suite, which may never become fewer."""
    return MUTATIONS if FULL else few


def effort(few: int, many: int, *, steps: int = 50) -> settings:
    """The settings of a property: `few` examples that are the same in every run, or `many` that are new each time.

    What fails prints a blob that `@reproduce_failure` takes. To make it small takes minutes, and only `nox -s fuzz`
    does.
    """
    return settings(
        max_examples=many if FULL else few,
        stateful_step_count=steps,
        derandomize=not FULL,
        database=None,
        print_blob=True,
        phases=[Phase.explicit, Phase.generate, *([Phase.shrink] if FULL else [])],
        deadline=timedelta(seconds=10) if FULL else None,
        suppress_health_check=list(HealthCheck),
    )
