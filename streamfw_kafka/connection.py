"""An open connection to Kafka: it publishes, opens sources, and answers for its servers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from streamfw.broker import Connection, DeadLetters, Health, Position, Source, Subscription
from streamfw.errors import BrokerClosed, BrokerError, BrokerRefused, PublishError
from streamfw.message import Outgoing

from .admin import Topics
from .deadletters import KafkaDeadLetters
from .groups import Moved, forget_group, near_group, seek_group, withdraw
from .opening import Opening
from .publish import Publishing
from .settings import Settings
from .source import KafkaSource
from .status import GroupStatus, read_status
from .topic import topic_of
from .transactions import Transactions

__all__ = ["KafkaConnection", "subscription_mistakes"]

CLOSE = 5.0  # seconds for what is being published


class KafkaConnection(Connection):
    """Made by `KafkaBroker.connect`. One producer, one client for questions, and a consumer for each source."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.topics = Topics(settings)
        self.publishing = Publishing(settings, self.topics)
        self._sources: list[KafkaSource] = []
        self.closed = False

    async def begin(self) -> None:
        """Reach a server. Raises `BrokerError`."""
        await self.topics.names()

    def check_open(self) -> None:
        """Raises `BrokerClosed` after `close`."""
        if self.closed:
            raise BrokerClosed("the connection to Kafka was closed")

    async def open(self, subscription: Subscription) -> Source:
        """See `Connection.open`."""
        self.check_open()
        if mistakes := list(subscription_mistakes(subscription)):
            raise BrokerRefused(f"{subscription!r}: {'; '.join(mistakes)}")
        transactions = self._transactions(subscription) if subscription.transactional else None
        source = KafkaSource(Opening(subscription, self.settings, self.topics, self.publishing.publish, transactions))
        self._sources.append(source)
        try:
            await source.reopen()
        except BaseException:  # it is tried again with another one
            self._sources.remove(source)
            raise
        return source

    def _transactions(self, subscription: Subscription) -> Transactions:
        group = subscription.group
        return Transactions(self, self.settings, self.topics, group, topic_of(subscription).transactional_id or group)

    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[PublishError | None]:
        """See `Connection.publish`."""
        self.check_open()
        return await self.publishing.publish(messages)

    async def check(self) -> Health:
        """See `Connection.check`."""
        self.check_open()
        try:
            await self.topics.names(fresh=True)
        except BrokerError as error:
            return Health(False, str(error))
        return Health(True)

    # -- for people

    async def status(self, groups: Sequence[str] | None = None) -> list[GroupStatus]:
        """How these consumer groups are (None: all that there are): members, and how far each partition is read. Groups
        of other programs as well, without what only ours tell. Raises a `BrokerError`."""
        self.check_open()
        return await read_status(self.topics, groups)

    async def near_group(self, group: str) -> str:
        """``; near it: 'shop'``, where there is no such group, for an error's text; empty when none is near."""
        self.check_open()
        return await near_group(self.topics, group)

    async def seek_group(self, group: str, topic: str, to: Position, *, new: bool = True) -> list[Moved]:
        """Let a group that does not run read on from elsewhere in a topic; return what was moved. (One that runs moves
        by itself: `App.seek`.) `new`: it is made if it is not there.

        Raises `BrokerRefused`, having moved nothing, while it has members, for an offset that is not kept, and for a
        topic or partition (or group, unless `new`) that is not there; `ValueError` for a time without a time zone.
        """
        self.check_open()
        return await seek_group(self.topics, group, topic, to, new)

    async def dead_letters(self, name: str) -> DeadLetters:
        """See `Connection.dead_letters`."""
        self.check_open()
        return KafkaDeadLetters(self, name)

    async def withdraw(self, name: str, group: str) -> int:
        """See `Connection.withdraw`. Raises `BrokerRefused` while members of the group read the topic."""
        self.check_open()
        return await withdraw(self.topics, name, group)

    async def forget_group(self, group: str) -> int:
        """Forget a group as a whole: what it has committed of every topic, and what waits in its retry topics; return
        how many messages it had not read or not settled. Raises `BrokerRefused` while it has members."""
        self.check_open()
        return await forget_group(self.topics, group)

    async def close(self) -> None:
        """Close sources first, then what they publish with."""
        if self.closed:
            return
        self.closed = True
        await asyncio.gather(*(source.close() for source in self._sources))
        await self.publishing.close(asyncio.get_running_loop().time() + CLOSE)
        await self.topics.close()


def subscription_mistakes(subscription: Subscription) -> list[str]:
    """What Kafka cannot honour of a subscription, as sentences."""
    source = subscription.source
    topic = topic_of(subscription)
    if source is not None and source is not topic:
        return [f"{type(source).__name__} is not a source of KafkaBroker"]
    found = topic.mistakes(subscription)
    if not subscription.group:
        found.append("a consumer group has a name: group='' is none")
    return found
