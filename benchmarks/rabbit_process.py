"""The cases of the RabbitMQ scenario, each in a process of its own (see `process`): ``SERVER`` is a `Node` in JSON.

Whoever reads begins its window with the first consumer, just before it asks for one: the first messages come with the
answer. It ends when the server has every acknowledgement.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from functools import partial
from typing import Any, TypeAlias, cast

import aio_pika
import aiormq
import msgspec
from pamqp import commands

from streamfw import App, Batch, subscriber
from streamfw.message import new_message_id
from streamfw_rabbit import RabbitBroker
from streamfw_rabbit.settings import TransportOption

from .apps import all_settled
from .harness import Sample, Window
from .jobs import fresh
from .process import BATCH, PUBLISHERS, Here, Job, Order, body, main, noop, noop_batch, peer_order, spread
from .rabbit_queue import NAME, NOTE, OUT, PREFETCH, Node, acknowledged, channel, emptied, fill, source

__all__ = ["GROUP", "JOBS"]

GROUP = 100  # messages that one acknowledgement by hand is for

decode = msgspec.json.Decoder(Order).decode


# -- reading

Reader: TypeAlias = Callable[[Node, int], AbstractAsyncContextManager[None]]
"""Entered until so many messages are handled, and their acknowledgements written; left afterwards."""


async def reading(here: Here, count: int, reader: Reader) -> Sample:
    node = Node.of(here.server)
    await fill(node, count)
    with _begun_by_consuming(here.window()) as window:
        async with reader(node, count):
            await acknowledged(node)
            window.__exit__()
    return window.sample(count)


@contextmanager
def _begun_by_consuming(window: Window) -> Iterator[Window]:
    """Everybody here consumes by this method of the library."""
    consume = aiormq.Channel.basic_consume

    async def begin(self: aiormq.Channel, *arguments: Any, **options: Any) -> Any:
        aiormq.Channel.basic_consume = consume  # type: ignore[method-assign]
        window.__enter__()
        return await consume(self, *arguments, **options)

    aiormq.Channel.basic_consume = begin  # type: ignore[method-assign]
    try:
        yield window
    finally:
        aiormq.Channel.basic_consume = consume  # type: ignore[method-assign]


@asynccontextmanager
async def pika_each(node: Node, count: int) -> AsyncIterator[None]:
    async with await aio_pika.connect(node.url) as connection:
        opened = await connection.channel()
        await opened.set_qos(prefetch_count=PREFETCH)
        queue = await opened.get_queue(NAME)
        async with queue.iterator() as messages:
            left = count
            async for message in messages:
                await noop(decode(message.body))
                await message.ack()
                left -= 1
                if not left:
                    break
            yield


@asynccontextmanager
async def library(node: Node, count: int, group: int = 1) -> AsyncIterator[None]:
    """aiormq, with an acknowledgement for every `group` messages."""
    finished = asyncio.Event()
    done = 0

    async def handle(message: aiormq.abc.DeliveredMessage) -> None:
        nonlocal done
        await noop(decode(message.body))
        done += 1
        if done % group == 0 or done == count:
            tag = message.delivery_tag
            assert tag is not None
            await opened.basic_ack(tag, multiple=group > 1, wait=group == 1)
        if done == count:
            finished.set()

    async with channel(node) as opened:
        await opened.basic_qos(prefetch_count=PREFETCH)
        await opened.basic_consume(NAME, handle)
        await finished.wait()
        yield


@asynccontextmanager
async def app(
    node: Node, count: int, transport: TransportOption, handler: Any = noop, **options: Any
) -> AsyncIterator[None]:
    marked = subscriber(source(), **options)(fresh(handler))
    made = App(marked, brokers={"default": RabbitBroker(node.url, transport=transport)})
    async with made.running():
        await all_settled(made, count)
        yield
        (pump,) = made.pumps
        if pump.counters.acked != count:
            raise AssertionError(f"{pump.counters.acked} of {count} were acknowledged by their handlers")


@asynccontextmanager
async def peer(node: Node, count: int) -> AsyncIterator[None]:
    from faststream import AckPolicy
    from faststream.rabbit import Channel, RabbitQueue
    from faststream.rabbit import RabbitBroker as Peer

    logging.disable(logging.CRITICAL)
    broker = Peer(node.url, logger=None)
    finished, left = asyncio.Event(), count

    async def handle(body: Any) -> None:
        nonlocal left
        left -= 1
        if not left:
            finished.set()

    handle.__annotations__["body"] = peer_order()
    queue, limited = RabbitQueue(NAME, declare=False), Channel(prefetch_count=PREFETCH)
    broker.subscriber(queue, channel=limited, ack_policy=AckPolicy.ACK)(handle)
    await broker.start()
    await finished.wait()
    yield
    await broker.stop()


# -- publishing: by a number of tasks, each of which waits for its confirm; all is persistent and mandatory

Share: TypeAlias = Sequence[bytes]
Sender: TypeAlias = Callable[[Node], AbstractAsyncContextManager[Callable[[Share], Awaitable[None]]]]
"""What publishes a share of the bodies, one after another, while it is entered."""


async def publishing(here: Here, count: int, sender: Sender) -> Sample:
    node = Node.of(here.server)
    bodies = [body(number, NOTE) for number in range(count)]
    await emptied(node, OUT)
    async with sender(node) as publish:
        await spread(publish, bodies[:PUBLISHERS])
        with here.window() as window:
            await spread(publish, bodies)
    if (found := await emptied(node, OUT)) != count + PUBLISHERS:
        raise AssertionError(f"{found} messages are there, of {count + PUBLISHERS}")
    return window.sample(count)


@asynccontextmanager
async def library_sends(node: Node) -> AsyncIterator[Callable[[Share], Awaitable[None]]]:
    async with channel(node, confirms=True) as opened:

        async def publish(mine: Share) -> None:
            for one in mine:
                properties = commands.Basic.Properties(delivery_mode=2, message_id=new_message_id())
                await opened.basic_publish(one, routing_key=OUT, properties=properties, mandatory=True)

        yield publish


@asynccontextmanager
async def pika_sends(node: Node) -> AsyncIterator[Callable[[Share], Awaitable[None]]]:
    async with await aio_pika.connect(node.url) as connection:
        opened = await connection.channel(publisher_confirms=True, on_return_raises=True)
        exchange = opened.default_exchange

        async def publish(mine: Share) -> None:
            for one in mine:
                message = aio_pika.Message(
                    one, delivery_mode=aio_pika.DeliveryMode.PERSISTENT, message_id=new_message_id()
                )
                await exchange.publish(message, OUT, mandatory=True)

        yield publish


@asynccontextmanager
async def peer_sends(node: Node) -> AsyncIterator[Callable[[Share], Awaitable[None]]]:
    from faststream.rabbit import Channel
    from faststream.rabbit import RabbitBroker as Peer

    logging.disable(logging.CRITICAL)
    confirming = Channel(publisher_confirms=True, on_return_raises=True)
    async with Peer(node.url, logger=None, default_channel=confirming) as broker:

        async def publish(mine: Share) -> None:
            for one in mine:
                await broker.publish(one, OUT, message_id=new_message_id(), persist=True, mandatory=True)

        yield publish


@asynccontextmanager
async def app_sends(node: Node, transport: TransportOption) -> AsyncIterator[Callable[[Share], Awaitable[None]]]:
    async with App(brokers={"default": RabbitBroker(node.url, transport=transport)}).running() as made:

        async def publish(mine: Share) -> None:
            for one in mine:
                await made.publish(OUT, one)

        yield publish


TRANSPORTS: tuple[TransportOption, ...] = ("aiormq", "fast")

READERS: dict[str, Reader] = {
    "pika-each": pika_each,
    "each": library,
    "groups": partial(library, group=GROUP),
    "peer": peer,
}
FORMS: dict[str, dict[str, Any]] = {
    "one": {"workers": 1},
    "eight": {"workers": 8},
    "batches": {"handler": noop_batch, "batch": Batch(BATCH)},
}
for transport, form in itertools.product(TRANSPORTS, FORMS):
    READERS[f"{transport}-{form}"] = partial(app, transport=transport, **FORMS[form])
SENDERS: dict[str, Sender] = {"sends": library_sends, "pika-sends": pika_sends, "peer-sends": peer_sends}
for transport in TRANSPORTS:
    SENDERS[f"{transport}-sends"] = partial(app_sends, transport=transport)

JOBS: dict[str, Job] = {
    **{name: cast("Job", partial(reading, reader=reader)) for name, reader in READERS.items()},
    **{name: cast("Job", partial(publishing, sender=sender)) for name, sender in SENDERS.items()},
}

if __name__ == "__main__":
    main(JOBS)
