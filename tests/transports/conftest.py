"""The clock of tests in real time that are about limits of it."""

from tests.clocks import steady_clock as steady_clock
