"""Processes of a fault suite, with numbered names; each writes its ledger, and what it prints is kept beside it."""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import Callable, Sequence
from pathlib import Path

__all__ = ["Processes"]

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 40.0  # seconds for a process to drain


class Processes:
    """Each is ``python -m tests.faults.<module>`` with the arguments that `arguments` makes for its ledger."""

    def __init__(self, directory: Path, module: str, arguments: Callable[[Path], Sequence[str]], called: str) -> None:
        self._directory, self._module, self._arguments, self._called = directory, module, arguments, called
        self._alive: dict[str, Process] = {}
        self._leaving: dict[str, Process] = {}
        self._count = 0

    @property
    def names(self) -> list[str]:
        """Those that are neither killed nor leaving."""
        return list(self._alive)

    async def start(self) -> str:
        """Start one more, and return its name."""
        self._count += 1
        name = f"{self._called}{self._count:03}"
        with (self._directory / f"{name}.err").open("wb") as log:
            self._alive[name] = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                f"tests.faults.{self._module}",
                *self._arguments(self._directory / f"{name}.log"),
                cwd=ROOT,
                stdout=log,
                stderr=log,
            )
        return name

    async def kill(self, name: str) -> None:
        """SIGKILL."""
        process = self._alive.pop(name)
        process.kill()
        await process.wait()

    def leave(self, name: str) -> None:
        """SIGTERM: it drains and ends (`gone` looks how)."""
        self._leaving[name] = process = self._alive.pop(name)
        if process.returncode is None:
            process.terminate()

    async def gone(self) -> None:
        """Wait for those that leave; each must exit with 0."""
        for name, process in self._leaving.items():
            code = await asyncio.wait_for(process.wait(), PATIENCE)
            # One that is still importing ends by the signal itself; it has taken nothing.
            early = code == -signal.SIGTERM and not self.begun(name)
            assert code == 0 or early, f"{name} ended with {code} after SIGTERM: {self.tail(name)}"
        self._leaving.clear()

    async def end(self) -> None:
        """Let all leave, and wait for that."""
        for name in self.names:
            self.leave(name)
        await self.gone()

    def check(self) -> None:
        """None ends by itself."""
        for name, process in self._alive.items():
            assert process.returncode is None, f"{name} ended with {process.returncode}: {self.tail(name)}"

    async def abandon(self) -> None:
        """SIGKILL to all that are left."""
        for process in (*self._alive.values(), *self._leaving.values()):
            if process.returncode is None:
                process.kill()
            await process.wait()

    def begun(self, name: str) -> bool:
        """Whether it has written something into its ledger."""
        path = self._directory / f"{name}.log"
        return path.exists() and path.stat().st_size > 0

    def tail(self, name: str) -> str:
        """The end of what it printed."""
        return (self._directory / f"{name}.err").read_text()[-2000:]
