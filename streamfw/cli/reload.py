"""``streamfw run --reload``: watch the source, and let new processes run it after each change.

Theory of operation
    One *generation* of worker processes runs at a time. After a change it is drained (as by SIGTERM: handlers finish,
    within the app's drain_timeout; what they do not finish is given back), and the next one starts when the last of its
    processes has ended: old and new code never run at the same time, and what the old one did not do the new one does.

        watching --> generation --change--> drain --> generation
                                --cannot start--> said, wait for a change --> generation
        anywhere --SIGTERM--> drain --> end

    The watch is there before the first process, so a change while that imports is seen. What changes within a tenth of
    a second (an editor's rename, a checkout) is one change.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from .fleet import Fleet
from .output import CommandError
from .worker import first_of

try:
    from watchfiles import Change, DefaultFilter, awatch  # pyright: ignore[reportUnknownVariableType]
except ImportError as error:
    raise CommandError("--reload needs watchfiles; install it with: pip install 'streamfw[cli]'") from error

__all__ = ["Reloader"]

logger = logging.getLogger("streamfw")

_QUIET = 100  # milliseconds without a change that end a group of changes
_AT_MOST = 2000  # milliseconds that a group of changes may take


class Reloader:
    """Runs one fleet after another, each made by `make`, until it is drained."""

    def __init__(self, make: Callable[[], Fleet], directories: Sequence[Path], config: Path) -> None:
        self._make = make
        self._source = Source(directories, config)
        self._fleet: Fleet | None = None
        self._watching = asyncio.Event()  # from here on no change is missed
        self._changed = asyncio.Event()
        self._draining = asyncio.Event()

    async def run(self) -> int:
        """Until `drain`. The exit code: 1 when a worker did not drain at the end. Raises `CommandError`."""
        logging.getLogger("watchfiles").setLevel(logging.WARNING)
        code = 0
        watch = asyncio.create_task(self._watch())
        try:
            await first_of(self._watching, watch)
            while not self._draining.is_set() and not watch.done():
                code = await self._generation(watch)
        finally:
            self._draining.set()
            await watch
        return code

    def __len__(self) -> int:
        """How many processes there are now."""
        return 0 if self._fleet is None else len(self._fleet)

    def drain(self) -> None:
        """Drain, and end."""
        self._draining.set()

    def kill(self) -> None:
        """End all workers at once."""
        if self._fleet is not None:
            self._fleet.kill()

    def replace(self) -> None:
        """As after a change."""
        self._changed.set()

    async def _generation(self, watch: asyncio.Task[None]) -> int:
        self._changed.clear()
        fleet = self._fleet = self._make()
        running = asyncio.create_task(fleet.run())
        try:
            await first_of(running, self._changed, self._draining, watch)
            if running.done() and not self._changed.is_set():
                logger.error("the app cannot run: waiting for a change in %s", self._source)
                await first_of(self._changed, self._draining, watch)
                return 0
        finally:
            fleet.drain()
            code = await running
        return code

    async def _watch(self) -> None:
        """Set `_changed` after each change, until `_draining`."""
        try:
            async with asyncio.TaskGroup() as watches:
                began = [asyncio.Event() for _ in self._source.places]
                for (path, recursive), begun in zip(self._source.places, began, strict=True):
                    watches.create_task(self._watch_place(path, recursive, begun))
                for begun in began:
                    await begun.wait()
                self._watching.set()
        except ExceptionGroup as errors:
            of_the_system, others = errors.split((OSError, RuntimeError))
            if of_the_system is None or others is not None:
                raise
            raise CommandError(f"cannot watch {self._source}: {of_the_system.exceptions[0]}") from None

    async def _watch_place(self, path: Path, recursive: bool, begun: asyncio.Event) -> None:
        changes = awatch(
            path,
            watch_filter=self._source,
            debounce=_AT_MOST,
            step=_QUIET,
            rust_timeout=_QUIET,
            yield_on_timeout=True,
            stop_event=self._draining,
            recursive=recursive,
        )
        async for group in changes:
            begun.set()
            if group:
                logger.info("changed: %s", ", ".join(sorted({path for _, path in group})[:5]))
                self._changed.set()


class Source(DefaultFilter):
    """What belongs to the app: ``.py`` files below the directories (not in .venv, node_modules and the like), and the
    configuration file."""

    def __init__(self, directories: Sequence[Path], config: Path) -> None:
        super().__init__()
        self._directories = [directory.resolve() for directory in directories]
        self._config = config.resolve()

    @property
    def places(self) -> list[tuple[Path, bool]]:
        """What to watch, and whether with all that is below it."""
        places = [(directory, True) for directory in self._directories]
        beside = self._config.parent
        if beside.is_dir() and not any(beside.is_relative_to(directory) for directory in self._directories):
            places.append((beside, False))
        return places

    def __str__(self) -> str:
        return ", ".join(map(str, self._directories))

    def __call__(self, change: Change, path: str) -> bool:
        """Whether a change of `path` is one of the app's."""
        if path == str(self._config):
            return True
        for directory in self._directories:
            # Where the directory itself lies does not matter: it was asked for.
            if path.startswith(f"{directory}{os.sep}") and path.endswith(".py"):
                return super().__call__(change, os.path.relpath(path, directory))
        return False
