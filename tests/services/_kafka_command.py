"""``python -m tests.services.kafka``: a Kafka node for a command, and for as long as the command runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Annotated

import typer

from ._homes import run_directory, running
from ._kafka_cluster import ONE, Cluster, ready_programs
from ._kafka_java import KafkaServerError

__all__ = ["app"]

URL = "TEST_KAFKA_URL"
"""The environment variable; one that begins with STREAMFW_ would be a setting of the app that the command runs."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)


@app.command("fetch")
def fetch() -> None:
    """Fetch the server's programs by Maven, unless they are here."""
    try:
        ready_programs()
    except KafkaServerError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(1) from None


@app.command("run", context_settings={"allow_interspersed_args": False})
def run(command: Annotated[list[str], typer.Argument(metavar="COMMAND...")]) -> None:
    """Start a node, run COMMAND, stop the node, and exit with COMMAND's code.

    In its arguments {url} becomes the node's URL, which is also in the environment as TEST_KAFKA_URL. Signals are
    passed on to it; it does not read from the terminal.
    """
    signals = _Signals()
    try:
        cluster = Cluster(ONE, run_directory(f"command-{os.getpid()}") / ONE.name)
        with running(cluster):
            code = signals.wait_for(command, cluster.facts().url)
            signals.ignored = True  # until the node is stopped
    except KafkaServerError as error:
        print(error, file=sys.stderr)
        code = 1
    raise typer.Exit(code)


class _Signals:
    """Passes signals on to the command. Before it runs the first one ends all; while the node is stopped none does."""

    def __init__(self) -> None:
        self.ignored = False
        self._starting = False
        self._early: list[int] = []
        self._command: subprocess.Popen[bytes] | None = None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._received)

    def wait_for(self, command: Sequence[str], url: str) -> int:
        """Run it to its end and return its exit code; 128 and the number of a signal that ended it."""
        self._starting = True
        try:
            # In a process group of its own: a terminal sends Ctrl-C to our group, and it would get that one twice.
            self._command = subprocess.Popen(
                [argument.replace("{url}", url) for argument in command],
                env={**os.environ, URL: url},
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
