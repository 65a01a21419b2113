"""The errors of handlers, until the test has seen them."""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager
from typing import TypeVar

__all__ = ["Failures"]

E = TypeVar("E", bound=Exception)


class _Expectation:
    def __init__(self, kinds: type[Exception] | tuple[type[Exception], ...], match: str | None) -> None:
        self.kinds, self.pattern = kinds, match
        self.found: list[Exception] = []

    def takes(self, error: Exception) -> bool:
        fits = isinstance(error, self.kinds) and (self.pattern is None or re.search(self.pattern, str(error)))
        if fits:
            self.found.append(error)
        return bool(fits)

    def __str__(self) -> str:
        kinds = self.kinds if isinstance(self.kinds, tuple) else (self.kinds,)
        names = " or ".join(kind.__name__ for kind in kinds)
        return names if self.pattern is None else f"{names} matching {self.pattern!r}"


class Failures:
    """Errors that nobody expected wait here to be raised; with `keep` False they are let go."""

    def __init__(self, keep: bool) -> None:
        self._keep = keep
        self._pending: list[Exception] = []
        self._expected: list[_Expectation] = []

    def add(self, error: Exception, note: str) -> None:
        """A handler raised `error`; `note` says which and when."""
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        if any(expectation.takes(error) for expectation in reversed(self._expected)):
            return
        if self._keep and not any(error is one for one in self._pending):
            self._pending.append(error)

    @property
    def pending(self) -> bool:
        return bool(self._pending)

    def take(self) -> list[Exception]:
        """Those that wait, which are seen now."""
        pending, self._pending = self._pending, []
        return pending

    def raise_pending(self) -> None:
        """Raise what waits: one error as it is, several as an `ExceptionGroup`."""
        pending = self.take()
        if len(pending) == 1:
            raise pending[0]
        if pending:
            raise ExceptionGroup(f"{len(pending)} handlers raised", pending)

    @contextmanager
    def expect(self, kinds: type[E] | tuple[type[E], ...], match: str | None) -> Generator[list[Exception], None, None]:
        """Let errors of these kinds pass within the block. Raises `AssertionError` at its end if there was none."""
        expectation = _Expectation(kinds, match)
        self._expected.append(expectation)
        try:
            yield expectation.found
        finally:
            self._expected.remove(expectation)
        if not expectation.found:
            others = ", ".join(repr(error) for error in self._pending)
            raise AssertionError(
                f"no handler raised {expectation}"
                + (f", but {others}" if others else "; was there an `await tb.settle()` in the block?")
            )
