"""Where a name leads: to the exchange of that name, and where there is none to the queue.

RabbitMQ closes the channel of whoever publishes to an exchange that does not exist, with all that is under way on it;
so each name is looked up before it is first published to.
"""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec

from streamfw.errors import (
    BrokerClosed,
    BrokerError,
    PublishError,
    Rejected,
    Unavailable,
    Unroutable,
)
from streamfw.message import Outgoing

from .channel import Properties
from .epochs import Epochs
from .errors import NotFound, TopologyMismatch
from .headers import FROM
from .queue import EXCHANGE_NAME, name_mistake
from .retry import LONGEST, Ladder
from .settings import Settings
from .topology import delays_of

__all__ = ["REPLY_TO", "Names", "Route", "failure"]

REPLY_TO: Final = "amq.rabbitmq.reply-to"
_TRUSTED: Final = 10.0  # seconds that a name is taken for a queue's before it is looked up again
_NAMES: Final = 10_000  # names that are remembered


class Route(msgspec.Struct):
    """Where a name leads. `key`: the routing key (None: the message's own). `until`: by the loop's clock, how long that
    is believed. `delays`: the way there for what is to come later."""

    exchange: str
    key: str | None = None
    until: float = float("inf")
    mandatory: bool = True
    delays: Ladder | None = None


def failure(kind: type[PublishError], message: Outgoing, text: str) -> PublishError:
    """An error of one message."""
    return kind(text, name=message.name, message_id=message.message_id)


class Names:
    """The names that were published to. `asking` is the connection on which they are looked up."""

    def __init__(self, asking: Epochs, settings: Settings) -> None:
        self._asking, self._declares = asking, settings.declare == "declare"
        self.known: dict[str, Route] = {}
        self._finding: dict[str, asyncio.Task[Route | PublishError]] = {}
        self._loop = asyncio.get_running_loop()

    def learn(self, exchange: str) -> None:
        """That exchange is there: we have just declared it."""
        self.known[exchange] = Route(exchange)

    async def find(self, message: Outgoing, deadline: float) -> Route:
        """The route of a name that we do not know. Calls that wait for the same one wait together."""
        name = message.name
        if name.startswith(f"{REPLY_TO}."):
            return Route("", name, mandatory=False)
        if (mistake := name_mistake(name, EXCHANGE_NAME)) is not None:
            raise failure(Rejected, message, mistake)
        task = self._finding.get(name)
        if task is None:
            task = self._finding[name] = asyncio.create_task(self._find(name, deadline), name=f"streamfw rabbit {name}")
            task.add_done_callback(lambda _: self._finding.pop(name))
        await asyncio.wait({task})
        found = task.result()
        if isinstance(found, PublishError):
            raise failure(type(found), message, str(found)) from found.__cause__
        return found

    async def _find(self, name: str, deadline: float) -> Route | PublishError:
        loop = self._loop
        while True:
            try:
                await self._asking.connected(max(0.0, deadline - loop.time()))
                async with self._asking.declarations(f"looking for exchange {name!r}") as channel:
                    await channel.exchange_declare(name, passive=True)
                route = Route(name)
            except NotFound:
                route = Route("", name, until=loop.time() + _TRUSTED)
            except BrokerClosed:
                raise
            except BrokerError as error:
                if not error.transient or loop.time() >= deadline:
                    refused = Unavailable(str(error))
                    refused.__cause__ = error
                    return refused
                await asyncio.sleep(0.05)
                continue
            if len(self.known) >= _NAMES:
                del self.known[next(iter(self.known))]
            self.known[name] = route
            return route

    async def delayed(self, message: Outgoing, route: Route, key: str, properties: Properties) -> tuple[str, str]:
        """Exchange and routing key by which it comes to its own exchange and key later."""
        if not self._declares:
            raise failure(
                Rejected, message, f"delay={message.delay}: it needs queues, and declare= forbids to make them"
            )
        if message.delay > LONGEST:
            raise failure(Rejected, message, f"delay={message.delay}: {LONGEST} seconds is the most")
        if route.delays is None:
            route.delays = delays_of(route.exchange, message.name)
        try:
            way = await route.delays.way(self._asking, message.delay)
        except NotFound as error:
            raise failure(Unroutable, message, f"delay={message.delay}: there is no queue {message.name!r}") from error
        except TopologyMismatch as error:
            text = (
                f"delay={message.delay}: {message.name!r} is an exchange that routes by keys, which the pause takes "
                "the place of; publish it to the name of a queue, or without delay="
            )
            raise failure(Rejected, message, text if error.argument == "type" else str(error)) from error
        except BrokerError as error:
            kind = Unavailable if error.transient else Rejected
            raise failure(kind, message, f"delay={message.delay}: {error}") from error
        table = properties.raw_headers
        properties.raw_headers = {**(table if isinstance(table, dict) else {}), FROM: [route.exchange, key]}
        return way
