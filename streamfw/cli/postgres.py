"""``streamfw postgres``: the schema's migrations, and how its queues are.

The Postgres package is looked up when a command runs, as brokers are: the core imports none of them.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import msgspec
import typer

from streamfw.broker import Broker

from .brokers import broker_of_kind
from .output import BrokerUrl, age, cell, console, reporting, say, table

__all__ = ["commands"]

commands = typer.Typer(help="Look after the tables of the Postgres broker.", no_args_is_help=True)


@commands.command("migrate")
@reporting
def migrate(
    broker: BrokerUrl = None,
    plan: Annotated[bool, typer.Option("--plan", help="Print the SQL that would run, and change nothing.")] = False,
) -> None:
    """Bring the schema up to date. Safe while the service runs, and from many processes at once."""
    package, target = broker_of_kind(broker, "Postgres", "postgres://..")
    steps: list[str] = asyncio.run(package.migrate(target, plan=plan))
    if plan:
        print("\n\n".join(steps) if steps else "-- up to date: nothing to do")
    elif steps:
        for step in steps:
            say(f"applied {step}")
    else:
        say("up to date: nothing to do")


@commands.command("status")
@reporting
def status(
    broker: BrokerUrl = None,
    json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
) -> None:
    """Show what waits in every queue, since when, and how the table is."""
    _, target = broker_of_kind(broker, "Postgres", "postgres://..")
    found = asyncio.run(_status(target))
    if json:
        print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
        return
    _show_queues([msgspec.structs.asdict(queue) for queue in found.queues])
    _show_table(msgspec.structs.asdict(found.table))


async def _status(broker: Broker) -> Any:
    async with broker.connect() as connection:
        postgres: Any = connection
        return await postgres.status()


def _show_queues(queues: list[dict[str, Any]]) -> None:
    if not queues:
        say("There are no queues yet.")
        return
    columns = list(queues[0])
    shown = table(*(column.replace("_", " ") for column in columns), title="Queues")
    for column, first in zip(shown.columns, queues[0].values(), strict=True):
        column.justify = "left" if isinstance(first, str | bool) else "right"
    for queue in queues:
        shown.add_row(*(cell(_cell(column, value)) for column, value in queue.items()))
    console().print(shown)


def _show_table(facts: dict[str, Any]) -> None:
    shown = table("", "", title="Table")
    shown.show_header = False
    for name, value in facts.items():
        shown.add_row(name.replace("_", " "), _cell(name, value))
    console().print(shown)


_AGES = {"oldest", "vacuumed", "oldest_transaction"}  # in seconds


def _cell(name: str, value: object) -> str:
    if value is None:
        return "never"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name in _AGES and isinstance(value, int | float):
        return f"{age(value)} ago" if name == "vacuumed" else age(value)
    if isinstance(value, int):
        return f"{value:,}"
    if name == "group" and not value:
        return "(none yet)"
    return str(value)
