"""Work that waits, written once and driven from a thread or from an event loop.

Starting a server is: do something short, wait a little, look again. Such work is a generator here that yields the
seconds to wait before it goes on. `run` drives it with `time.sleep`; `run_async` makes each short piece in a
thread and waits in the event loop, so that nothing blocks and a cancellation ends the work at its next wait.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Generator
from pathlib import Path
from typing import TypeAlias

import anyio
import anyio.to_thread
from anyio import CancelScope, CapacityLimiter

from streamfw.errors import BrokerRefused

__all__ = ["POLL", "EmbeddedError", "Steps", "lock_file", "run", "run_async", "try_lock"]

Steps: TypeAlias = Generator[float, None, None]

POLL = 0.005
"""Seconds between two looks at a lock or at a server's state."""


class EmbeddedError(BrokerRefused):
    """The embedded server cannot be had; the message says why, where, and what to do. Never holds its password."""


def run(steps: Steps) -> None:
    """Do the work here, blocking this thread. After an interrupt the generator is closed before it is raised."""
    try:
        for delay in steps:
            time.sleep(delay)
    finally:
        steps.close()


async def run_async(steps: Steps) -> None:
    """Do the work without blocking the event loop. After a cancellation the generator is closed before it is raised."""
    limiter = CapacityLimiter(1)  # the default limiter may be full of handlers that wait for this very server
    try:
        while (delay := await anyio.to_thread.run_sync(next, steps, None, limiter=limiter)) is not None:  # noqa: ASYNC110
            await anyio.sleep(delay)
    finally:
        with CancelScope(shield=True):
            await anyio.to_thread.run_sync(steps.close, limiter=limiter)


def lock_file(path: Path) -> int:
    """Open the file that carries a lock, made with mode 0600; what is executed does not inherit it."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def try_lock(fd: int, kind: int) -> bool:
    """Take the flock (`fcntl.LOCK_SH` or `LOCK_EX`) if nobody is in the way; say whether it was taken."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
