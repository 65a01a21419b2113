"""The service as processes of its own, so that one of them can be killed."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

__all__ = ["Workers", "running_workers"]

ROOT: Final = Path(__file__).parents[2]
GRACE: Final = 15.0  # seconds for a drain


class Workers:
    """Running worker processes; their output is in files, for when one fails."""

    def __init__(self, processes: Sequence[Process], logs: Sequence[Path]) -> None:
        self._processes = processes
        self._logs = logs
        self.killed: int | None = None

    async def kill(self, at_work: Callable[[], Awaitable[int]], busy: Callable[[int], Awaitable[bool]]) -> int:
        """SIGKILL the one that is `at_work` now, when `busy` says that it is in the middle of a message: stop it to
        look, and let it go on if not. Which one it was."""
        while True:
            pid = await at_work()
            process = next(process for process in self._processes if process.pid == pid)
            process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(0.05)  # what it has sent already is done by then
            if await busy(pid):
                break
            process.send_signal(signal.SIGCONT)
            await asyncio.sleep(0.01)
        process.kill()
        self.killed = pid
        return pid

    def failed(self) -> str | None:
        """What a worker said that ended by itself."""
        for process, log in zip(self._processes, self._logs, strict=True):
            if process.returncode is not None and process.pid != self.killed:
                return f"worker {process.pid} ended with exit code {process.returncode}; it said:\n{_last_words(log)}"
        return None

    def said(self) -> str:
        """The last lines of all of them."""
        return "\n".join(
            f"worker {process.pid} said:\n{_last_words(log)}"
            for process, log in zip(self._processes, self._logs, strict=True)
        )

    async def stop(self) -> None:
        """Let them drain, then see that they are gone. Twice is once."""
        running = [process for process in self._processes if process.returncode is None]
        for process in running:
            process.terminate()
        if running:
            _, late = await asyncio.wait([asyncio.ensure_future(p.wait()) for p in running], timeout=GRACE)
            for process in running if late else ():
                if process.returncode is None:
                    process.kill()
        await asyncio.gather(*(process.wait() for process in self._processes))


def _last_words(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-15:])


@asynccontextmanager
async def running_workers(count: int, environment: Mapping[str, str]) -> AsyncIterator[Workers]:
    """Run the service in `count` processes for the life of the context."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with TemporaryDirectory(prefix="webhooks-demo-") as directory:
        logs = [Path(directory) / f"worker-{number}.log" for number in range(count)]
        processes: list[Process] = []
        workers = Workers(processes, logs)
        try:
            for log in logs:
                with log.open("wb") as output:
                    process = await asyncio.create_subprocess_exec(
                        sys.executable,
                        "-m",
                        "examples.webhooks.worker",
                        env={**os.environ, **environment, "PYTHONPATH": path},
                        stdin=asyncio.subprocess.PIPE,
                        stdout=output,
                        stderr=output,
                        start_new_session=True,  # Ctrl-C is for the demo, which then lets them drain
                    )
                processes.append(process)
            yield workers
        finally:
            await workers.stop()
