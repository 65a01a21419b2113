"""RabbitMQ queues to read and to fill: the server, the messages, and what it says of them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import aiormq
import msgspec
import psutil  # type: ignore[import-untyped, unused-ignore]

from streamfw import App, subscriber
from streamfw.message import Outgoing, new_message_id
from streamfw_rabbit import RabbitBroker, RabbitQueue
from tests.services._rabbit_control import evaluate, term
from tests.services.rabbit import OwnRabbit, own, run_directory

from .jobs import fresh
from .process import body, noop

__all__ = [
    "NAME",
    "NOTE",
    "OUT",
    "PREFETCH",
    "Node",
    "acknowledged",
    "channel",
    "emptied",
    "fill",
    "prepare",
    "server",
    "source",
]

NAME, OUT = "bench-orders", "bench-receipts"
PREFETCH = 1000
NOTE = 5  # characters of the note: bodies of 150 bytes
AT_ONCE = 1000  # messages of one publish that fills
PATIENCE = 20_000  # milliseconds


class Node(msgspec.Struct):
    """How a vhost of a node is reached: its URL, and the directory by which the node answers questions (see
    `evaluate`)."""

    url: str
    home: str
    vhost: str = "/"

    @classmethod
    def of(cls, server: str) -> Node:
        return msgspec.json.decode(server, type=cls)

    def __str__(self) -> str:
        return msgspec.json.encode(self).decode()


def source() -> RabbitQueue:
    """The queue that is read."""
    return RabbitQueue(NAME, prefetch=PREFETCH)


@contextmanager
def server() -> Iterator[tuple[Node, int, str]]:
    """One node with the queues, its process, and its version."""
    with own(run_directory(f"bench-{os.getpid()}")) as running:
        node = Node(running.facts.url, str(running.facts.home))
        yield node, _process(running), asyncio.run(prepare(node))


def _process(running: OwnRabbit) -> int:
    """That of Erlang, in which all of RabbitMQ is."""
    (found,) = (pid for pid in running.pids() if psutil.Process(pid).name() == "beam.smp")
    return int(found)


async def prepare(node: Node) -> str:
    """Declare what is there; return the server's version. The queue to read is as an app declares it, for everybody."""
    async with App(subscriber(source())(fresh(noop)), brokers={"default": RabbitBroker(node.url)}).running():
        pass
    async with channel(node) as asking:
        await asking.queue_declare(OUT, durable=True, arguments={"x-queue-type": "quorum"})
        return str((asking.connection.server_properties or {})["version"])


# -- by the library


@asynccontextmanager
async def channel(node: Node, confirms: bool = False) -> AsyncIterator[aiormq.abc.AbstractChannel]:
    """A channel on a connection of its own."""
    connection = await aiormq.connect(node.url)
    try:
        yield await connection.channel(publisher_confirms=confirms)
    finally:
        await connection.close()


async def emptied(node: Node, queue: str) -> int:
    """Empty a queue; return how many messages were in it."""
    async with channel(node) as asking:
        return (await asking.queue_purge(queue)).message_count or 0


async def fill(node: Node, count: int) -> None:
    """Let exactly `count` messages wait in the queue to read. They are persistent, and confirmed."""
    await emptied(node, NAME)
    async with RabbitBroker(node.url).connect() as connection:
        for start in range(0, count, AT_ONCE):
            some = range(start, min(start + AT_ONCE, count))
            messages = [Outgoing(name=NAME, body=body(n, NOTE), message_id=new_message_id()) for n in some]
            if answers := await connection.publish(messages):
                raise AssertionError(f"not all messages were taken: {answers}")


# -- what the server says


async def acknowledged(node: Node, patience: int = PATIENCE) -> None:
    """Wait until the queue to read has nothing any more, neither waiting nor unacknowledged.

    It waits there, within one question to the leader's own state: what the management and `queue.declare` say
    of a quorum queue is seconds old, or counts only what waits. Raises `RabbitServerError` when it takes more than
    `patience` milliseconds.
    """
    total = "{rabbit_fifo, query_messages_total, []}"
    await asyncio.to_thread(
        evaluate,
        Path(node.home),
        f"{{ok, Q}} = rabbit_amqqueue:lookup(rabbit_misc:r({term(node.vhost)}, queue, {term(NAME)})),"
        f"Left = fun() -> {{ok, {{_, N}}, _}} = ra:leader_query(amqqueue:get_pid(Q), {total}), N end,"
        "Wait = fun Wait(Looks) -> case Left() of 0 -> ok; N when Looks =:= 0 -> error({still, N});"
        f" _ -> timer:sleep(1), Wait(Looks - 1) end end, Wait({patience})",
    )
