"""What ties a worker process to its supervisor: the worker's end.

Theory of operation
    The supervisor and each of its workers hold one end each of a socket pair. A worker writes one byte when its app
    runs: from then on its death is a crash, before it a failed start. The supervisor writes nothing; when it shuts its
    end down, the worker drains. The kernel does the same when the supervisor dies, however it dies, so no worker
    outlives it.

    A drain is not asked for by a signal, because a service manager may signal all processes of a service at once
    (systemd does): the supervisor's signal would be the worker's second, and end it without a drain. So in a worker
    any number of signals and the end of the lifeline are one request; only the supervisor ends it at once (SIGKILL).
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from streamfw.app import App

__all__ = ["RUNNING", "Lifeline"]

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
        self._patience = GRACE
        self._asked = False
        threading.Thread(target=self._watch, name="streamfw-lifeline", daemon=True).start()

    def hold(self, app: App) -> None:
        """Tell the supervisor when `app` runs, and drain it when the lifeline ends."""
        running = app.running

        @asynccontextmanager
        async def held() -> AsyncGenerator[App, None]:
            # `App.run` has set its own handlers by now: SIGINT stays its, and everything else becomes one SIGINT.
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGTERM, self._ask)
            with self._lock:
                self._loop, self._patience = loop, app.settings.drain_timeout + GRACE
            try:
                async with running() as same:
                    self._report()
                    yield same
            finally:
                self._asked = True  # drained: from here on the handler of SIGINT may be Python's own

        vars(app)["running"] = held

    def _report(self) -> None:
        try:
            self._socket.send(RUNNING)
        except OSError:
            pass  # the supervisor is gone: the watch sees that, too

    def _ask(self) -> None:
        if not self._asked:
            self._asked = True
            signal.raise_signal(signal.SIGINT)

    def _watch(self) -> None:
        try:
            self._socket.recv(1)
        except OSError:
            pass
        with self._lock:
            if self._loop is None:
                os._exit(0)  # still importing: nothing is connected, nothing to drain
            try:
                self._loop.call_soon_threadsafe(self._ask)
            except RuntimeError:
                return  # the loop has ended, and the process is about to
        time.sleep(self._patience)
        logger.error("not drained %.0f s after it was asked for: a handler blocks; ending", self._patience)
        logging.shutdown()
        os._exit(1)
