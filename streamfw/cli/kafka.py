"""``streamfw kafka``: how consumer groups are, and moving or forgetting one that does not run.

The Kafka package is looked up when a command runs, as brokers are: the core imports none of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from typing import Annotated, Any, TypeVar

import msgspec
import typer

from streamfw.broker import Position
from streamfw.config import near as near_word
from streamfw.texts import one_line

from .brokers import broker_of_kind
from .output import BrokerUrl, CommandError, age, cell, console, reporting, say, table

__all__ = ["commands"]

T = TypeVar("T")

commands = typer.Typer(help="Look at consumer groups of the Kafka broker, move or forget them.", no_args_is_help=True)

Groups = Annotated[list[str] | None, typer.Option("--group", metavar="GROUP", help="This group; may be repeated.")]


def _with_kafka(url: str | None, do: Callable[[Any], Awaitable[T]]) -> T:
    """`do` with a connection of the broker, which is one of Kafka's."""
    _, broker = broker_of_kind(url, "Kafka", "kafka://..")

    async def connected() -> T:
        async with broker.connect() as connection:
            return await do(connection)

    return asyncio.run(connected())


# -- status


@commands.command("status")
@reporting
def status(
    broker: BrokerUrl = None,
    group: Groups = None,
    json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
) -> None:
    """Show how far each group has read each partition, what is not settled, and which message holds it back.

    What is open is what its process told with its last commit, at most a few seconds ago; of groups that are not
    streamfw's it is not known.
    """
    found, near = _with_kafka(broker, lambda connection: _look(connection, group))
    there = [one for one in found if one.state != "Dead"]
    if json:
        print(msgspec.json.format(msgspec.json.encode(there), indent=2).decode())
    elif not there and not group:
        say("There are no groups yet.")
    else:
        for one in there:
            _show(one)
    if near:
        raise CommandError(f"no such group: {', '.join(f'{name!r}{close}' for name, close in near.items())}")


async def _look(connection: Any, groups: Sequence[str] | None) -> tuple[list[Any], dict[str, str]]:
    """How these groups are, and of those that are not there what is near."""
    found = await connection.status(groups)
    if groups is None:  # those that went meanwhile are nobody's loss
        return found, {}
    return found, {one.group: await connection.near_group(one.group) for one in found if one.state == "Dead"}


_COLUMNS = ("topic", "partition", "committed", "end", "lag", "open", "read to", "blocking", "for", "member")
_WORDS = ("topic", "member", "waiting")


def _show(group: Any) -> None:
    count = len(group.members)
    members = f"{count} member{'' if count == 1 else 's'}"
    if group.state == "Unknown":
        members = "of another protocol (KIP-848), so its members are not known"
    say(f"{one_line(group.group)}: {group.state}, {members}", "bold")
    if not group.partitions:
        say("It has read nothing yet.")
        return
    who = {member.member_id: f"{member.client_id}{member.host}" for member in group.members}
    waiting = [_waiting(one) for one in group.partitions]
    columns = (*_COLUMNS, "waiting") if any(waiting) else _COLUMNS
    shown = table(*columns, right=[column for column in columns if column not in _WORDS])
    for one, waits in zip(group.partitions, waiting, strict=True):
        numbers = (one.committed, one.end, one.lag, one.open, one.read_to, one.blocking)
        blocked = "" if one.since is None else age(max(0.0, time.time() - one.since))
        member = who.get(one.member, "")
        cells = (one.topic, str(one.partition), *map(_number, numbers), blocked, member, waits)
        shown.add_row(*map(cell, cells[: len(columns)]))
    console().print(shown)


def _waiting(partition: Any) -> str:
    """What the lag of a retry topic means: messages that wait there until it is time for them."""
    if not partition.retry:
        return ""
    if partition.due is None:
        return "retry topic"
    left = partition.due - time.time()
    return f"retry topic, the first due {f'in {age(left)}' if left > 0 else 'now'}"


def _number(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


# -- seek


@commands.command("seek")
@reporting
def seek(
    group: Annotated[str, typer.Option("--group", metavar="GROUP", help="The group, none of whose members may run.")],
    topic: Annotated[str, typer.Option("--topic", metavar="TOPIC", help="The topic.")],
    to: Annotated[
        list[str],
        typer.Option(
            "--to",
            metavar="WHERE",
            help="earliest, latest, a time (2026-11-30T08:00:00+01:00), or PARTITION=OFFSET (may be repeated).",
        ),
    ],
    broker: BrokerUrl = None,
    new: Annotated[bool, typer.Option("--new", help="The group may be one that is not there yet: it is made.")] = False,
) -> None:
    """Let a group that does not run read on from elsewhere in a topic."""
    position = _position(to)
    moved = _with_kafka(broker, lambda connection: connection.seek_group(group, topic, position, new=new))
    say(f"Group {group} in {topic}:")
    shown = table("partition", "from", "to", right=("partition", "from", "to"))
    for one in moved:
        shown.add_row(str(one.partition), "(none)" if one.before is None else f"{one.before:,}", f"{one.after:,}")
    console().print(shown)


def _position(texts: Sequence[str]) -> Position:
    if all("=" in text for text in texts):
        return _offsets([pair for text in texts for pair in text.split(",")])
    if len(texts) > 1:
        raise CommandError("--to may be repeated for PARTITION=OFFSET only")
    text = texts[0]
    if text == "earliest":
        return "earliest"
    if text == "latest":
        return "latest"
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise CommandError(f"--to {text}: earliest, latest, a time in ISO 8601 or PARTITION=OFFSET is needed") from None
    if time.tzinfo is None:
        raise CommandError(
            f"--to {text}: a time needs its zone (+01:00, or Z): without it means another on each machine"
        )
    return time


def _offsets(pairs: Sequence[str]) -> dict[int, int]:
    found: dict[int, int] = {}
    for pair in pairs:
        partition, _, offset = (part.strip() for part in pair.partition("="))
        if not (partition.isdecimal() and offset.isdecimal()):
            raise CommandError(f"--to {pair}: a number of a partition and an offset are needed, as in 0=1200")
        if int(partition) in found:
            raise CommandError(f"--to names partition {partition} twice")
        found[int(partition)] = int(offset)
    return found


# -- forget


@commands.command("forget")
@reporting
def forget(
    group: Annotated[str, typer.Option("--group", metavar="GROUP", help="The group, none of whose members may run.")],
    topic: Annotated[
        str | None, typer.Option("--topic", metavar="TOPIC", help="Of this topic only, and of its retry topic.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    broker: BrokerUrl = None,
) -> None:
    """Forget a group that nobody runs any more, or a topic that it reads no more: its positions, and what waits in its
    retry topic. What it has not read is lost to it."""
    (found,), near = _with_kafka(broker, lambda connection: _look(connection, [group]))
    if near:
        raise CommandError(f"no such group: {group!r}{near[group]}")
    _show_forgotten(found, topic)
    if not yes:
        typer.confirm(f"Forget group {one_line(group)}{f' in {one_line(topic)}' if topic else ''}?", abort=True)

    async def doing(connection: Any) -> int:
        done: int = await (connection.forget_group(group) if topic is None else connection.withdraw(topic, group))
        return done

    left = _with_kafka(broker, doing)
    say(f"Forgotten; it had not done {left:,} message{'' if left == 1 else 's'}.")


def _show_forgotten(group: Any, topic: str | None) -> None:
    """What would be lost. Raises `CommandError` while somebody runs it, and where it has not read the topic."""
    if topic is None and group.members:
        count = len(group.members)
        raise CommandError(
            f"group {group.group!r} has {count} running member{'' if count == 1 else 's'}; stop them first, or name a "
            "topic that they do not read with --topic"
        )
    names = {one.topic for one in group.partitions}
    if topic is not None and topic not in names:
        raise CommandError(f"group {group.group!r} has read nothing of {topic!r}{near_word(topic, sorted(names))}")
    chosen = names if topic is None else {topic, f"{topic}.{group.group}.retry"} & names
    shown = table("topic", "partitions", "not done", right=("partitions", "not done"))
    for name in sorted(chosen):
        lags = [one.lag for one in group.partitions if one.topic == name]
        shown.add_row(cell(name), str(len(lags)), f"{sum(lag or 0 for lag in lags):,}")
    console().print(shown)
