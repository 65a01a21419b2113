"""A plugin: a connection that outlives its event loop fails the test that left it open, and says who made it.

Without it the garbage collector finds the connection, some tests later: those fail that have nothing to do with it.
"""

from __future__ import annotations

import traceback
import weakref
from asyncio import selector_events
from collections.abc import Generator
from typing import Any

import pytest

_Transport: Any = selector_events._SelectorSocketTransport  # type: ignore[attr-defined]
_opened: weakref.WeakKeyDictionary[Any, traceback.StackSummary] = weakref.WeakKeyDictionary()
_begin = _Transport.__init__


def _begin_and_note(self: Any, *args: Any, **kwargs: Any) -> None:
    _begin(self, *args, **kwargs)
    frames = traceback.walk_stack(None)
    _opened[self] = traceback.StackSummary.extract(frames, limit=16, lookup_lines=False)


_Transport.__init__ = _begin_and_note


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """After the fixtures, of which the event loop is one."""
    result = yield
    left = [(transport, stack) for transport, stack in _opened.items() if _is_left(transport)]
    if left:
        for transport, _ in left:
            del _opened[transport]
            transport._sock.close()
            transport._sock = None  # it is told of here, not by its __del__
        made = {"".join(reversed(stack.format())) for _, stack in left}
        pytest.fail(f"it left {len(left)} connections open, made by\n" + "\nand by\n".join(made), pytrace=False)
    return result


def _is_left(transport: Any) -> bool:
    return transport._sock is not None and transport._loop.is_closed()
