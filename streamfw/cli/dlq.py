"""``streamfw dlq``: what a person does with dead letters."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Annotated, TypeVar

import msgspec
import typer
from rich.text import Text

from streamfw.broker import DeadLetters
from streamfw.message import ERROR, ERROR_TYPE, ORIGIN, ORIGIN_ATTEMPT, ORIGIN_GROUP, Message

from .brokers import broker_of_command, not_memory
from .output import BrokerUrl, CommandError, console, reporting, safe, say, table

__all__ = ["commands"]

T = TypeVar("T")

commands = typer.Typer(help="Look at dead letters, put them back, or discard them.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="NAME", help="Where the dead letters are, as in orders.dead.")]
Ids = Annotated[list[str] | None, typer.Option("--id", metavar="ID", help="A message id; may be repeated.")]
All = Annotated[bool, typer.Option("--all", help="All of them.")]
Limit = Annotated[int, typer.Option(min=1, help="How many, the oldest first.")]


def _with_letters(url: str | None, name: str, do: Callable[[DeadLetters], Awaitable[T]]) -> T:
    broker = not_memory(broker_of_command(url), f"{name!r} is empty on")

    async def connected() -> T:
        async with broker.connect() as connection:
            return await do(await connection.dead_letters(name))

    return asyncio.run(connected())


# -- looking


@commands.command("list")
@reporting
def list_letters(name: Name, broker: BrokerUrl = None, limit: Limit = 100) -> None:
    """List the oldest dead letters: id, time, where they come from, attempt and error."""
    letters = _with_letters(broker, name, lambda found: found.list(limit + 1))
    if not letters:
        say(f"{name} is empty.")
        return
    shown = table("id", "time (UTC)", "origin", "attempt", "error", right=("attempt",))
    for letter in letters[:limit]:
        shown.add_row(
            safe(letter.message_id),
            _time(letter),
            Text(_origin(letter)),
            _text(letter, ORIGIN_ATTEMPT),
            Text(_error(letter)),
        )
    console().print(shown)
    if len(letters) > limit:
        say(f"There are more than these {limit}: --limit.")


@commands.command("show")
@reporting
def show(name: Name, broker: BrokerUrl = None, ids: Ids = None, limit: Limit = 1) -> None:
    """Show dead letters in full, headers and body; the oldest, or those of --id."""
    if ids:
        letters = _with_letters(broker, name, lambda found: _by_id(found, ids))
    else:
        letters = _with_letters(broker, name, lambda found: found.list(limit))
    for letter in letters:
        _show(letter)
    if not letters and not ids:
        say(f"{name} is empty.")
    if missing := sorted(set(ids or ()) - {letter.message_id for letter in letters}):
        raise CommandError(f"not in {name}: {', '.join(missing)}")


async def _by_id(found: DeadLetters, ids: Sequence[str]) -> Sequence[Message]:
    """Those of `ids` that are there. A broker lists from the oldest, so this asks for more until all are found."""
    limit = 1000
    while True:
        letters = await found.list(limit)
        wanted = [letter for letter in letters if letter.message_id in ids]
        if len({letter.message_id for letter in wanted}) == len(set(ids)) or len(letters) < limit:
            return wanted
        limit *= 10


def _show(letter: Message) -> None:
    say(safe(letter.message_id), "bold")
    shown = table("", "")
    shown.show_header = False
    shown.add_row("time", _time(letter))
    shown.add_row("origin", Text(_origin(letter)))
    shown.add_row("attempt", _text(letter, ORIGIN_ATTEMPT))
    shown.add_row("error", Text(_error(letter)))
    if letter.key is not None:
        shown.add_row("key", Text(_printable(letter.key.encode("utf-8", "surrogateescape"))))
    for header, value in letter.headers.pairs:
        if header not in (ERROR, ERROR_TYPE, ORIGIN, ORIGIN_GROUP, ORIGIN_ATTEMPT):
            shown.add_row(safe(f"header {header}"), Text("(null)" if value is None else _printable(value)))
    console().print(shown)
    print(_body(letter.body), end="\n\n")


def _body(body: object) -> str:
    """Indented where it is JSON, as it is where it is text, and as a bytes literal otherwise."""
    if not isinstance(body, bytes):
        return repr(body)
    try:
        return safe(msgspec.json.format(body, indent=2).decode())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # the last: nested too deeply
        return _printable(body)


def _printable(value: bytes) -> str:
    try:
        return safe(value.decode())
    except UnicodeDecodeError:
        return repr(value)


def _text(letter: Message, header: str) -> str:
    value = letter.headers.raw(header)
    return "" if value is None else _printable(value)


def _error(letter: Message) -> str:
    return _text(letter, ERROR) or _text(letter, ERROR_TYPE)


def _origin(letter: Message) -> str:
    origin, group = _text(letter, ORIGIN), _text(letter, ORIGIN_GROUP)
    return f"{origin} (group {group})" if group else origin


def _time(letter: Message) -> str:
    if not letter.timestamp:
        return ""
    try:
        return datetime.fromtimestamp(letter.timestamp, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, OSError, ValueError):  # no year that a calendar has: somebody else wrote it
        return f"{letter.timestamp:g}"


# -- acting


@commands.command("requeue")
@reporting
def requeue(name: Name, broker: BrokerUrl = None, ids: Ids = None, all_: All = False) -> None:
    """Put dead letters back where they came from, for the group that failed, with their attempts at zero."""
    chosen = _chosen(ids, all_, "requeue")
    done = _with_letters(broker, name, lambda found: found.requeue(chosen))
    _tell(done, "put back", name, chosen)


@commands.command("purge")
@reporting
def purge(
    name: Name,
    broker: BrokerUrl = None,
    ids: Ids = None,
    all_: All = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Discard dead letters for good."""
    chosen = _chosen(ids, all_, "purge")
    if chosen is None:
        _only_dead_letters(name, _with_letters(broker, name, lambda found: found.list(100)))
        if not yes:
            typer.confirm(f"Discard every dead letter in {name}?", abort=True)
    done = _with_letters(broker, name, lambda found: found.purge(chosen))
    _tell(done, "discarded", name, chosen)


def _chosen(ids: Sequence[str] | None, all_: bool, verb: str) -> list[str] | None:
    """The ids; None for all."""
    if bool(ids) == all_:
        raise CommandError(f"{verb} which? Give --id ID (it may be repeated), or --all; not both")
    return list(dict.fromkeys(ids)) if ids else None


def _only_dead_letters(name: str, letters: Sequence[Message]) -> None:
    """A slip of the name must not empty a queue that is alive."""
    alive = sum(ORIGIN not in letter.headers for letter in letters)
    if alive and not name.endswith(".dead"):
        raise CommandError(
            f"{alive} of the first {len(letters)} messages in {name} are no dead letters; nothing was discarded. "
            f"Did you mean {name}.dead?"
        )


def _tell(done: int, what: str, name: str, chosen: Sequence[str] | None) -> None:
    say(f"{done} {what}.")
    if chosen is not None and done < len(chosen):
        raise CommandError(f"{len(chosen) - done} of {len(chosen)} ids could not be {what}: not in {name} (any more)")
