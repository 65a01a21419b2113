"""What nobody should put into a topic, and what it must not break."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiokafka.consumer import fetcher
from aiokafka.errors import CorruptRecordException

from streamfw import subscriber
from streamfw.message import ORIGIN, ORIGIN_GROUP, TOMBSTONE, Headers, Outgoing
from streamfw_kafka.connection import KafkaConnection
from streamfw_kafka.wire import MESSAGE_ID
from tests.brokers.cli_kit import Run, commands_on
from tests.brokers.kafka_apps import app_of, broker_of, committed, fill, filled, numbers, source_of, topic
from tests.brokers.kafka_kit import desk, new_name, outgoing, read
from tests.helpers import eventually
from tests.services.kafka import Kafka, OwnKafka, java_tool


@pytest.fixture
def run(kafka: Kafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A command on the test's server, which the environment names."""
    return commands_on(kafka.url, tmp_path, monkeypatch, columns=250)


# -- dead letters


@pytest.mark.parametrize("verb", ["list", "show"])
def test_letters_that_were_written_to_break_the_terminal(kafka: Kafka, run: Run, verb: str) -> None:
    """Ids and names of headers are somebody else's as well: escapes, what is no text, times that no calendar has."""

    async def bury() -> str:
        dead = f"{await topic(kafka, 1)}.dead"
        await kafka.create_topic(dead, 1)
        identity = b"\x1b[31mred\xff\n"
        await fill(kafka, dead, [b"[" * 100_000], headers=[(MESSAGE_ID, identity)], timestamp_ms=-(10**15))
        async with desk(kafka.url) as asked:
            assert not await asked.publish(dead, b"{}", message_id="second", headers={"\x1b[2J\udcff": "v"})
        return dead

    code, out, error = run("dlq", verb, asyncio.run(bury()), "--limit", "5")
    assert (code, error) == (0, "")
    assert "\\x1b[31mred\\udcff" in out
    assert "-1e+12" in out
    assert "second" in out
    assert "\x1b" not in out
    out.encode()  # nothing is left that is no text


async def test_letters_beyond_our_own_limits_are_put_back_and_make_room_for_others(kafka: Kafka) -> None:
    """Kafka took them once, from whoever wrote them: they must not hold up all the others."""
    name = await topic(kafka, 1)
    dead = await kafka.create_topic(f"{name}.dead", 1)
    told = Headers({ORIGIN: name, ORIGIN_GROUP: "shop"})
    large = b"x" * 200_000
    async with desk(kafka.url) as somebody:
        for headers, *bodies in ((Headers(), large, TOMBSTONE), (told, large, TOMBSTONE, b"1")):
            for body in bodies:
                assert not await somebody.send(
                    Outgoing(name=dead, body=body, message_id="", headers=headers, stored=True)
                )
    async with broker_of(kafka, max_body=100_000).connect() as connection:
        assert isinstance(connection, KafkaConnection)
        letters = await connection.dead_letters(dead)
        assert await letters.requeue() == 3
        assert [record.value for record in await read(kafka, name)] == [large, None, b"1"]
        assert [letter.body for letter in await letters.list()] == [large, TOMBSTONE]
        first = (await letters.list())[0].message_id
        await connection.publish([Outgoing(name=dead, body=b"2", message_id="2")])
        assert await letters.purge(["2"]) == 1
        assert [letter.body for letter in await letters.list()] == [large, TOMBSTONE]
        assert await letters.purge([first]) == 1
        # What is published anew keeps to the limits.
        too_large, no_key = await connection.publish([outgoing(name, large), outgoing(name, TOMBSTONE)])
        assert "max_body=100000" in str(too_large)
        assert "a tombstone without a key" in str(no_key)


# -- groups of others


def test_a_group_of_the_new_protocol_is_shown_and_moved_like_others(kafka: Kafka, run: Run) -> None:
    """aiokafka cannot ask who its members are; the old request calls such a group dead."""
    group = new_name("group")
    name = asyncio.run(filled(kafka, 20, 1))
    told = ("--bootstrap-server", kafka.bootstrap, "--topic", name, "--group", group, "--from-beginning")
    rest = ("--consumer-property", "group.protocol=consumer", "--max-messages", "20")
    done = java_tool("org.apache.kafka.tools.consumer.ConsoleConsumer", *told, *rest)
    assert done.returncode == 0, done.stderr
    code, out, error = run("kafka", "status", "--group", group)
    assert (code, error) == (0, "")
    assert f"{group}: Unknown, of another protocol (KIP-848), so its members are not known" in out
    assert [line.split() for line in out.splitlines() if name in line] == [[name, "0", "20", "20", "0"]]
    assert run("kafka", "status")[0] == 0
    code, out, error = run("kafka", "seek", "--group", group, "--topic", name, "--to", "0=3")
    assert (code, error) == (0, "")
    assert asyncio.run(committed(kafka, name, group)) == {0: 3}


# -- what cannot be read


def damage(log: Path, batch: int) -> None:
    """Turn the last bit of a batch of a segment (each one begins with its first offset, 8 bytes, and its length, 4)."""
    data = bytearray(log.read_bytes())
    at = 0
    for _ in range(batch + 1):
        at += 12 + struct.unpack_from(">i", data, at + 8)[0]
    data[at - 1] ^= 1
    log.write_bytes(data)


async def test_a_damaged_record_stops_its_partition_alone_and_a_seek_steps_over_it(
    own_kafka: OwnKafka, caplog: pytest.LogCaptureFixture
) -> None:
    """What is before it is handled, other partitions go on, the group is left in peace, and health tells."""
    kafka = own_kafka.facts
    name = await topic(kafka, 2)
    for number in range(30):
        await fill(kafka, name, [b"%d" % number], partition=0)  # each in a batch of its own
    await asyncio.to_thread(own_kafka.stop)
    damage(next(own_kafka.home.glob(f"**/{name}-0/*.log")), 20)
    await asyncio.to_thread(own_kafka.start)
    handled: list[int] = []

    @subscriber(name, workers=4, dead_letter=None)
    async def handle(number: int) -> None:
        handled.append(number)

    app = app_of(kafka, handle, name=new_name("group"))
    async with app.running():
        where = f"{name}-0 cannot be read from offset 20 on: Invalid CRC"
        await eventually(lambda: where in str(app.health().subscribers))
        assert not app.health().ok
        await fill(kafka, name, numbers(range(100, 2000)), partition=1)
        await eventually(lambda: len(handled) >= 1920)
        assert sorted(handled) == [*range(20), *range(100, 2000)]
        assert not app.health().ok
        assert source_of(app).group.rebalances == 1
        assert caplog.text.count("To step over what is damaged: seek") == 1
        await app.seek(handle, {0: 21})
        await eventually(lambda: len(handled) >= 1929)
        assert app.health().ok
    assert sorted(handled) == [*range(20), *range(21, 30), *range(100, 2000)]


async def test_damage_that_was_on_the_way_is_read_again(kafka: Kafka, monkeypatch: pytest.MonkeyPatch) -> None:
    name = await filled(kafka, 3000)
    fetched = fetcher.PartitionRecords._unpack_records
    faults = [700, 30, 3, 0]  # records that are read before it

    def sometimes(self: Any) -> Iterator[Any]:
        good = faults.pop(0) if faults else -1
        for count, record in enumerate(fetched(self)):
            if count == good:
                raise CorruptRecordException("noise")
            yield record

    handled: list[int] = []

    @subscriber(name, workers=4, dead_letter=None)
    async def handle(number: int) -> None:
        handled.append(number)

    monkeypatch.setattr(fetcher.PartitionRecords, "_unpack_records", sometimes)
    app = app_of(kafka, handle, name=new_name("group"))
    async with app.running():
        await eventually(lambda: len(handled) >= 3000)
        await eventually(lambda: app.health().ok)
        assert source_of(app).group.rebalances == 1
    assert not faults
    assert sorted(handled) == [*range(3000)]
