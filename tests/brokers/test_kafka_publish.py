"""Publishing to Kafka: what is stored and where, an answer for each message, and one that is right whatever breaks."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions
from aiokafka.partitioner import murmur2 as aiokafka_murmur2

from streamfw.errors import (
    BrokerClosed,
    BrokerUnavailable,
    OutcomeUnknown,
    PublishError,
    Rejected,
    TooLarge,
    Unavailable,
    Unroutable,
)
from streamfw.message import TOMBSTONE, Headers, Outgoing
from streamfw_kafka import publish, sending
from streamfw_kafka.lanes import Lane
from streamfw_kafka.nodes import Nodes
from streamfw_kafka.wire import MESSAGE_ID, key_of, message_id_of, murmur2, visible_headers
from tests.brokers.kafka_kit import Desk, desk, login_url, new_name, outgoing, read
from tests.helpers import eventually
from tests.services import kafka as services
from tests.services._homes import free_port
from tests.services.kafka import Kafka, OwnKafka, java_tool

CODECS = ("gzip", "snappy", "lz4", "zstd")


@pytest.fixture
async def it(kafka: Kafka) -> AsyncIterator[Desk]:
    async with desk(kafka.url) as opened:
        yield opened


@pytest.fixture
async def topic(kafka: Kafka) -> str:
    return await kafka.create_topic(new_name())


def bodies(records: Iterable[Any]) -> list[bytes]:
    return [record.value for record in records]


def kinds(answers: Sequence[PublishError | None]) -> list[type[PublishError] | None]:
    return [None if answer is None else type(answer) for answer in answers]


def lanes(it: Desk, topic: str) -> list[Lane]:
    return it.publishing._routes[topic].lanes


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of all requests, as they are sent."""
    made: list[str] = []
    sent = Nodes.sent

    async def noted(connection: Any, request: Any) -> Any:
        made.append(type(request).__name__)
        return await sent(connection, request)

    monkeypatch.setattr(Nodes, "sent", staticmethod(noted))
    return made


# ---------------------------------------------------------------------- what is stored


async def test_a_record_is_what_was_published(kafka: Kafka, it: Desk, topic: str) -> None:
    headers = [
        ("tenant", b"a"),
        ("tag", b"1"),
        ("tag", b""),
        ("null", None),
        ("tag", b"\xff\x00"),
        ("näme", "ü".encode()),
    ]
    message = outgoing(topic, b"body", key="kéy", headers=headers, message_id="the-id")
    before = time.time()
    assert await it.send(message) == ()
    (record,) = await read(kafka, topic)
    assert (record.key, record.value) == ("kéy".encode(), b"body")
    assert list(record.headers) == [(MESSAGE_ID, b"the-id"), *headers]
    assert before - 1 < record.timestamp / 1000 < time.time() + 1
    assert message_id_of(record) == "the-id"
    assert visible_headers(record.headers) == Headers(headers)


async def test_a_message_without_an_id_gets_one_of_its_place(kafka: Kafka, it: Desk, topic: str) -> None:
    assert await it.publish(topic, b"1", message_id="", key="k") == ()
    (record,) = await read(kafka, topic)
    assert list(record.headers) == []
    assert message_id_of(record) == f"{topic}-{record.partition}-0"


async def test_a_header_of_the_name_of_ours_is_the_users_own(kafka: Kafka, it: Desk, topic: str) -> None:
    assert await it.publish(topic, b"1", message_id="ours", headers=[(MESSAGE_ID, b"theirs")]) == ()
    (record,) = await read(kafka, topic)
    assert message_id_of(record) == "ours"
    assert visible_headers(record.headers) == Headers([(MESSAGE_ID, b"theirs")])


async def test_keys_and_header_names_that_are_not_utf8_go_out_as_they_came(kafka: Kafka, it: Desk, topic: str) -> None:
    raw = b"\xff\xfek\xc3"
    key = key_of(raw)
    assert key is not None
    assert await it.publish(topic, b"before", b"1", b"after", key=key) == ()
    assert await it.publish(topic, b"2", key=key, headers=[("a", b"1"), ("\udcff", b"2"), ("b", b"3")]) == ()
    assert await it.publish(topic, b"last", key=key) == ()
    # The protocol wants UTF-8 for names, and aiokafka insists, unless somebody in this process had to make it tolerant
    # (see test_kafka_wire): so the server is asked, and not what can be read.
    partition = aiokafka_murmur2(raw) % (1 << 31) % 4
    assert await it.topics.ends(topic) == {TopicPartition(topic, n): 5 * (n == partition) for n in range(4)}


async def test_a_tombstone_is_a_null_and_no_bytes_are_no_bytes(kafka: Kafka, it: Desk, topic: str) -> None:
    none = outgoing(topic, key="k")
    none.body = None  # type: ignore[assignment]
    assert await it.send(none, outgoing(topic, TOMBSTONE, key="k"), outgoing(topic, b"", key="k")) == ()
    assert bodies(await read(kafka, topic)) == [None, None, b""]
    assert kinds(await it.publish(topic, TOMBSTONE)) == [Rejected]
    none.key = None
    (answer,) = await it.send(none)
    assert "a tombstone without a key" in str(answer)


async def test_bytes_of_another_type_are_bytes(kafka: Kafka, it: Desk, topic: str) -> None:
    class Mine(bytes):
        pass

    for body in (Mine(b"1"), bytearray(b"2"), memoryview(b"3")):
        assert await it.publish(topic, body, key="k") == ()  # type: ignore[arg-type]
    assert bodies(await read(kafka, topic)) == [b"1", b"2", b"3"]


@pytest.mark.parametrize("codec", CODECS)
async def test_compression(kafka: Kafka, topic: str, codec: str) -> None:
    text = [b"abc" * 1000 + b"%d" % number for number in range(200)]
    async with desk(kafka.url, compression=codec) as it:
        assert await it.publish(topic, *text, key="k") == ()
        assert await it.publish(topic, random.randbytes(1000), key="k") == ()  # grows, so it is sent as it is
        before = {tp.partition: end for tp, end in (await it.topics.ends(topic)).items()}
    assert sorted(before.values()) == [0, 0, 0, 201]
    assert bodies(await read(kafka, topic))[:-1] == text


async def test_compression_is_what_java_reads_and_writes(kafka: Kafka) -> None:
    """All codecs of ours in one topic for the Java consumer; and each of Java's read back."""
    topic = await kafka.create_topic(new_name(), partitions=1)
    for codec in CODECS:
        async with desk(kafka.url, compression=codec) as it:
            assert await it.publish(topic, *[codec.encode() * 100] * 100) == ()

    async def java(tool: str, *options: str, input: bytes = b"") -> bytes:
        told = ("--bootstrap-server", kafka.bootstrap, "--topic", topic, *options)
        done = await asyncio.to_thread(java_tool, f"org.apache.kafka.tools.{tool}", *told, input=input)
        assert done.returncode == 0, done.stderr
        return done.stdout

    consuming = ("consumer.ConsoleConsumer", "--from-beginning", "--max-messages", "400", "--timeout-ms", "20000")
    lines = (await java(*consuming)).split()
    assert lines == [codec.encode() * 100 for codec in CODECS for _ in range(100)]
    for pair in itertools.batched(CODECS, 2) if hasattr(itertools, "batched") else (CODECS[:2], CODECS[2:]):
        await asyncio.gather(
            *(java("ConsoleProducer", "--compression-codec", codec, input=b"J" * 99 + b"\n") for codec in pair)
        )
    assert bodies(await read(kafka, topic))[400:] == [b"J" * 99] * 4


# ---------------------------------------------------------------------- where


def test_murmur2_is_that_of_aiokafka() -> None:
    chance = random.Random(1)
    for length in [*range(40), 1000]:
        key = chance.randbytes(length)
        assert murmur2(key) == aiokafka_murmur2(key)


async def test_keys_are_where_the_java_client_puts_them(kafka: Kafka) -> None:
    """Through Java's own console producer: the same 500 keys, one of them empty, many not ASCII."""
    ours = await kafka.create_topic(new_name("ours"), partitions=7)
    javas = await kafka.create_topic(new_name("java"), partitions=7)
    alphabets = ("abcdefghijklmnop-0123456789", "äöüßéøñ", "日本語の鍵文字", "🗝️🔑🎹😀")
    chance = random.Random(7)
    keys = {""} | {f"key-{number}" for number in range(100)}
    while len(keys) < 500:
        keys.add("".join(chance.choices(chance.choice(alphabets), k=chance.randrange(1, 30))))
    lines = "".join(f"{key}|v\n" for key in keys)
    options = ("--reader-property", "parse.key=true", "--reader-property", "key.separator=|")
    done = await asyncio.to_thread(
        java_tool,
        "org.apache.kafka.tools.ConsoleProducer",
        *("--bootstrap-server", kafka.bootstrap, "--topic", javas, *options),
        input=lines.encode(),
    )
    assert done.returncode == 0, done.stderr
    async with desk(kafka.url) as it:
        assert await it.send(*(outgoing(ours, b"v", key=key) for key in keys)) == ()
    places = [{key_of(r.key): r.partition for r in await read(kafka, topic)} for topic in (ours, javas)]
    assert places[0] == places[1]
    assert places[0].keys() == keys
    assert set(places[0].values()) == set(range(7))


async def test_messages_without_a_key_are_spread(kafka: Kafka, it: Desk, topic: str) -> None:
    """One after the other, all at once, and in one call."""
    for number in range(40):
        assert await it.publish(topic, b"%d" % number) == ()
    alone = Counter(record.partition for record in await read(kafka, topic))
    assert set(alone.values()) == {10}
    big = await kafka.create_topic(new_name())
    assert await it.publish(big, *[bytes(10_000)] * 104) == ()
    assert sorted(Counter(record.partition for record in await read(kafka, big)).values()) == [26] * 4


# ---------------------------------------------------------------------- order


async def test_messages_of_one_key_keep_their_order(kafka: Kafka, it: Desk, topic: str) -> None:
    """In one call, over calls that wait for each other, and over calls that do not."""
    numbers = itertools.count()

    def some(count: int) -> list[Outgoing]:
        return [outgoing(topic, b"%d" % number, key=f"k{number % 7}") for number in itertools.islice(numbers, count)]

    assert await it.send(*some(1000)) == ()
    for _ in range(20):
        assert await it.send(*some(3)) == ()
    tasks = []
    for _ in range(100):
        tasks.append(asyncio.create_task(it.send(*some(5))))
        if random.random() < 0.3:
            await asyncio.sleep(0)
    assert set(await asyncio.gather(*tasks)) == {()}
    by_key: dict[bytes, list[int]] = defaultdict(list)
    for record in await read(kafka, topic):
        by_key[record.key].append(int(record.value))
    assert {key: seen for key, seen in by_key.items() if seen != sorted(set(seen))} == {}
    assert sum(map(len, by_key.values())) == next(numbers)


async def test_the_order_holds_where_the_topic_is_not_yet_known(kafka: Kafka, it: Desk, topic: str) -> None:
    calls = [asyncio.create_task(it.publish(topic, b"%d" % number, key="k")) for number in range(50)]
    assert set(await asyncio.gather(*calls)) == {()}
    assert bodies(await read(kafka, topic)) == [b"%d" % number for number in range(50)]


# ---------------------------------------------------------------------- coalescing


async def test_concurrent_publishes_share_requests(it: Desk, topic: str, requests: list[str]) -> None:
    assert await it.send(*(outgoing(topic, key=f"{number}") for number in range(50))) == ()  # every partition leads
    requests.clear()
    assert set(await asyncio.gather(*(it.publish(topic, b"%d" % n, key=f"{n}") for n in range(100)))) == {()}
    assert requests.count("ProduceRequest") == 1
    requests.clear()
    assert await it.publish(topic, *[bytes(100)] * 1000) == ()
    assert requests.count("ProduceRequest") == 1


async def test_what_comes_while_a_request_is_out_goes_into_the_next(it: Desk, topic: str, requests: list[str]) -> None:
    assert await it.publish(topic, b"warm") == ()
    requests.clear()

    async def one_by_one() -> None:
        for number in range(20):
            assert await it.publish(topic, b"%d" % number) == ()

    await asyncio.gather(*(one_by_one() for _ in range(100)))
    assert requests.count("ProduceRequest") < 100  # of 2,000 messages; 21 where nothing disturbs


async def test_linger_waits_for_more(kafka: Kafka, topic: str, requests: list[str]) -> None:
    async with desk(kafka.url, linger=0.2) as it:
        assert await it.publish(topic, b"warm") == ()
        requests.clear()
        first = asyncio.create_task(it.publish(topic, b"1"))
        await asyncio.sleep(0.02)
        assert await it.publish(topic, b"2") == ()
        assert await first == ()
    assert requests.count("ProduceRequest") == 1


async def test_there_are_no_tasks_and_no_log_records_for_messages(
    it: Desk, topic: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert await it.publish(topic, b"warm") == ()
    made: list[object] = []

    def factory(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        made.append(coroutine)
        return asyncio.Task(coroutine, loop=loop, **options)

    loop = asyncio.get_running_loop()
    loop.set_task_factory(factory)
    caplog.clear()
    with caplog.at_level("DEBUG", logger="streamfw"):
        for _ in range(50):
            assert await it.publish(topic, b"1", b"2") == ()
    loop.set_task_factory(None)
    assert not caplog.records
    assert len(made) < 5  # none of them ours; asking for leaders may come in between


# ---------------------------------------------------------------------- refused before it is sent


async def test_a_body_beyond_max_body_is_too_large_alone(kafka: Kafka, topic: str) -> None:
    async with desk(kafka.url, max_body=10) as it:
        answers = await it.publish(topic, b"1", bytes(11), bytes(10))
        assert kinds(answers) == [None, TooLarge, None]
        assert "its body of 11 bytes is larger than max_body=10" in str(answers[1])
        assert answers[1] is not None
        assert answers[1].name == topic
    assert sorted(bodies(await read(kafka, topic))) == [bytes(10), b"1"]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"delay": 1.0}, "delay=1.0: Kafka has no delayed publishing"),
        ({"delay": float("nan")}, "Kafka has no delayed publishing"),
        ({"key": "\ud800"}, "the key '\\ud800' has lone surrogates"),
        ({"message_id": "\ud800"}, "the message id '\\ud800' has lone surrogates"),
        ({"headers": [("\ud800", b"")]}, "the header name '\\ud800' has lone surrogates"),
    ],
)
async def test_what_kafka_cannot_take_is_rejected_alone(
    kafka: Kafka, it: Desk, topic: str, wrong: dict[str, Any], said: str
) -> None:
    answers = await it.send(outgoing(topic, b"1"), outgoing(topic, b"2", **wrong), outgoing(topic, b"3"))
    assert kinds(answers) == [None, Rejected, None]
    assert said in str(answers[1])
    assert sorted(bodies(await read(kafka, topic))) == [b"1", b"3"]


@pytest.mark.parametrize("name", ["a b", "ümlaut", "", ".", "..", "x" * 250, "a/b", "\ud800"])
async def test_a_name_that_no_topic_can_have_is_rejected(it: Desk, topic: str, name: str) -> None:
    answers = await it.send(outgoing(name, b"1"), outgoing(topic, b"2"))
    assert kinds(answers) == [Rejected, None]
    assert "a name is 1 to 249 letters, digits, '.', '_' and '-'" in str(answers[0])


async def test_a_topic_that_does_not_exist_is_unroutable_with_those_near(kafka: Kafka, it: Desk) -> None:
    topic = await kafka.create_topic(new_name("orders"))
    wrong = topic.replace("orders", "ordrs")
    answers = await it.send(outgoing(wrong, b"1"), outgoing(topic, b"2"))
    assert kinds(answers) == [Unroutable, None]
    assert f"topic {wrong!r} does not exist; near it: {topic!r}" in str(answers[0])
    assert "create it, or set create_topics=true" in str(answers[0])
    assert wrong not in await it.topics.names(fresh=True)
    await kafka.create_topic(wrong)
    assert await eventually_stored(it, wrong)


async def eventually_stored(it: Desk, topic: str) -> bool:
    async def stored() -> bool:
        return await it.publish(topic, b"now") == ()

    return await eventually(stored)


async def test_a_missing_topic_is_not_asked_for_with_every_message(it: Desk, requests: list[str]) -> None:
    name = new_name()
    for _ in range(50):
        assert kinds(await it.publish(name, b"1")) == [Unroutable]
    await asyncio.gather(*(it.publish(name, b"1") for _ in range(50)))
    assert len(requests) < 20


async def test_topics_are_made_on_request_also_by_two_at_once(kafka: Kafka) -> None:
    name = new_name("made")
    async with desk(kafka.url, create_topics=True, partitions=3) as one, desk(kafka.url, create_topics=True) as two:
        answers = await asyncio.gather(*(it.publish(name, b"1", b"2") for it in (one, two) for _ in range(5)))
        assert set(answers) == {()}
        assert await one.topics.partitions(name) in (range(3), range(4))  # of whoever came first
        default = new_name("made")
        assert await two.publish(default, b"1") == ()
        assert await two.topics.partitions(default) == range(4)


async def test_a_topic_that_cannot_be_made_is_rejected_with_the_servers_reason(kafka: Kafka, topic: str) -> None:
    async with desk(kafka.url, create_topics=True, replication=3) as it:
        answers = await it.send(outgoing(new_name(), b"1"), outgoing(topic, b"2"))
    assert kinds(answers) == [Rejected, None]
    assert "INVALID_REPLICATION_FACTOR" in str(answers[0])
    assert "set replication=" in str(answers[0])


async def test_nothing_at_all_is_nothing(it: Desk) -> None:
    assert await it.send() == ()


# ---------------------------------------------------------------------- refused by the server


async def test_what_the_server_finds_too_large_is_so_alone(kafka: Kafka, it: Desk) -> None:
    """In the middle of others, of keys and of none; the topic's limit is named."""
    topic = await kafka.create_topic(new_name(), max_message_bytes=2000)
    sizes = [10, 3000, 20, 30, 2500, 40]
    for key in ("k", None):
        answers = await it.send(*(outgoing(topic, bytes(size), key=key) for size in sizes))
        assert kinds(answers) == [None, TooLarge, None, None, TooLarge, None]
        assert "with a body of 3000 bytes, is larger than max.message.bytes=2000 of topic" in str(answers[1])
    stored = sorted(len(body) for body in bodies(await read(kafka, topic)))
    assert stored == sorted([10, 20, 30, 40] * 2)
    assert await it.publish(topic, b"goes on", key="k") == ()


async def test_a_batch_beyond_the_topics_limit_is_stored_in_smaller_ones(
    kafka: Kafka, it: Desk, requests: list[str]
) -> None:
    topic = await kafka.create_topic(new_name(), max_message_bytes=5000)
    texts = [b"%04d" % number + bytes(500) for number in range(200)]
    assert await it.publish(topic, *texts, key="k") == ()
    assert bodies(await read(kafka, topic)) == texts
    one_too_large = [*texts[:5], bytes(6000)]
    assert kinds(await it.publish(topic, *one_too_large, key="k")) == [None] * 5 + [TooLarge]
    requests.clear()
    assert await it.publish(topic, *texts, key="k") == ()  # its limit is known now
    assert requests.count("ProduceRequest") == 25  # of 8 each; nothing is refused any more


async def test_a_compressed_record_counts_as_it_is_stored(kafka: Kafka) -> None:
    topic = await kafka.create_topic(new_name(), max_message_bytes=2000)
    async with desk(kafka.url, compression="gzip") as it:
        answers = await it.publish(topic, bytes(100_000), random.randbytes(3000), b"1", key="k")
        assert kinds(answers) == [None, TooLarge, None]


async def test_a_record_that_a_compacted_topic_refuses_is_rejected_alone(kafka: Kafka, it: Desk) -> None:
    topic = await kafka.create_topic(new_name(), partitions=1, cleanup_policy="compact")
    keys = ["a", None, "b", "c", None]
    answers = await it.send(*(outgoing(topic, b"%d" % n, key=key) for n, key in enumerate(keys)))
    assert kinds(answers) == [None, Rejected, None, None, Rejected]
    assert "INVALID_RECORD, the topic does not take this record: is it compacted" in str(answers[1])
    assert bodies(await read(kafka, topic)) == [b"0", b"2", b"3"]
    assert await it.publish(topic, b"4", key="a") == ()


async def test_a_server_with_rights_that_makes_topics_by_itself(services_directory: Path) -> None:
    """A user who lacks a right is rejected for that topic; and no topic is made by asking for it."""
    settings = {
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "allow.everyone.if.no.acl.found": "true",
        "auto.create.topics.enable": "true",
    }
    with services.own(services.ONE, services_directory, settings=settings) as server:
        kafka = server.facts
        allowed, readable, secret = [await kafka.create_topic(f"topic-{n}", partitions=1) for n in range(3)]
        for topic, rights in ((readable, ("--allow-principal", "--operation=Read")), (secret, ("--deny-principal",))):
            told = ("--bootstrap-server", kafka.bootstrap, "--add", "--topic", topic, rights[0], "User:*", *rights[1:])
            done = await asyncio.to_thread(java_tool, "org.apache.kafka.tools.AclCommand", *told)
            assert done.returncode == 0, done.stdout + done.stderr
        async with desk(kafka.url, metadata_age=0.1) as it:
            for _ in range(2):
                messages = [outgoing(topic, b"1", key="k") for topic in (allowed, readable, secret) * 2]
                answers = await it.send(*messages)
                assert kinds(answers) == [None, Rejected, Rejected] * 2
                for answer in (answers[1], answers[2]):
                    assert "TOPIC_AUTHORIZATION_FAILED" in str(answer)
                    assert "the user lacks a right: grant it" in str(answer)
            assert kinds(await it.publish("ghost", b"1")) == [Unroutable]
            assert await it.topics.ends("ghost") == {}
            assert await it.topics.names(fresh=True) == [allowed, readable]


async def test_a_wrong_password_is_an_answer(kafka: Kafka) -> None:
    url = login_url(kafka.sasl, kafka.logins["PLAIN"], password="n0t-this")
    async with desk(url) as it:
        (answer,) = await it.publish("any", b"1")
    assert type(answer) is Unavailable
    assert "check user, password and sasl=" in str(answer)
    assert "n0t-this" not in str(answer)


# ---------------------------------------------------------------------- the producer's identity


async def test_numbers_that_the_server_does_not_expect_are_begun_anew(kafka: Kafka, it: Desk, topic: str) -> None:
    assert await it.publish(topic, b"1", key="k") == ()
    (lane,) = [lane for lane in lanes(it, topic) if lane.sequence]
    before = it.publishing._sending._identity  # type: ignore[union-attr]
    lane.sequence += 5
    assert await it.publish(topic, b"2", b"3", key="k") == ()
    assert it.publishing._sending._identity != before  # type: ignore[union-attr]
    assert lane.sequence == 2
    assert bodies(await read(kafka, topic)) == [b"1", b"2", b"3"]


async def test_a_doubtful_batch_that_the_server_does_not_know_stays_unknown(
    it: Desk, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await it.publish(topic, b"1", key="k") == ()
    (lane,) = [lane for lane in lanes(it, topic) if lane.sequence]
    lane.sequence += 5
    with losing(monkeypatch, ["request"]):
        assert kinds(await it.publish(topic, b"2", key="k")) == [OutcomeUnknown]
    assert await it.publish(topic, b"3", key="k") == ()


async def test_a_sequence_number_wraps_as_the_protocol_has_it(kafka: Kafka, it: Desk, topic: str) -> None:
    assert await it.publish(topic, b"warm", key="k") == ()
    sender = it.publishing._sending
    assert sender is not None
    identity = sender._identity
    number, lane = next((n, lane) for n, lane in enumerate(lanes(it, topic)) if not lane.sequence)
    lane.identity, lane.sequence = identity, 2**31 - 2  # a partition's first number may be any
    key = next(key for key in map(str, itertools.count()) if murmur2(key.encode()) % (1 << 31) % 4 == number)
    for body in (b"1", b"2"):
        assert await it.publish(topic, body, body, body, key=key) == ()
    assert lane.sequence == 4
    assert sender._identity is identity
    assert [r.value for r in await read(kafka, topic) if r.partition == number] == [b"1"] * 3 + [b"2"] * 3


# ---------------------------------------------------------------------- connections that break


class losing:
    """Loses the next requests ("request": before they arrive) or answers ("answer": afterwards) of publishing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, faults: Sequence[str]) -> None:
        self.left = list(faults)
        self._monkeypatch = monkeypatch

    def __enter__(self) -> losing:
        sent = Nodes.sent

        async def lossy(connection: Any, request: Any) -> Any:
            if type(request).__name__ != "ProduceRequest" or not self.left:
                return await sent(connection, request)
            fault = self.left.pop(0)
            if fault == "answer":
                await sent(connection, request)
            connection.close()
            raise ConnectionResetError(f"the {fault} is lost")

        self._monkeypatch.setattr(Nodes, "sent", staticmethod(lossy))
        self._undo: Callable[[], None] = lambda: self._monkeypatch.setattr(Nodes, "sent", staticmethod(sent))
        return self

    def __exit__(self, *_: object) -> None:
        self._undo()
        assert self.left == []


async def test_what_is_sent_again_is_stored_once(
    kafka: Kafka, it: Desk, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [b"%d" % number for number in range(30)]
    with losing(monkeypatch, ["answer", "request", "answer", "answer"]):
        for text in texts:
            assert await it.publish(topic, text, key="k") == ()
    assert bodies(await read(kafka, topic)) == texts


async def test_a_connection_that_is_cut_is_made_again(
    kafka: Kafka, it: Desk, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transport is aborted under every third request, at some moment; nothing is lost, doubled or overtaken."""
    sent, loop = Nodes.sent, asyncio.get_running_loop()
    requests = itertools.count()
    cuts = 0

    async def cut(connection: Any, request: Any) -> Any:
        nonlocal cuts
        if type(request).__name__ == "ProduceRequest" and next(requests) % 3 == 1:
            loop.call_later(random.uniform(0, 0.003), connection._writer.transport.abort)
            cuts += 1
        return await sent(connection, request)

    monkeypatch.setattr(Nodes, "sent", staticmethod(cut))
    publishes: list[asyncio.Task[Any]] = []
    while cuts < 8:
        publishes += [asyncio.create_task(it.publish(topic, b"%d" % (len(publishes) + n), key="k")) for n in range(3)]
        await asyncio.sleep(0.001)
    assert set(await asyncio.gather(*publishes)) == {()}
    assert bodies(await read(kafka, topic)) == [b"%d" % number for number in range(len(publishes))]


class Chaos:
    """Breaks publishing at random: requests and answers lost, connections aborted, answers that come too late, and a
    server that does not know our producer or its numbers."""

    def __init__(self, it: Desk, seed: int) -> None:
        self.faults: Counter[str] = Counter()
        self._it, self._chance, self._sent = it, random.Random(seed), Nodes.sent
        self._late: set[asyncio.Task[Any]] = set()

    async def sent(self, connection: Any, request: Any) -> Any:
        if type(request).__name__ != "ProduceRequest":
            return await self._sent(connection, request)
        fault = self._chance.choices(["", "request", "answer", "abort", "late", "identity"], [80, 5, 5, 5, 2, 3])[0]
        self.faults[fault] += 1
        if fault == "abort":
            moment = self._chance.uniform(0, 0.004)
            asyncio.get_running_loop().call_later(moment, connection._writer.transport.abort)
        elif fault == "late":
            task = asyncio.create_task(self._sent(connection, request))
            self._late.add(task)
            await asyncio.wait([task], timeout=0.001)
            raise TimeoutError
        elif fault == "identity":
            self._forget()
        elif fault == "answer":
            await self._sent(connection, request)
        if fault in ("answer", "request"):
            connection.close()
            raise ConnectionResetError(f"the {fault} is lost")
        return await self._sent(connection, request)

    def _forget(self) -> None:
        sender = self._it.publishing._sending
        assert sender is not None
        if self._chance.random() < 0.5:
            sender._identity = None
        else:
            routes = list(self._it.publishing._routes.values())
            self._chance.choice(self._chance.choice(routes).lanes).sequence += self._chance.randrange(1, 9)

    async def end(self) -> None:
        await asyncio.gather(*self._late, return_exceptions=True)


@pytest.mark.parametrize(("seed", "patience"), [(1, 30.0), (2, 0.15)])
async def test_whatever_breaks_the_answers_are_right(
    kafka: Kafka, monkeypatch: pytest.MonkeyPatch, seed: int, patience: float
) -> None:
    """What was stored is there once, what was not is not, and each key is in order; with time enough all is stored, but
    for what was in doubt when the server no longer knew us."""
    topic = await kafka.create_topic(new_name(), partitions=3)
    chance = random.Random(seed)
    answers: dict[bytes, type[PublishError] | None] = {}
    async with desk(kafka.url, publish_timeout=patience, metadata_age=0.5) as it:
        chaos = Chaos(it, seed)
        assert await it.publish(topic, b"warm 0") == ()
        with monkeypatch.context() as patch:
            patch.setattr(Nodes, "sent", staticmethod(chaos.sent))

            async def publisher(key: str) -> None:
                numbers = itertools.count()
                for _ in range(80):
                    bodies = [f"{key} {next(numbers)}".encode() for _ in range(chance.choice((1, 1, 2, 30)))]
                    got = await it.publish(topic, *bodies, key=key) or [None] * len(bodies)
                    answers.update(zip(bodies, kinds(got), strict=True))

            await asyncio.gather(*(publisher(f"k{number}") for number in range(12)))
            await chaos.end()
    assert all(chaos.faults[fault] for fault in ("request", "answer", "abort", "identity"))
    stored = Counter(bodies(await read(kafka, topic)))
    assert max(stored.values()) == 1
    assert [body for body, answer in answers.items() if answer is None and body not in stored] == []
    assert [body for body, answer in answers.items() if answer is Unavailable and body in stored] == []
    assert set(answers.values()) <= {None, OutcomeUnknown, Unavailable}
    assert Counter(answers.values())[None] > 0.8 * len(answers)
    by_key: dict[bytes, list[int]] = defaultdict(list)
    for body in stored:
        key, number = body.split()
        by_key[key].append(int(number))
    assert {key: seen for key, seen in by_key.items() if seen != sorted(seen)} == {}


async def test_a_server_that_is_away_is_unavailable() -> None:
    async with desk(f"kafka://127.0.0.1:{free_port()}", publish_timeout=0.3) as it:
        began = time.monotonic()
        assert kinds(await it.publish("any", b"1", b"2")) == [Unavailable, Unavailable]
        assert time.monotonic() - began < 3


async def test_a_server_that_goes_and_comes(own_kafka: OwnKafka) -> None:
    """Away: surely not stored, and not stored after all when it is back. Silent: nobody knows. Order and sequence
    numbers go on; then the same while it publishes and asks all the time, with time enough."""
    kafka = own_kafka.facts
    topic = await kafka.create_topic(new_name(), partitions=1)
    async with desk(kafka.url, publish_timeout=0.5, request_timeout=0.4) as it:
        assert await it.publish(topic, b"1") == ()
        await asyncio.to_thread(own_kafka.stop)
        answers = await asyncio.gather(*(it.publish(topic, b"away") for _ in range(5)))
        assert [kinds(each) for each in answers] == [[Unavailable]] * 5
        await asyncio.to_thread(own_kafka.start)
        assert await eventually_stored(it, topic)

        async def silent() -> bool:
            try:
                async with asyncio.timeout(0.2):
                    await it.topics.names(fresh=True)
            except TimeoutError:
                return True
            return False

        own_kafka.freeze()
        await eventually(silent)
        answers = await asyncio.gather(*(it.publish(topic, b"frozen", key="k") for _ in range(5)))
        assert [kinds(each) for each in answers] == [[OutcomeUnknown]] * 5
        own_kafka.thaw()
        assert await eventually_stored(it, topic)
    texts = bodies(await read(kafka, topic))
    assert b"away" not in texts
    assert texts[0] == b"1"
    assert texts[-1] == b"now"
    await publish_through_restarts(own_kafka)


async def publish_through_restarts(own_kafka: OwnKafka) -> None:
    """Nothing is lost, doubled or overtaken, and everything is answered; questions are, too, or say that it is away."""
    kafka = own_kafka.facts
    topic = await kafka.create_topic(new_name(), partitions=2)
    stored: list[tuple[str, int]] = []
    going = True
    async with desk(kafka.url, request_timeout=2) as it:

        async def publisher(name: str) -> None:
            for number in itertools.count():
                if not going:
                    return
                assert await it.publish(topic, f"{name} {number}".encode(), key=name) == ()
                stored.append((name, number))

        async def asker() -> None:
            while going:
                for question in (it.topics.ends(topic), it.topics.committed("g")):
                    try:
                        await question
                    except BrokerUnavailable:
                        await asyncio.sleep(0.02)

        tasks = [asyncio.create_task(publisher(f"p{number}")) for number in range(20)]
        tasks.append(asyncio.create_task(asker()))
        for ends in ((own_kafka.restart,), (own_kafka.kill, own_kafka.start), ()):
            enough = len(stored) + 200
            await eventually(lambda enough=enough: len(stored) > enough, 30)  # type: ignore[misc]
            for end in ends:
                await asyncio.to_thread(end)
        going = False
        await asyncio.gather(*tasks)
        assert sum((await it.topics.ends(topic)).values()) == len(stored)
        assert await it.topics.committed("g") == {}
    by_name: dict[str, list[int]] = defaultdict(list)
    for record in await read(kafka, topic):
        name, number = record.value.decode().split()
        by_name[name].append(int(number))
    assert {name: seen for name, seen in by_name.items() if seen != list(range(len(seen)))} == {}
    assert sum(map(len, by_name.values())) == len(stored)


async def test_the_loss_of_a_leader_is_nothing_to_who_publishes(own_kafka_cluster: OwnKafka) -> None:
    kafka = own_kafka_cluster.facts
    topic = await kafka.create_topic(new_name(), partitions=3)
    careful = await kafka.create_topic(new_name("careful"), partitions=1, min_insync_replicas=3)
    async with desk(kafka.url, request_timeout=2) as it:
        assert await it.publish(topic, *[b"0"] * 30) == ()
        leader = await kafka.leader(topic)
        published = 30
        for round in range(40):
            if round == 5:
                own_kafka_cluster.kill(leader)
            texts = [outgoing(topic, b"%d" % round, key=f"k{n}") for n in range(10)]
            assert await it.send(*texts) == ()
            published += len(texts)
        moved = await it.topics.leaders(topic, fresh=True)
        assert moved is not None
        assert leader not in moved
    async with desk(kafka.url, publish_timeout=0.5) as it:

        async def refused() -> bool:
            """In the end without doubt: at first the leader waits for the one that is gone."""
            (answer,) = await it.publish(careful, b"1", key="k") or [None]
            return type(answer) is Unavailable and "NOT_ENOUGH_REPLICAS" in str(answer)

        await eventually(refused, 30)
    records = await read(kafka, topic)
    assert len(records) == published
    by_key: dict[bytes, list[int]] = defaultdict(list)
    for record in records:
        if record.key:
            by_key[record.key].append(int(record.value))
    assert set(map(tuple, by_key.values())) == {tuple(range(40))}


# ---------------------------------------------------------------------- topics that change


async def test_partitions_that_come_while_running_are_used(kafka: Kafka) -> None:
    topic = await kafka.create_topic(new_name(), partitions=1)
    async with desk(kafka.url, metadata_age=0.1) as it:
        assert await it.publish(topic, b"1") == ()
        async with admin(kafka) as client:
            await client.create_partitions({topic: NewPartitions(3)})
        await eventually(lambda: len(lanes(it, topic)) == 3)
        assert await it.send(*(outgoing(topic, b"2", key=f"k{n}") for n in range(50))) == ()
    assert {record.partition for record in await read(kafka, topic)} == {0, 1, 2}


@asynccontextmanager
async def admin(kafka: Kafka) -> AsyncIterator[AIOKafkaAdminClient]:
    client = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap)
    await client.start()
    try:
        yield client
    finally:
        await client.close()


async def test_a_topic_that_is_deleted_while_running_is_unroutable(
    kafka: Kafka, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "_SETTLING", 0.1)
    async with desk(kafka.url, metadata_age=0.1) as it:
        assert await it.publish(topic, b"1") == ()
        async with admin(kafka) as client:
            await client.delete_topics([topic])
        assert kinds(await it.publish(topic, b"2")) == [Unroutable]
        await kafka.create_topic(topic, partitions=1)
        assert await eventually_stored(it, topic)
    assert bodies(await read(kafka, topic)) == [b"now"]


# ---------------------------------------------------------------------- cancelling and closing


async def test_a_cancelled_publish_leaves_nothing_behind(kafka: Kafka, it: Desk, topic: str) -> None:
    assert await it.publish(topic, b"warm", key="k") == ()
    before = asyncio.all_tasks()
    for pause in (0, 0, 0.001):
        tasks = [asyncio.create_task(it.publish(topic, b"maybe", b"maybe", key="k")) for _ in range(50)]
        await asyncio.sleep(pause)
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) or end == () for end in ended)
    assert await it.publish(topic, b"last", key="k") == ()
    sender = it.publishing._sending
    assert sender is not None
    assert not sender._busy
    assert asyncio.all_tasks() <= before
    texts = bodies(await read(kafka, topic))
    assert (texts[0], texts[-1]) == (b"warm", b"last")


async def test_closing_lets_go_out_what_was_published(kafka: Kafka, topic: str) -> None:
    async with desk(kafka.url, linger=0.1) as it:
        tasks = [asyncio.create_task(it.publish(topic, b"%d" % n, key="k")) for n in range(10)]
        await eventually(lambda: topic in it.publishing._routes)
        await it.publishing.close(asyncio.get_running_loop().time() + 5)
        assert set(await asyncio.gather(*tasks)) == {()}
        for _ in range(2):
            with pytest.raises(BrokerClosed):
                await it.publish(topic, b"late")
        await it.publishing.close(0.0)
    assert bodies(await read(kafka, topic)) == [b"%d" % n for n in range(10)]


async def test_closing_answers_for_what_is_left(kafka: Kafka, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = await kafka.create_topic(new_name(), partitions=1)
    before = asyncio.all_tasks()
    async with desk(kafka.url, close=0.1) as it:
        assert await it.publish(topic, b"1") == ()

        async def silent(connection: Any, request: Any) -> Any:
            await asyncio.Event().wait()

        monkeypatch.setattr(Nodes, "sent", staticmethod(silent))
        sent = asyncio.create_task(it.publish(topic, b"2"))
        await eventually(lambda: any(batch.data is not None for batch in lanes(it, topic)[0].batches))
        waiting = asyncio.create_task(it.publish(topic, b"3"))
        looking = asyncio.create_task(it.publish(new_name(), b"4"))
        await asyncio.sleep(0)
    assert kinds(await sent) == [OutcomeUnknown]
    assert kinds(await waiting) == [Unavailable]
    assert kinds(await looking) == [Unavailable]
    assert asyncio.all_tasks() == before


# ---------------------------------------------------------------------- a failure of ours


async def test_a_bug_of_ours_leaves_nobody_waiting(
    it: Desk, topic: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert await it.publish(topic, b"1") == ()
    failing = iter([True, False])

    def broken(self: sending.Sending, taken: Any) -> Any:
        if next(failing, False):
            raise RuntimeError("broken")
        return request(self, taken)

    request = sending.Sending._request
    monkeypatch.setattr(sending.Sending, "_request", broken)
    assert await it.publish(topic, b"2") == ()
    assert "RuntimeError: broken" in caplog.text
