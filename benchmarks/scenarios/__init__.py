"""The scenarios, by name. A module is imported only when it is run, for what it needs may not be installed."""

from __future__ import annotations

from importlib import import_module

from benchmarks.harness import Scenario

__all__ = ["NAMES", "scenario"]

NAMES = ("dispatch", "postgres", "code")


def scenario(name: str, loop: str) -> Scenario:
    """Load a scenario to run on an event loop (``asyncio`` or ``uvloop``)."""
    made: Scenario = import_module(f"benchmarks.scenarios.{name}").scenario(loop)
    return made
