"""What nobody should put into a topic, and what it must not break."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from streamfw.cli.program import program
from streamfw.message import ORIGIN, ORIGIN_GROUP, TOMBSTONE, Headers, Outgoing
from streamfw_kafka.connection import KafkaConnection
from streamfw_kafka.publish import Stored
from streamfw_kafka.wire import MESSAGE_ID
from tests.brokers.kafka_apps import broker_of, fill, topic
from tests.brokers.kafka_kit import desk, outgoing, read
from tests.services.kafka import Kafka

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(kafka: Kafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A command on the test's server, which the environment names."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("COLUMNS", "250")  # so that no cell is wrapped
    monkeypatch.setenv("STREAMFW_BROKERS__DEFAULT__URL", kafka.url)
    runner = CliRunner()

    def run(*arguments: str) -> tuple[int, str, str]:
        result = runner.invoke(program, list(arguments), catch_exceptions=False)
        return result.exit_code, result.stdout, result.stderr

    return run


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
                assert not await somebody.send(Stored(name=dead, body=body, message_id="", headers=headers))
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
