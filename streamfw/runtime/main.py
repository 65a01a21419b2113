"""An app as a process: signals, exit codes, and the loop it runs on."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from streamfw.errors import BrokerError, StreamError

if TYPE_CHECKING:
    from streamfw.app import App

__all__ = ["run"]

logger = logging.getLogger("streamfw")


def run(app: App, wait: float | None = None) -> int:
    """Run `app` until a signal; return the exit code: 0 after a drain, 1 after a failure. A second signal ends the
    process at once, with 130."""
    if not logging.getLogger().handlers:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        app.build()
    except ExceptionGroup as errors:
        print(str(errors.args[0]).rstrip(), file=sys.stderr)
        return 1
    if wait is not None:
        app.settings.wait = wait
    return _run(_main(app), uvloop=app.settings.uvloop)


def _run(main: Coroutine[Any, Any, int], uvloop: bool) -> int:
    factory = None
    if uvloop:
        try:
            import uvloop as installed

            factory = installed.new_event_loop
        except ImportError:
            pass
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)


async def _main(app: App) -> int:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    main = asyncio.current_task()
    assert main is not None
    started = False

    def on_signal(number: int) -> None:
        if stopped.is_set():
            logger.warning("%s again: ending at once", signal.Signals(number).name)
            logging.shutdown()
            os._exit(130)
        logger.info("%s: draining (a second signal ends at once)", signal.Signals(number).name)
        stopped.set()
        if not started:  # still waiting for a server: nothing to drain
            main.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    try:
        async with app.running():
            started = True
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
    except Exception:
        logger.exception("the app failed")
        return 1
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
    logger.info("drained")
    return 0
