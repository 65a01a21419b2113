"""The scenarios, by name. A module is imported only when it is run, for what it needs may not be installed."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from benchmarks.harness import Scenario

if TYPE_CHECKING:
    from .code import Counted

__all__ = ["LOOPS", "NAMES", "scenario"]

# By name, the loop that it runs on unless told otherwise. `App.run` takes uvloop where it is installed.
LOOPS = {
    "dispatch": "asyncio",
    "postgres": "uvloop",
    "postgres_locks": "uvloop",
    "kafka": "uvloop",
    "rabbit": "uvloop",
    "code": "asyncio",
}
NAMES = tuple(LOOPS)


def scenario(name: str, loop: str) -> Scenario | Counted:
    """Load a scenario to run on an event loop (``asyncio`` or ``uvloop``)."""
    made: Scenario | Counted = import_module(f"benchmarks.scenarios.{name}").scenario(loop)
    return made
