"""For tests: `TestApp` runs an app in process; `streamfw.testing.conformance` proves a broker.

Everything is imported when it is first used, so that pytest's plugin costs nothing where it is not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._records import Published, Received
    from ._work import NotSettled
    from .app import TestApp

__all__ = ["NotSettled", "Published", "Received", "TestApp"]

_PLACES = {"NotSettled": "._work", "Published": "._records", "Received": "._records", "TestApp": ".app"}


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_PLACES[name], __name__), name)
