"""Running a command with a test server that is there for as long as the command runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from types import FrameType

from ._homes import AnyService, running

__all__ = ["run_with"]


def run_with(
    make: Callable[[], AnyService], url: Callable[[AnyService], str], command: Sequence[str], variable: str
) -> int:
    """Start the server that `make` returns, run the command, stop the server; return the command's exit code.

    In its arguments {url} becomes the server's URL, which is also in the environment as `variable`. Signals are passed
    on to it; it does not read from the terminal.
    """
    signals = _Signals()
    with running(make()) as service:
        code = signals.wait_for(command, url(service), variable)
        signals.ignored = True  # until the server is stopped
    return code


class _Signals:
    """Passes signals on to the command. Before it runs the first ends all; while the server is stopped none does."""

    def __init__(self) -> None:
        self.ignored = False
        self._starting = False
        self._early: list[int] = []
        self._command: subprocess.Popen[bytes] | None = None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._received)

    def wait_for(self, command: Sequence[str], url: str, variable: str) -> int:
        """Run it to its end and return its exit code; 128 and the number of a signal that ended it."""
        self._starting = True
        try:
            # In a process group of its own: a terminal sends Ctrl-C to our group, and it would get that one twice.
            self._command = subprocess.Popen(
                [argument.replace("{url}", url) for argument in command],
                env={**os.environ, variable: url},
                stdin=subprocess.DEVNULL if sys.stdin is None or sys.stdin.isatty() else None,
                process_group=0,
            )
        except OSError as error:
            print(f"cannot run {command[0]}: {error}", file=sys.stderr)
            return 127
        for number in self._early:
            self._pass_on(number)
        code = self._command.wait()
        return 128 - code if code < 0 else code

    def _received(self, number: int, frame: FrameType | None) -> None:
        if self._command is not None:
            self._pass_on(number)
        elif self._starting:
            self._early.append(number)
        elif not self.ignored:
            self.ignored = True
            raise SystemExit(128 + number)

    def _pass_on(self, number: int) -> None:
        assert self._command is not None
        if self._command.returncode is None:
            try:
                os.killpg(self._command.pid, number)
            except ProcessLookupError:
                pass
