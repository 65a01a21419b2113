"""An open connection to RabbitMQ: it publishes, opens sources, and answers for its server."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, Final

from streamfw.broker import REPLY_PREFIX, Connection, DeadLetters, Health, Source, Subscription
from streamfw.errors import BrokerClosed, BrokerError, BrokerRefused, PublishError
from streamfw.message import Outgoing

from . import topology
from .deadletters import RabbitDeadLetters
from .epochs import Epochs
from .publish import Publishing
from .queue import Declare, RabbitQueue
from .replies import ReplySource
from .settings import Settings, connection_options
from .source import RabbitSource
from .stream_source import StreamSource
from .streams import Stream, stream_mistakes
from .versions import OLDEST, require

__all__ = ["RabbitConnection", "subscription_mistakes"]

_CLOSE: Final = 5.0  # seconds for what is being published
_PACE: Final = 0.01  # seconds between two looks whether the first attempt has failed
_CHECK: Final = 5.0  # seconds that the server may take to answer


class RabbitConnection(Connection):
    """Made by `RabbitBroker.connect`. Two connections of AMQP: an alarm of the server blocks the one that publishes,
    and consumers must not be blocked with it."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.consuming = Epochs(connection_options(settings, "consuming"))
        self.publisher = Epochs(connection_options(settings, "publishing"))
        self.publishing = Publishing(self.publisher, self.consuming, settings)
        self._sources: list[RabbitSource | StreamSource | ReplySource] = []
        self.closed = False

    async def begin(self) -> None:
        """Reach the server. Raises a `BrokerError`: at the first failure, for whoever calls tries again."""
        self.consuming.start()
        self.publisher.start()
        for epochs in (self.consuming, self.publisher):
            await _first(epochs)
        epoch = self.consuming.current
        if epoch is not None:
            require(epoch.server_version, OLDEST, "streamfw")

    def _check_open(self) -> None:
        if self.closed:
            raise BrokerClosed("the connection to RabbitMQ was closed")

    async def open(self, subscription: Subscription) -> Source:
        """See `Connection.open`."""
        self._check_open()
        if subscription.name.startswith(REPLY_PREFIX) and subscription.source is None:
            inbox = ReplySource(subscription.name, self.publisher, self.settings, self.publishing, lambda: self.closed)
            self._sources.append(inbox)
            return inbox
        if mistakes := list(subscription_mistakes(subscription, self.settings)):
            raise BrokerRefused(f"{subscription!r}: {'; '.join(mistakes)}")
        source = self._source(subscription)
        self._sources.append(source)
        try:
            await source.open()
        except BaseException:
            self._sources.remove(source)
            await source.close()
            raise
        return source

    def _source(self, subscription: Subscription) -> RabbitSource | StreamSource:
        if isinstance(subscription.source, Stream):
            return StreamSource(subscription, subscription.source, self.settings, self.consuming)
        plan = topology.plan_of(subscription, self.settings)
        retries = topology.retries(subscription, self.settings)
        return RabbitSource(subscription, plan, self.settings, self.consuming, self.publishing, retries)

    def publish(self, messages: Sequence[Outgoing]) -> Coroutine[Any, Any, Sequence[PublishError | None]]:
        """See `Connection.publish`."""
        if self.closed:
            self._check_open()
        return self.publishing.publish(messages)

    async def check(self) -> Health:
        """See `Connection.check`. A server that takes no publishes is not well."""
        self._check_open()
        for epochs in (self.consuming, self.publisher):
            if epochs.current is None or epochs.blocked_since is not None:
                return Health(False, epochs.describe())
            problem = await _within(_CHECK, _asked(epochs))
            if problem is not None:
                return Health(False, problem)
        return Health(True)

    async def withdraw(self, name: str, group: str) -> int:
        """See `Connection.withdraw`."""
        self._check_open()
        if name.startswith(REPLY_PREFIX):
            return 0
        return await topology.delete(self.consuming, topology.group_queue(name, group))

    async def dead_letters(self, name: str) -> DeadLetters:
        """See `Connection.dead_letters`: those that no group has subscribed to. Whoever has got them has them."""
        self._check_open()
        return RabbitDeadLetters(self.consuming, self.publishing, name, lambda: self.closed)

    async def close(self) -> None:
        """Close sources first, then what they publish with, then the connections."""
        if self.closed:
            return
        self.closed = True
        await asyncio.gather(*(source.close() for source in self._sources))
        await self.publishing.close(asyncio.get_running_loop().time() + _CLOSE)
        await asyncio.gather(self.consuming.close(), self.publisher.close())


async def _first(epochs: Epochs) -> None:
    """Wait for a connection, or for an attempt at each host to fail."""
    failed: list[BrokerError] = []
    while epochs.current is None:
        if epochs.refused is not None:
            await epochs.connected(0)  # raises
        error = epochs.last_error
        if error is not None and error not in failed:
            failed.append(error)
            if len(failed) >= len(epochs.options.hosts):
                raise error
        await asyncio.sleep(_PACE)


async def _asked(epochs: Epochs) -> str | None:
    try:
        async with epochs.declarations("asking whether it is there"):
            return None
    except BrokerError as error:
        return str(error)


async def _within(seconds: float, question: Coroutine[object, object, str | None]) -> str | None:
    """An answer, or that there is none. The question is not broken off: that would cost a channel."""
    task = asyncio.create_task(question)
    await asyncio.wait({task}, timeout=seconds)
    return task.result() if task.done() else f"no answer in {seconds:g} s"


def may_order(source: RabbitQueue | None, settings: Settings) -> bool:
    """Whether a queue is known to have a single active consumer where it is to have one."""
    return _mode(source, settings) == "declare" or (source is not None and source.single_active)


def _mode(source: RabbitQueue | None, settings: Settings) -> Declare:
    return settings.declare if source is None else source.declare or settings.declare


def subscription_mistakes(subscription: Subscription, settings: Settings) -> list[str]:
    """What RabbitMQ cannot honour of a subscription, as sentences."""
    source = subscription.source
    if source is not None and not isinstance(source, RabbitQueue | Stream):
        return [f"{type(source).__name__} is not a source of RabbitBroker"]
    found = topology.plain_mistakes(subscription)
    if isinstance(source, Stream):
        return [*found, *stream_mistakes(subscription, source)]
    if isinstance(source, RabbitQueue):
        if subscription.dead_letter == source.name:
            found.append(
                f"dead_letter={source.name!r}: this is the queue itself; dead letters would come back for ever"
            )
        found += source.mistakes(subscription.dead_letter is not None)
    if subscription.ordered_by is not None and not may_order(source, settings):
        said = f"ordered_by={subscription.ordered_by!r} with declare={_mode(source, settings)!r}"
        found.append(
            f"{said}: an order needs a queue that has a single active consumer, and nobody can see whether this one "
            "has; say RabbitQueue(.., single_active=True) if so"
        )
    return found
