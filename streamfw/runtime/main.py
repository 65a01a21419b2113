"""An app as a process: signals, exit codes, and the loop it runs on.

    SIGTERM, SIGINT    drain; a second one ends at once, with exit code 130
    SIGHUP             drain; however often it comes (a terminal that closes may send it twice)

A SIGHUP that is ignored when the app starts (nohup) stays ignored. An app that is supervised drains when its
supervisor asks for it or ends, and at SIGTERM or SIGINT, however often; SIGHUP is its supervisor's business.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Protocol

from streamfw.errors import BrokerError, StreamError

if TYPE_CHECKING:
    from streamfw.app import App

__all__ = ["Once", "Tie", "run"]

logger = logging.getLogger("streamfw")
SAME = 0.2  # seconds within which the same signal is the same request


class Tie(Protocol):
    """What ties the process to one that supervises it. With a tie any number of signals is one request to drain: a
    service manager may signal all processes of a service at once, and only the supervisor ends this one harder."""

    def attach(self, loop: asyncio.AbstractEventLoop, stop: Callable[[str], None]) -> None:
        """The loop runs; `stop` (to be called in it, with the reason) asks for a drain."""

    def started(self) -> None:
        """The app runs."""

    def ended(self) -> None:
        """The app has drained, or failed; the process is about to end."""


def run(app: App, wait: float | None = None, tie: Tie | None = None) -> int:
    """Run `app` until a signal; return the exit code: 0 after a drain, 1 after a failure. A second SIGTERM or SIGINT
    ends the process at once, with 130 (not with a `tie`)."""
    app.configure_logging(process=tie is not None)
    try:
        app.build()
    except ExceptionGroup as errors:
        print(str(errors.args[0]).rstrip(), file=sys.stderr)
        return 1
    if wait is not None:
        app.settings.wait = wait
    return _run(_main(app, tie), uvloop=app.settings.uvloop)


def _run(main: Coroutine[Any, Any, int], uvloop: bool) -> int:
    factory = None
    if uvloop:
        try:
            import uvloop as installed

            factory = installed.new_event_loop
        except ImportError:
            pass
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.get_loop().set_exception_handler(_note)
        return runner.run(main)


def _note(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """What happened in the loop, where nobody waits for it. That a name has no address is told to whoever connects: of
    a look-up that he has broken off meanwhile, uvloop complains here besides."""
    if not isinstance(context.get("exception"), socket.gaierror):
        loop.default_exception_handler(context)


class Once:
    """Tells a person's second signal from one signal that came twice: ``timeout`` and some shells signal a process and
    then its whole group, within milliseconds."""

    def __init__(self) -> None:
        self._name, self._at = "", 0.0

    def note(self, name: str) -> None:
        """The first signal, just now."""
        self._name, self._at = name, time.monotonic()

    def repeats(self, name: str) -> bool:
        """Whether a signal of this name is the first one again."""
        return name == self._name and time.monotonic() - self._at < SAME


async def _main(app: App, tie: Tie | None) -> int:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    main = asyncio.current_task()
    assert main is not None
    started = False

    first: Once = Once()

    def stop(reason: str) -> None:
        if stopped.is_set():
            if tie is not None or first.repeats(reason):
                return
            logger.warning("%s again: ending at once", reason)
            logging.shutdown()
            os._exit(130)
        logger.info("%s: draining%s", reason, "" if tie is not None else " (a second signal ends at once)")
        stopped.set()
        first.note(reason)
        if not started:  # still waiting for a server: nothing to drain
            main.cancel()

    def hang_up() -> None:
        if not stopped.is_set():
            stop("SIGHUP")

    numbers = [signal.SIGINT, signal.SIGTERM]
    for number in numbers:
        loop.add_signal_handler(number, stop, signal.Signals(number).name)
    if tie is None and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        loop.add_signal_handler(signal.SIGHUP, hang_up)
        numbers.append(signal.SIGHUP)
    if tie is not None:
        tie.attach(loop, stop)
    try:
        async with app.running(ends_process=True):
            started = True
            if tie is not None:
                tie.started()
            await stopped.wait()
    except asyncio.CancelledError:
        if not stopped.is_set():
            raise
    except BrokerError as error:
        logger.error("%s", error)
        return 1
    except ExceptionGroup as errors:
        for one in errors.exceptions:
            logger.error("%s", one, exc_info=None if isinstance(one, StreamError) else one)
        return 1
    except Exception as error:
        logger.exception("the app failed: %r", error, extra={"error_type": type(error).__qualname__})
        return 1
    finally:
        if tie is not None:
            tie.ended()
        for number in numbers:
            loop.remove_signal_handler(number)
    logger.info("drained")
    return 0
