"""``python -m tests.services.rabbit``: a RabbitMQ node for a command, and for as long as the command runs."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from ._command import run_with
from ._homes import run_directory
from ._rabbit_control import RabbitServerError
from ._rabbit_service import URL, RabbitService

__all__ = ["app"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)


@app.callback()
def main() -> None:
    """A RabbitMQ node for a command, and for as long as the command runs."""


@app.command("run", context_settings={"allow_interspersed_args": False})
def run(command: Annotated[list[str], typer.Argument(metavar="COMMAND...")]) -> None:
    """Start a node, run COMMAND, stop the node, and exit with COMMAND's code.

    In its arguments {url} becomes the node's URL, which is also in the environment as TEST_RABBITMQ_URL. Signals are
    passed on to it; it does not read from the terminal.
    """
    try:
        code = run_with(
            lambda: RabbitService(run_directory(f"command-{os.getpid()}") / "rabbit"),
            lambda service: service.facts().url,
            command,
            URL,
        )
    except RabbitServerError as error:
        print(error, file=sys.stderr)
        code = 1
    raise typer.Exit(code)
