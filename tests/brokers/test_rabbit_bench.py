"""The jobs of the RabbitMQ benchmarks, with few messages: that they do what their figures are about."""

from __future__ import annotations

import pytest

from benchmarks.process import PUBLISHERS, Here
from benchmarks.rabbit_process import READERS, SENDERS, publishing, reading
from benchmarks.rabbit_queue import NAME, Node, acknowledged, channel, fill, prepare
from tests.services.rabbit import Rabbit, RabbitServerError

COUNT = 150
PEERS = ("peer", "peer-sends")  # not installed for the tests


async def node_of(rabbit: Rabbit) -> Node:
    node = Node(rabbit.url, str(rabbit.home), rabbit.vhost)
    await prepare(node)
    return node


@pytest.mark.parametrize("name", [name for name in READERS if name not in PEERS])
async def test_a_reader_handles_and_acknowledges_all(name: str, rabbit: Rabbit) -> None:
    node = await node_of(rabbit)
    sample = await reading(Here(str(node), 0), COUNT, READERS[name])
    assert sample.count == COUNT
    assert sample.client > 0
    await acknowledged(node, 0)


@pytest.mark.parametrize("name", [name for name in SENDERS if name not in PEERS])
async def test_a_sender_publishes_all(name: str, rabbit: Rabbit) -> None:
    """It raises when the server has another number of them."""
    node = await node_of(rabbit)
    sample = await publishing(Here(str(node), 0), COUNT + PUBLISHERS, SENDERS[name])
    assert sample.count == COUNT + PUBLISHERS


async def test_what_is_unacknowledged_is_waited_for(rabbit: Rabbit) -> None:
    node = await node_of(rabbit)
    await fill(node, 1)
    async with channel(node) as reading:
        message = await reading.basic_get(NAME)
        with pytest.raises(RabbitServerError, match="still,1"):
            await acknowledged(node, 0)
        assert message.delivery_tag is not None
        await reading.basic_ack(message.delivery_tag)
        await acknowledged(node)
