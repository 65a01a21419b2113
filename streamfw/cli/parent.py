"""What a parent of worker processes does on signals.

    SIGTERM, SIGINT    drain; a second one ends all at once, with exit code 130
    SIGHUP             replace the workers; drain, when it came because the terminal was closed

A SIGHUP that was ignored when the parent started (nohup) stays ignored.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Generator
from contextlib import contextmanager
from typing import Protocol

from streamfw.runtime.main import Once

__all__ = ["Parent", "heeding_signals"]

logger = logging.getLogger("streamfw")


class Parent(Protocol):
    """Who has worker processes."""

    def __len__(self) -> int:
        """How many processes there are."""
        ...

    def drain(self) -> None:
        """Ask all workers to drain, and start no more."""

    def kill(self) -> None:
        """End all workers at once."""

    def replace(self) -> None:
        """Have other workers take their places."""


@contextmanager
def heeding_signals(parent: Parent) -> Generator[None, None, None]:
    """Let signals of this process act on `parent`."""
    loop = asyncio.get_running_loop()
    signals = _Signals(parent)
    numbers = [signal.SIGINT, signal.SIGTERM]
    for number in numbers:
        loop.add_signal_handler(number, signals.end, signal.Signals(number).name)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        loop.add_signal_handler(signal.SIGHUP, signals.hangup)
        numbers.append(signal.SIGHUP)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


class _Signals:
    def __init__(self, parent: Parent) -> None:
        self._parent = parent
        self._has_terminal = _has_terminal()
        self._draining = False
        self._first = Once()

    def end(self, name: str) -> None:
        if self._draining:
            if self._first.repeats(name):
                return
            logger.warning("%s again: ending %d workers at once", name, len(self._parent))
            self._parent.kill()
            logging.shutdown()
            os._exit(130)
        logger.info("%s: draining %d workers (a second signal ends at once)", name, len(self._parent))
        self._first.note(name)
        self._drain()

    def hangup(self) -> None:
        if self._draining:
            return
        if self._has_terminal and not _has_terminal():
            logger.info("SIGHUP, and the terminal is gone: draining %d workers", len(self._parent))
            self._drain()
        else:
            logger.info("SIGHUP")
            self._parent.replace()

    def _drain(self) -> None:
        self._draining = True
        self._parent.drain()


def _has_terminal() -> bool:
    """Whether this process has a controlling terminal: it ends without one when that is closed."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True
