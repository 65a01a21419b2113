"""What is put around a compiled call, and what follows it: built once, at build."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from .broker import Connection, Delivery, Subscription
from .errors import TooLarge
from .handler import Call
from .message import LEFT_OUT, Outgoing, dead_letter_headers, lightened
from .outcome import DeadLetter, is_outcome
from .outlet import send
from .publisher import Publisher
from .texts import one_line

__all__ = ["dead_letter_of", "in_a_task", "publishing", "putting_aside"]

log = logging.getLogger("streamfw")


def publishing(call: Call, publisher: Publisher[Any]) -> Call:
    """`call`, whose value is published before the message is acknowledged."""

    async def call_and_publish(message: Any) -> Any:
        result = await call(message)
        if result is not None and not is_outcome(result):
            await publisher.publish(result, key=message.key)
        return result  # for middleware: what the handler returned

    return call_and_publish


def in_a_task(call: Call) -> Call:
    """`call` in a task of its own, for libraries whose scope is the current task."""

    async def call_in_a_task(message: Any) -> Any:
        async def run() -> Any:
            return await call(message)

        return await asyncio.get_running_loop().create_task(run())

    return call_in_a_task


def putting_aside(
    subscription: Subscription, connection: Callable[[], Connection]
) -> Callable[[Delivery, DeadLetter], Awaitable[None]] | None:
    """How the runtime publishes a dead letter where the broker does not move it itself; None: they are discarded."""
    target = subscription.dead_letter
    if target is None:
        return None

    async def put_aside(delivery: Delivery, outcome: DeadLetter) -> None:
        letter = whole = dead_letter_of(delivery, outcome, target, subscription.group)
        while True:
            try:
                await send(connection(), letter)
            except TooLarge as error:
                lighter = lightened(letter, error.headers_over) if error.headers_over else None
                if lighter is None:
                    raise
                letter = lighter
                continue
            if letter is not whole:
                text = "the dead letter of message %s in %r goes without headers that make it too large: %s"
                log.warning(text, one_line(delivery.message_id), target, one_line(letter.headers[LEFT_OUT]))
            return

    return put_aside


def dead_letter_of(delivery: Delivery, outcome: DeadLetter, target: str, group: str) -> Outgoing:
    """The dead letter of a delivery: its bytes and headers, the error, and where it comes from."""
    headers = dead_letter_headers(
        delivery.headers,
        outcome.reason,
        outcome.error_type,
        delivery.name,
        group,
        delivery.attempt,
        delivery.origin_place(),
    )
    return Outgoing(
        name=target,
        body=delivery.body,
        message_id=delivery.message_id,
        key=delivery.key,
        headers=headers,
        stored=True,
    )
