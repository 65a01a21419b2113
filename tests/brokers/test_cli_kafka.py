"""The command line on a real Kafka: status, seek, publishing and dead letters."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.structs import OffsetAndMetadata

from streamfw import DeadLetter, subscriber
from streamfw.message import Headers, dead_letter_headers
from tests.brokers.cli_kit import Run, commands_on
from tests.brokers.kafka_apps import all_committed, app_of, broker_of, committed, fill, filled, member, numbers, topic
from tests.brokers.kafka_kit import desk, new_name, outgoing, read
from tests.helpers import eventually
from tests.services.kafka import Kafka


@pytest.fixture
def run(kafka: Kafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A command on the test's server, which the environment names."""
    return commands_on(kafka.url, tmp_path, monkeypatch, columns=250)


def cells(line: str) -> list[str]:
    return line.split()


# ------------------------------------------------------------------ status


async def test_status_shows_what_each_group_has_read_and_what_holds_it(kafka: Kafka, run: Run) -> None:
    name, group = await filled(kafka, 40, 1), new_name("group")
    go_on = asyncio.Event()

    @subscriber(name, workers=4)
    async def handle(number: int) -> None:
        if number == 7:
            await go_on.wait()

    app = app_of(kafka, handle, name=group, client_id="the-shop")
    async with app.running():
        held = {"open": 1, "committed": 7, "blocking": 7, "read_to": 40, "end": 40, "lag": 33}

        async def told() -> bool:
            code, out, _ = await asyncio.to_thread(run, "kafka", "status", "--group", group, "--json")
            assert code == 0
            (found,) = json.loads(out)
            assert (found["group"], found["state"], len(found["members"])) == (group, "Stable", 1)
            assert found["members"][0]["client_id"] == "the-shop" and found["members"][0]["partitions"] == 1
            (partition,) = found["partitions"]
            assert (partition["topic"], partition["partition"]) == (name, 0)
            assert partition["member"] == found["members"][0]["member_id"]
            return held.items() <= partition.items() and bool(partition["since"] > 1.7e9)

        await eventually(told, 15)
        code, out, _ = await asyncio.to_thread(run, "kafka", "status", "--group", group)
        assert code == 0
        assert f"{group}: Stable, 1 member" in out
        (row,) = [line for line in out.splitlines() if line.strip().startswith(name)]
        assert cells(row)[:8] == [name, "0", "7", "40", "33", "1", "40", "7"]
        assert cells(row)[9] == "s" and cells(row)[10] == "the-shop/127.0.0.1"
        go_on.set()
        await all_committed(kafka, name, group)
    code, out, _ = await asyncio.to_thread(run, "kafka", "status", "--group", group)
    assert f"{group}: Empty, 0 members" in out
    (row,) = [line for line in out.splitlines() if line.strip().startswith(name)]
    assert cells(row) == [name, "0", "40", "40", "0", "0", "40"]


async def test_status_of_all_groups_also_of_others(kafka: Kafka, run: Run) -> None:
    """What a foreign consumer writes beside its offsets means nothing to us; a topic that is gone has no end."""
    name, group = await filled(kafka, 4), new_name("foreign")
    async with desk(kafka.url) as asked:
        consumer = AIOKafkaConsumer(bootstrap_servers=kafka.bootstrap, group_id=group, enable_auto_commit=False)
        await consumer.start()
        try:
            consumer.assign([TopicPartition(name, 0)])
            await consumer.commit({TopicPartition(name, 0): OffsetAndMetadata(1, "open sesame=1 read=x")})
        finally:
            await consumer.stop()
        assert await asked.topics.committed(group) == {TopicPartition(name, 0): 1}
    code, out, _ = await asyncio.to_thread(run, "kafka", "status")
    assert code == 0
    assert f"{group}: Empty, 0 members" in out
    (row,) = [line for line in out.splitlines() if line.strip().startswith(name)]
    assert cells(row) == [name, "0", "1", "2", "1"]


def test_status_of_a_group_that_is_not_there(run: Run) -> None:
    code, out, error = run("kafka", "status", "--group", "nobody-has-it")
    assert (code, out) == (1, "")
    assert error.startswith("error: no such group: 'nobody-has-it'")
    code, out, _ = run("kafka", "status", "--group", "nobody-has-it", "--json")
    assert (code, json.loads(out)) == (1, [])


@pytest.mark.parametrize("command", [["status"], ["seek", "--group", "g", "--topic", "t", "--to", "latest"]])
def test_a_broker_that_is_another_or_away(run: Run, command: list[str]) -> None:
    code, out, error = run("kafka", *command, "--broker", "memory://")
    assert (code, out) == (1, "")
    assert "is not Kafka: name one with --broker kafka://.." in error
    code, out, error = run("kafka", *command, "--broker", "kafka://somebody:a-secret@127.0.0.1:1")
    assert (code, out) == (1, "")
    assert "connecting to 127.0.0.1:1" in error and "a-secret" not in error


# ------------------------------------------------------------------ seek


async def test_seek_moves_a_group_that_does_not_run(kafka: Kafka, run: Run) -> None:
    name, group = await topic(kafka, 2, retention_ms=-1), new_name("group")
    for start in (1_700_000_000_000, 1_700_000_100_000):
        for partition in (0, 1):
            await fill(kafka, name, numbers(range(3)), partition=partition, timestamp_ms=start)

    async def to(*wanted: str) -> tuple[dict[int, int], list[str]]:
        arguments = [word for each in wanted for word in ("--to", each)]
        arguments += ["--new"] * (wanted == ("latest",))
        code, out, error = await asyncio.to_thread(run, "kafka", "seek", "--group", group, "--topic", name, *arguments)
        assert (code, error) == (0, "")
        assert out.startswith(f"Group {group} in {name}:\n")
        return await committed(kafka, name, group), [" ".join(line.split()) for line in out.splitlines()]

    found, said = await to("latest")
    assert found == {0: 6, 1: 6}
    assert {"0 (none) 6", "1 (none) 6"} <= set(said)
    found, said = await to("1=2,0=5")
    assert found == {0: 5, 1: 2}
    assert {"0 6 5", "1 6 2"} <= set(said)
    assert (await to("1=6"))[0] == {0: 5, 1: 6}
    assert (await to("0=0", "1=1"))[0] == {0: 0, 1: 1}
    assert (await to("2023-11-14T22:14:30Z"))[0] == {0: 3, 1: 3}  # between the two
    assert (await to("2023-11-14T23:13:20+01:00"))[0] == {0: 0, 1: 0}
    assert (await to("2030-01-01T00:00:00+00:00"))[0] == {0: 6, 1: 6}
    assert (await to("earliest"))[0] == {0: 0, 1: 0}
    async with member(kafka, name, group) as one:  # and from there it reads
        assert len(await one.take(12)) == 12


async def test_seek_refuses_a_group_that_runs(kafka: Kafka, run: Run) -> None:
    name, group = await filled(kafka, 4), new_name("group")
    async with member(kafka, name, group):
        assert await eventually(lambda: committed(kafka, name, group)) == {0: 0, 1: 0}
        code, out, error = await asyncio.to_thread(
            run, "kafka", "seek", "--group", group, "--topic", name, "--to", "latest"
        )
        assert (code, out) == (1, "")
        assert "it has 1 running member (streamfw/127.0.0.1)" in error and "App.seek" in error
        assert await committed(kafka, name, group) == {0: 0, 1: 0}


@pytest.mark.parametrize(
    ("to", "said"),
    [
        (["yesterday"], "--to yesterday: earliest, latest, a time in ISO 8601 or PARTITION=OFFSET is needed"),
        (["2026-11-30T10:00:00"], "a time needs its zone"),
        (["0=x"], "--to 0=x: a number of a partition and an offset are needed"),
        (["0=-3"], "--to 0=-3: a number of a partition and an offset are needed"),
        (["0=1", "0=2"], "--to names partition 0 twice"),
        (["earliest", "0=2"], "--to may be repeated for PARTITION=OFFSET only"),
        (["0=99"], "-0 keeps offsets 0 to 2 (the end), and not 99"),
        (["7=1"], "has 2 partitions, from 0 on, and no [7]"),
    ],
)
async def test_seek_says_what_is_wrong(kafka: Kafka, run: Run, to: list[str], said: str) -> None:
    name, group = await filled(kafka, 4), new_name("group")
    arguments = [word for each in to for word in ("--to", each)]
    command = ["kafka", "seek", "--group", group, "--topic", name, "--new", *arguments]
    code, out, error = await asyncio.to_thread(run, *command)
    assert (code, out) == (1, "")
    assert said in error
    assert await committed(kafka, name, group) == {}


async def test_seek_in_a_topic_that_is_not_there(kafka: Kafka, run: Run) -> None:
    name = await filled(kafka, 4)
    code, _, error = await asyncio.to_thread(
        run, "kafka", "seek", "--group", "g", "--topic", name + "s", "--to", "latest", "--new"
    )
    assert code == 1
    assert f"topic '{name}s' does not exist; near it: '{name}'" in error


async def test_seek_of_a_group_that_is_not_there(kafka: Kafka, run: Run) -> None:
    """A slip of its name makes no new group."""
    name, group = await filled(kafka, 4), new_name("group")
    command = ["kafka", "seek", "--topic", name, "--to", "latest", "--group"]
    code, out, error = await asyncio.to_thread(run, *command, group)
    assert (code, out) == (1, "") and f"there is no group '{group}'" in error and "(--new)" in error
    assert (await asyncio.to_thread(run, *command, group, "--new"))[0] == 0
    code, out, error = await asyncio.to_thread(run, *command, group[:-1])
    assert (code, out) == (1, "") and f"'{group}'" in error.partition("near it: ")[2]
    assert await committed(kafka, name, group[:-1]) == {}
    assert (await asyncio.to_thread(run, *command, group))[0] == 0
    code, _, error = await asyncio.to_thread(run, "kafka", "status", "--group", group[:-1])
    assert code == 1
    assert error.startswith(f"error: no such group: '{group[:-1]}'; near it: ") and f"'{group}'" in error


# ------------------------------------------------------------------ forget


async def test_forget_a_group(kafka: Kafka, run: Run) -> None:
    name, group = await filled(kafka, 4), new_name("group")

    async def forget(*arguments: str) -> tuple[int, str, str]:
        return await asyncio.to_thread(run, "kafka", "forget", "--group", *arguments)

    async with member(kafka, name, group):
        assert await eventually(lambda: committed(kafka, name, group)) == {0: 0, 1: 0}
        code, out, error = await forget(group, "--yes")
        assert (code, out) == (1, "") and f"group '{group}' has 1 running member; stop them first" in error
        code, _, error = await forget(group, "--topic", name, "--yes")
        assert code == 1 and "stop them" in error
    code, out, error = await forget(group)  # and nobody says yes
    assert (code, f"Forget group {group}?" in out) == (1, True)
    assert await committed(kafka, name, group) == {0: 0, 1: 0}
    code, out, error = await forget(group, "--yes")
    assert (code, error) == (0, "")
    assert [name, "2", "4"] in [cells(line) for line in out.splitlines()]
    assert out.endswith("Forgotten; it had not done 4 messages.\n")
    code, _, error = await forget(group, "--yes")
    assert code == 1 and error.startswith(f"error: no such group: '{group}'")


async def test_forget_one_topic_of_a_group(kafka: Kafka, run: Run) -> None:
    name, other, group = await filled(kafka, 4), await filled(kafka, 2), new_name("group")
    async with desk(kafka.url) as asked:
        for each in (name, other):
            command = ["kafka", "seek", "--group", group, "--topic", each, "--to", "earliest", "--new"]
            assert (await asyncio.to_thread(run, *command))[0] == 0
        command = ["kafka", "forget", "--group", group, "--yes", "--topic"]
        code, _, error = await asyncio.to_thread(run, *command, name + "s")
        assert code == 1 and f"has read nothing of '{name}s'; did you mean '{name}'?" in error
        code, out, _ = await asyncio.to_thread(run, *command, name)
        assert code == 0 and other not in out and out.endswith("it had not done 4 messages.\n")
        assert {tp.topic for tp in await asked.topics.committed(group)} == {other}


async def test_forget_takes_what_waits_in_retry_topics_along(kafka: Kafka, run: Run) -> None:
    name, group = await filled(kafka, 2, 1), new_name("group")
    retry = await kafka.create_topic(f"{name}.{group}.retry", 1)
    await fill(kafka, retry, numbers(range(3)))
    for each in (name, retry):
        command = ["kafka", "seek", "--group", group, "--topic", each, "--to", "0=1", "--new"]
        assert (await asyncio.to_thread(run, *command))[0] == 0
    code, out, _ = await asyncio.to_thread(run, "kafka", "forget", "--group", group, "--yes")
    assert code == 0 and out.endswith("Forgotten; it had not done 3 messages.\n")
    assert [retry, "1", "2"] in [cells(line) for line in out.splitlines()]
    assert await read(kafka, retry) == [] and len(await read(kafka, name)) == 2


# ------------------------------------------------------------------ dead letters


async def test_dead_letters_by_the_command_line(kafka: Kafka, run: Run) -> None:
    name, group = await topic(kafka, 1), new_name("group")
    broken = True
    done: list[str] = []

    @subscriber(name, attempts=1)
    async def handle(order: dict[str, str]) -> None:
        if broken:
            raise DeadLetter("no stock")
        done.append(order["item"])

    async with app_of(kafka, handle, name=group).running():
        for item in ("a", "b", "c"):
            code, _, _ = await asyncio.to_thread(run, "publish", name, json.dumps({"item": item}))
            assert code == 0
        await all_committed(kafka, name, group)
        broken = False
        dead = f"{name}.dead"

        async def dlq(*arguments: str) -> str:
            code, out, error = await asyncio.to_thread(run, "dlq", *arguments)
            assert (code, error) == (0, "")
            return out

        listed = [line.split() for line in (await dlq("list", dead)).splitlines() if "no stock" in line]
        ids = [words[0] for words in listed]
        assert len(ids) == 3 and f"{name} (group {group})" in " ".join(listed[0])
        shown = await dlq("show", dead, "--id", ids[1])
        assert '"item": "b"' in shown and "header streamfw-origin-offset" in shown
        assert await dlq("requeue", dead, "--id", ids[1]) == "1 put back.\n"
        await eventually(lambda: done == ["b"])
        assert await dlq("purge", dead, "--id", ids[0]) == "1 discarded.\n"
        assert ids[2] in await dlq("list", dead) and ids[0] not in await dlq("list", dead)
        assert await dlq("purge", dead, "--all", "--yes") == "1 discarded.\n"
        assert await dlq("list", dead) == f"{dead} is empty.\n"
    code, _, error = await asyncio.to_thread(run, "dlq", "list", name + ".dea")
    assert code == 1 and f"topic '{name}.dea' does not exist; near it: '{dead}'" in error


async def test_dead_letters_of_groups_that_share_a_topic(kafka: Kafka, run: Run) -> None:
    name, one, two = await topic(kafka, 1), new_name("one"), new_name("two")
    dead = await kafka.create_topic(f"{name}.dead", 1)
    retry = await kafka.create_topic(f"{name}.{one}.retry", 1)
    async with broker_of(kafka).connect() as opened:
        connection: Any = opened
        for group, places in ((one, [name, retry]), (two, [name])):
            for place in places:
                await connection.seek_group(group, place, "latest")
        letters = [
            outgoing(dead, b"{}", message_id=each, headers=dead_letter_headers(Headers(()), "no", "E", name, group, 3))
            for each in ("a", "b")
            for group in (one, two)
        ]
        assert not any(await connection.publish(letters))

    async def dlq(*arguments: str) -> tuple[int, str, str]:
        return await asyncio.to_thread(run, "dlq", *arguments)

    code, out, error = await dlq("requeue", dead, "--id", "a")
    assert (code, out) == (1, "")
    assert f"1 of 2 letters of '{dead}' were put back. What stays: 1 of group '{two}': " in error
    assert f"streamfw kafka forget --group {one} --topic {name}" in error
    assert (await dlq("requeue", dead, "--group", one, "--id", "b")) == (0, "1 put back.\n", "")
    code, out, _ = await dlq("list", dead, "--group", two)
    assert code == 0 and out.count(f"(group {two})") == 2
    assert (await dlq("list", dead, "--group", one))[1] == f"{dead} has no dead letters of group {one}.\n"
    code, _, _ = await asyncio.to_thread(run, "kafka", "forget", "--group", one, "--topic", name, "--yes")
    assert code == 0
    assert await dlq("requeue", dead, "--all") == (0, "2 put back.\n", "")
