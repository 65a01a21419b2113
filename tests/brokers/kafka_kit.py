"""What the tests of the Kafka broker share: names, publishing without a broker around it, and reading what is there."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote

from aiokafka import AIOKafkaConsumer
from aiokafka.structs import ConsumerRecord

from streamfw.errors import PublishError
from streamfw.message import NO_HEADERS, Headers, Outgoing, new_message_id
from streamfw_kafka.admin import Topics
from streamfw_kafka.publish import Publishing
from streamfw_kafka.settings import Settings, parsed
from tests.services.kafka import Kafka, Login

__all__ = ["Desk", "desk", "login_url", "new_name", "outgoing", "read"]


def new_name(what: str = "topic") -> str:
    """A name that nobody else has."""
    return f"{what}-{secrets.token_hex(6)}"


def outgoing(name: str, body: bytes = b"x", **options: Any) -> Outgoing:
    """A message with a new id; `headers` as a handler would give them."""
    headers = options.pop("headers", NO_HEADERS)
    options.setdefault("message_id", new_message_id())
    return Outgoing(name=name, body=body, headers=Headers(headers), **options)


def login_url(bootstrap: str, login: Login, *, tls: bool = False, password: str | None = None) -> str:
    """The URL of a listener that wants a login, for its mechanism."""
    who = f"{quote(login.user, safe='')}:{quote(password or login.password, safe='')}"
    return f"kafka{'+tls' if tls else ''}://{who}@{bootstrap}/?sasl={login.mechanism}"


async def read(kafka: Kafka, topic: str, *, isolation: str = "read_committed") -> list[ConsumerRecord[Any, Any]]:
    """All records of a topic: partition by partition, each in its order."""
    found: list[ConsumerRecord[Any, Any]] = []
    async with desk(kafka.url, isolation=isolation) as asked:
        ends = await asked.topics.ends(topic)
    options = {
        "isolation_level": isolation,
        "fetch_max_wait_ms": 10,
    }  # what waits for records holds up the next question
    async with AIOKafkaConsumer(bootstrap_servers=kafka.bootstrap, **options) as consumer:
        for partition, end in sorted(ends.items()):
            consumer.assign([partition])
            await consumer.seek_to_beginning(partition)
            while await consumer.position(partition) < end:
                found += (await consumer.getmany(partition, timeout_ms=1000)).get(partition, [])
    return found


class Desk:
    """Topics and publishing of one connection, without the broker around them."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.topics = Topics(settings)
        self.publishing = Publishing(settings, self.topics)

    async def publish(self, name: str, *bodies: bytes, **options: Any) -> Sequence[PublishError | None]:
        return await self.send(*(outgoing(name, body, **options) for body in bodies))

    async def send(self, *messages: Outgoing) -> Sequence[PublishError | None]:
        return await self.publishing.publish(messages)


@asynccontextmanager
async def desk(url: str, *, close: float = 5.0, **options: Any) -> AsyncIterator[Desk]:
    """A `Desk` on the server of `url`, closed at the end."""
    opened = Desk(parsed(url, **options))
    try:
        yield opened
    finally:
        await opened.publishing.close(asyncio.get_running_loop().time() + close)
        await opened.topics.close()
