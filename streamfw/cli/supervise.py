"""An app in processes under a parent: for a service (`supervise`), and for whoever is writing it (`reload`)."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from .fleet import Fleet
from .parent import heeding_signals

__all__ = ["reload", "supervise"]


def supervise(arguments: Sequence[str], workers: int) -> int:
    """Run ``streamfw`` with `arguments` in `workers` processes until a signal; return the exit code: 0 after a drain,
    1 when a worker could not start or did not drain. A second signal ends all at once, with 130."""

    async def run() -> int:
        fleet = Fleet(_command(arguments), workers)
        with heeding_signals(fleet):
            return await fleet.run()

    return asyncio.run(run())


def reload(arguments: Sequence[str], workers: int, directories: Sequence[Path], config: Path) -> int:
    """The same, with new processes in the place of the old ones after each change of the source in `directories` or
    of the configuration file. What cannot start waits for the next change.

    Raises `CommandError` when the directories cannot be watched.
    """
    from .reload import Reloader

    # A module saved twice within a second, with as many bytes, would be taken from the first one's byte code.
    environ = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}

    async def run() -> int:
        reloader = Reloader(lambda: Fleet(_command(arguments), workers, environ), directories, config)
        with heeding_signals(reloader):
            return await reloader.run()

    return asyncio.run(run())


def _command(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "streamfw.cli", *arguments]
