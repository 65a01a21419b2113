"""All commands together."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from . import check, dlq, kafka, postgres, publish, run

__all__ = ["program"]

program = typer.Typer(
    name="streamfw",
    help="Run message handlers over memory, Postgres, Kafka or RabbitMQ, and look after their queues.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
program.command("run")(run.run)
program.command("check")(check.check)
program.command("publish")(publish.publish)
program.add_typer(dlq.commands, name="dlq")
program.add_typer(postgres.commands, name="postgres")
program.add_typer(kafka.commands, name="kafka")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"streamfw {version('streamfw')}")
        raise typer.Exit


@program.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Run message handlers over memory, Postgres, Kafka or RabbitMQ, and look after their queues."""
