"""``streamfw publish``: one message, or many alike, to a broker."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from streamfw.broker import Broker
from streamfw.errors import PublishError, StreamError
from streamfw.message import Headers, Outgoing, new_message_id

from .app_loading import load_app
from .brokers import broker_of_command, not_memory
from .output import BrokerUrl, CommandError, reporting, show_errors

__all__ = ["publish"]

_TOGETHER = 1000  # messages a call of Connection.publish
_TOLD = 10  # refusals that are told one by one


@reporting
def publish(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What to publish to.")],
    body: Annotated[
        str, typer.Argument(metavar="[BODY|-|@FILE]", help="The body as it is; - reads stdin. Default: empty.")
    ] = "",
    broker: BrokerUrl = None,
    app: Annotated[
        str | None, typer.Option("--app", metavar="MODULE:APP", help="Publish to the default broker of this app.")
    ] = None,
    key: Annotated[str | None, typer.Option(help="The message's key.")] = None,
    header: Annotated[list[str] | None, typer.Option(metavar="K=V", help="A header; may be repeated.")] = None,
    delay: Annotated[float, typer.Option(min=0.0, max=1e9, metavar="SECONDS", help="Deliver it so much later.")] = 0.0,
    message_id: Annotated[str | None, typer.Option(help="Its id (default: a new UUIDv7).")] = None,
    count: Annotated[int, typer.Option(min=1, help="How many copies, each with an id of its own.")] = 1,
) -> None:
    """Publish a message, and print its id when the broker has accepted it."""
    if not name:
        raise CommandError("NAME is empty: a message goes to a name")
    if message_id is not None and count > 1:
        raise CommandError("--message-id names one message; with --count each has an id of its own")
    if app is not None and broker is not None:
        raise CommandError("--app and --broker both say where to publish; give one of them")
    first = Outgoing(
        name=name,
        body=_body(body),
        message_id=message_id or new_message_id(),
        key=key,
        headers=Headers([_pair(one) for one in header or ()]),
        delay=delay,
    )
    target = not_memory(
        broker_of_command(broker) if app is None else _broker_of(app), f"nobody would get {name!r} from"
    )
    asyncio.run(_publish(target, first, count))


def _broker_of(app: str) -> Broker:
    return load_app(app).build().brokers["default"]


def _body(argument: str) -> bytes:
    if argument == "-":
        return sys.stdin.buffer.read()
    if argument.startswith("@"):
        try:
            return Path(argument[1:]).read_bytes()
        except OSError as error:
            raise CommandError(
                f"{argument[1:]!r} cannot be read: {error.strerror} (a body that begins with @ goes by stdin: -)"
            ) from error
    # What came as bytes that are not text in this locale goes out as those bytes.
    return argument.encode("utf-8", "surrogateescape")


def _pair(header: str) -> tuple[str, bytes]:
    name, equals, value = header.partition("=")
    if not equals or not name:
        raise CommandError(f"--header {header!r}: name=value is needed")
    return name, value.encode("utf-8", "surrogateescape")


async def _publish(broker: Broker, first: Outgoing, count: int) -> None:
    """Publish `first` and its copies, in order; print the ids of those that were accepted."""
    messages = _copies(first, count)
    refused: list[Exception] = []
    async with broker.connect() as connection:
        while together := list(islice(messages, _TOGETHER)):
            answers = await connection.publish(together)
            refused += _tell(together, answers or [None] * len(together))
    if not refused:
        return
    if count == 1:
        show_errors([_named(refused[0])])
    else:
        more = f", the first {_TOLD} are" if len(refused) > _TOLD else ""
        show_errors(refused[:_TOLD], f"{len(refused)} of {count} messages were not accepted{more}:")
    raise typer.Exit(1)


def _copies(first: Outgoing, count: int) -> Iterator[Outgoing]:
    yield first
    for _ in range(count - 1):
        yield Outgoing(
            name=first.name,
            body=first.body,
            message_id=new_message_id(),
            key=first.key,
            headers=first.headers,
            delay=first.delay,
        )


def _tell(messages: Sequence[Outgoing], answers: Sequence[PublishError | None]) -> list[Exception]:
    accepted = [m.message_id for m, answer in zip(messages, answers, strict=True) if answer is None]
    if accepted:
        print("\n".join(accepted), flush=True)
    return [answer for answer in answers if answer is not None]


def _named(error: Exception) -> Exception:
    return StreamError(f"not published: {type(error).__name__}: {error}")
