"""What ties a worker process to its supervisor: the worker's end.

Theory of operation
    The supervisor and each of its workers hold one end each of a socket pair. A worker writes once, when its app runs
    (from then on its death is a crash, before it a failed start): how many seconds its end may take after a drain was
    asked for. The supervisor writes nothing; when it shuts its end down, the worker drains. The kernel does the same
    when the supervisor dies, however it dies, so no worker outlives it.

    A drain is not asked for by a signal, because a service manager may signal all processes of a service at once
    (systemd does): the supervisor's signal would be the worker's second, and end it without a drain. So in a worker
    any number of signals and the end of the lifeline are one request; only the supervisor ends it at once (SIGKILL).
    SIGHUP is the supervisor's alone: a worker does not heed it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable

__all__ = ["GRACE", "RUNNING", "Lifeline"]

logger = logging.getLogger("streamfw")

RUNNING = b"r"
GRACE = 30.0  # seconds beyond the app's own drain_timeout, for its last settlements and the closing of its brokers


class Lifeline:
    """Watches file descriptor `fd` from now on, in a thread, so that a blocked event loop does not hide its end."""

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)
        self._socket = socket.socket(fileno=fd)
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: Callable[[str], None] = _nothing
        self.drain_timeout = 0.0
        # A handler, not SIG_IGN: what this process starts would inherit that.
        signal.signal(signal.SIGHUP, lambda number, frame: None)
        threading.Thread(target=self._watch, name="streamfw-lifeline", daemon=True).start()

    def attach(self, loop: asyncio.AbstractEventLoop, stop: Callable[[str], None]) -> None:
        """See `streamfw.runtime.main.Tie`."""
        with self._lock:
            self._loop, self._stop = loop, stop

    def started(self) -> None:
        """Tell the supervisor that the app runs, and what a drain may take."""
        try:
            self._socket.send(RUNNING + b"%g" % (self.drain_timeout + GRACE))
        except OSError:
            pass  # the supervisor is gone: the watch sees that, too

    def ended(self) -> None:
        """Nothing is left to ask for."""
        with self._lock:
            self._stop = _nothing

    def _watch(self) -> None:
        try:
            self._socket.recv(1)
        except OSError:
            pass
        with self._lock:
            if self._loop is None:
                os._exit(0)  # still importing: nothing is connected, nothing to drain
            try:
                self._loop.call_soon_threadsafe(self._stop, "the supervisor asks for it")
            except RuntimeError:
                return  # the loop has ended, and the process is about to
        patience = self.drain_timeout + GRACE
        time.sleep(patience)
        logger.error("not drained %.0f s after it was asked for: a handler blocks; ending", patience)
        logging.shutdown()
        os._exit(1)


def _nothing(reason: str) -> None:
    """No app runs (yet, or any more)."""
