"""``python -m tests.services.kafka``: a Kafka node for a command, and for as long as the command runs."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from ._command import run_with
from ._homes import run_directory
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
    try:
        code = run_with(
            lambda: Cluster(ONE, run_directory(f"command-{os.getpid()}") / ONE.name),
            lambda cluster: cluster.facts().url,
            command,
            URL,
        )
    except KafkaServerError as error:
        print(error, file=sys.stderr)
        code = 1
    raise typer.Exit(code)
