"""``streamfw dlq``: what a person does with dead letters."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Annotated, TypeVar

import msgspec
import typer

from streamfw.broker import DeadLetters
from streamfw.message import ERROR, ERROR_TYPE, ORIGIN, ORIGIN_ATTEMPT, ORIGIN_GROUP, Message
from streamfw.texts import one_line, printable

from .brokers import broker_of_command, not_memory
from .grouped import all_of, group_of, of_group
from .output import BrokerUrl, CommandError, cell, console, reporting, say, table

__all__ = ["commands"]

T = TypeVar("T")

commands = typer.Typer(help="Look at dead letters, put them back, or discard them.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="NAME", help="Where the dead letters are, as in orders.dead.")]
Ids = Annotated[list[str] | None, typer.Option("--id", metavar="ID", help="A message id; may be repeated.")]
All = Annotated[bool, typer.Option("--all", help="All of them.")]
Group = Annotated[
    str | None, typer.Option("--group", metavar="GROUP", help="Only those that this group could not handle.")
]
Limit = Annotated[int, typer.Option(min=1, help="How many, the oldest first.")]


_LOOKED_AT = 10_000  # letters, at most, to say more of a few than their number


def _with_letters(url: str | None, name: str, group: str | None, do: Callable[[DeadLetters], Awaitable[T]]) -> T:
    broker = not_memory(broker_of_command(url), f"{name!r} is empty on")

    async def connected() -> T:
        async with broker.connect() as connection:
            return await do(of_group(await connection.dead_letters(name), group))

    return asyncio.run(connected())


# -- looking


@commands.command("list")
@reporting
def list_letters(name: Name, broker: BrokerUrl = None, group: Group = None, limit: Limit = 100) -> None:
    """List the oldest dead letters: id, time, where they come from, attempt and error."""
    letters = _with_letters(broker, name, group, lambda found: found.list(limit + 1))
    if not letters:
        say(_nothing(name, group))
        return
    shown = table("id", "time (UTC)", "origin", "attempt", "error", right=("attempt",))
    for letter in letters[:limit]:
        shown.add_row(
            cell(letter.message_id),
            _time(letter),
            cell(_origin(letter)),
            cell(_text(letter, ORIGIN_ATTEMPT)),
            cell(_error(letter)),
        )
    console().print(shown)
    if len(letters) > limit:
        say(f"There are more than these {limit}: --limit.")
    if alive := sum(_is_alive(letter) for letter in letters):
        say(f"{alive} of these {len(letters)} are no dead letters{_meant(name)}", "yellow")


def _nothing(name: str, group: str | None) -> str:
    return f"{name} is empty." if group is None else f"{name} has no dead letters of group {group}."


@commands.command("show")
@reporting
def show(name: Name, broker: BrokerUrl = None, ids: Ids = None, group: Group = None, limit: Limit = 1) -> None:
    """Show dead letters in full, headers and body; the oldest, or those of --id."""
    if ids:
        letters = _with_letters(broker, name, group, lambda found: _by_id(found, ids))
    else:
        letters = _with_letters(broker, name, group, lambda found: found.list(limit))
    for letter in letters:
        _show(letter)
    if not letters and not ids:
        say(_nothing(name, group))
    if missing := sorted(set(ids or ()) - {letter.message_id for letter in letters}):
        raise CommandError(f"not in {name}: {', '.join(missing)}")


async def _by_id(found: DeadLetters, ids: Sequence[str]) -> Sequence[Message]:
    """Those of `ids` that are there, as far as one has to look for one of each."""
    letters = await all_of(found, lambda some: {letter.message_id for letter in some}.issuperset(ids))
    return [letter for letter in letters if letter.message_id in ids]


def _show(letter: Message) -> None:
    say(one_line(letter.message_id), "bold")
    shown = table("", "")
    shown.show_header = False
    shown.add_row("time", _time(letter))
    shown.add_row("origin", cell(_origin(letter)))
    shown.add_row("attempt", cell(_text(letter, ORIGIN_ATTEMPT)))
    shown.add_row("error", cell(_error(letter)))
    if letter.key is not None:
        shown.add_row("key", cell(_shown(letter.key.encode("utf-8", "surrogateescape"))))
    for header, value in letter.headers.pairs:
        if header not in (ERROR, ERROR_TYPE, ORIGIN, ORIGIN_GROUP, ORIGIN_ATTEMPT):
            shown.add_row(cell(f"header {header}"), cell("(null)" if value is None else _shown(value)))
    console().print(shown)
    print(_body(letter.body), end="\n\n")


def _body(body: object) -> str:
    """Indented where it is JSON, as it is where it is text, and as a bytes literal otherwise."""
    if not isinstance(body, bytes):
        return repr(body)
    try:
        return printable(msgspec.json.format(body, indent=2).decode())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # the last: nested too deeply
        return printable(_shown(body))


def _shown(value: bytes) -> str:
    """Text where it is text, a bytes literal otherwise."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return repr(value)


def _text(letter: Message, header: str) -> str:
    value = letter.headers.raw(header)
    return "" if value is None else _shown(value)


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
def requeue(name: Name, broker: BrokerUrl = None, ids: Ids = None, all_: All = False, group: Group = None) -> None:
    """Put dead letters back where they came from, for the group that failed, with their attempts at zero."""
    chosen = _chosen(ids, all_, "requeue")

    async def put_back(found: DeadLetters) -> None:
        seen = await _seen(found, chosen)
        _only_dead_letters(name, seen, "put back")
        _tell(await found.requeue(chosen), "put back", name, chosen, seen)

    _with_letters(broker, name, group, put_back)


@commands.command("purge")
@reporting
def purge(
    name: Name,
    broker: BrokerUrl = None,
    ids: Ids = None,
    all_: All = False,
    group: Group = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Discard dead letters for good."""
    chosen = _chosen(ids, all_, "purge")
    seen = _with_letters(broker, name, group, lambda found: _seen(found, chosen))
    if chosen is None:
        _only_dead_letters(name, seen, "discarded")
        if not yes:
            whose = "" if group is None else f" of group {group}"
            typer.confirm(f"Discard every dead letter{whose} in {name}?", abort=True)
    done = _with_letters(broker, name, group, lambda found: found.purge(chosen))
    _tell(done, "discarded", name, chosen, seen)


def _chosen(ids: Sequence[str] | None, all_: bool, verb: str) -> list[str] | None:
    """The ids; None for all."""
    if bool(ids) == all_:
        raise CommandError(f"{verb} which? Give --id ID (it may be repeated), or --all; not both")
    return list(dict.fromkeys(ids)) if ids else None


async def _seen(found: DeadLetters, chosen: Sequence[str] | None) -> Sequence[Message]:
    """What is there of the chosen ones, as far as it is looked at."""
    if chosen is None:
        return await found.list(100)
    letters = await all_of(found, lambda some: False, most=_LOOKED_AT)
    return [letter for letter in letters if letter.message_id in chosen]


def _only_dead_letters(name: str, letters: Sequence[Message], what: str) -> None:
    """A slip of the name must not empty a queue that is alive."""
    alive = sum(map(_is_alive, letters))
    if alive and not name.endswith(".dead"):
        raise CommandError(
            f"{alive} of the first {len(letters)} messages in {name} are no dead letters; nothing was {what}"
            f"{_meant(name)}"
        )


def _is_alive(letter: Message) -> bool:
    return ORIGIN not in letter.headers


def _meant(name: str) -> str:
    return "." if name.endswith(".dead") else f". Did you mean {name}.dead?"


def _tell(done: int, what: str, name: str, chosen: Sequence[str] | None, seen: Sequence[Message]) -> None:
    groups = sorted({group_of(letter) for letter in seen})
    if chosen is not None and done == len(seen) and len(groups) > 1:
        say(f"{done} {what}, of {len(groups)} groups: {', '.join(map(one_line, groups))}.")
    else:
        say(f"{done} {what}.")
    if chosen is not None and done < len(chosen):
        why = f"not in {name} (any more)"
        if what != "discarded" and any(map(_is_alive, seen)):
            why += ", or without an origin to go back to"
        raise CommandError(f"{len(chosen) - done} of {len(chosen)} ids could not be {what}: {why}")
