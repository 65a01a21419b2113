"""Names, groups and fetching."""

from __future__ import annotations

import asyncio
import time

import pytest

from streamfw.broker import Broker, Capabilities, Delivery, Subscription
from streamfw.errors import StreamError, Unroutable
from streamfw.message import Headers

from ._kit import MIB, ConformanceKit, Member, answers_for, bodies, errors_of, ids, numbered, outgoing


class DeliveryConformance(ConformanceKit):
    async def test_a_delivery_carries_what_was_published(self, broker: Broker, name: str) -> None:
        async with self.member(broker, name) as member:
            before = time.time()
            message = outgoing(name, b'{"id": 1}', key="k", headers=Headers({"tenant": "acme"}))
            assert errors_of(await member.connection.publish([message])) == []
            (delivery,) = await member.take(1)
            assert delivery.name == name
            assert delivery.body == b'{"id": 1}'
            assert delivery.key == "k"
            assert delivery.message_id == message.message_id
            assert delivery.headers["tenant"] == "acme"
            assert delivery.attempt == 1
            assert not delivery.lost
            # A server may have a clock of its own; 0.0 says that the broker does not tell.
            assert delivery.timestamp == 0.0 or abs(delivery.timestamp - before) < 60
            await member.acknowledge([delivery])

    async def test_messages_of_one_key_come_in_the_order_published(self, broker: Broker, name: str) -> None:
        async with self.member(broker, name) as member:
            await member.send(name, *numbered(50), key="one")
            for body in numbered(50, 50):
                await member.send(name, body, key="one")
            taken = await member.take(100)
            assert bodies(taken) == numbered(100)
            await member.acknowledge(taken)

    async def test_sources_of_one_group_compete(self, broker: Broker, name: str) -> None:
        async with self.member(broker, name) as first, self.member(self.another(broker), name) as second:
            expected = [
                message_id
                for number in range(60)
                for message_id in await first.send(name, b"%d" % number, key=f"key-{number}")
            ]
            taken: list[Delivery] = []

            async def work(member: Member) -> None:
                while chunk := await member.poll(self.quiet, limit=5):
                    taken.extend(chunk)
                    await member.acknowledge(chunk)

            deadline = time.monotonic() + self.patience
            while len(taken) < 60 and time.monotonic() < deadline:
                await asyncio.gather(work(first), work(second))
            assert sorted(ids(taken)) == sorted(expected), "each message goes to exactly one source of the group"

    async def test_two_sources_of_one_connection_compete(self, broker: Broker, name: str) -> None:
        async with self.member(broker, name) as first:
            second = Member(first.connection, await first.connection.open(Subscription(name)), self.patience)
            expected = [i for number in range(40) for i in await first.send(name, b"x", key=f"key-{number}")]
            taken: list[Delivery] = []
            deadline = time.monotonic() + self.patience
            while len(taken) < 40 and time.monotonic() < deadline:
                for member in (first, second):
                    chunk = await member.poll(self.quiet, limit=5)
                    taken += chunk
                    await member.acknowledge(chunk)
            assert sorted(ids(taken)) == sorted(expected)
            await second.close()

    async def test_every_group_gets_every_message(self, broker: Broker, name: str) -> None:
        async with self.member(broker, name, "one") as one, self.member(self.another(broker), name, "two") as two:
            expected = await one.send(name, *numbered(20))
            for member in (one, two):
                taken = await member.take(20)
                assert sorted(ids(taken)) == sorted(expected)
                await member.acknowledge(taken)
                await member.expect_nothing(self.quiet)

    async def test_what_was_published_before_the_first_group(
        self, broker: Broker, name: str, capabilities: Capabilities
    ) -> None:
        async with broker.connect() as connection:
            early = [outgoing(name, body, key="one") for body in numbered(5)]
            answers = answers_for(early, await connection.publish(early))
        if not capabilities.kept:
            assert [type(answer) for answer in answers] == [Unroutable] * 5, "nobody has subscribed: it must be said"
            return
        assert answers == [None] * 5
        async with self.member(broker, name) as member:
            await member.send(name, *numbered(5, 5), key="one")
            taken = await member.take(10)
            assert bodies(taken) == numbered(10), "the first group gets what waited for it, in order"
            await member.acknowledge(taken)

    async def test_a_later_group_gets_what_comes_after(self, broker: Broker, name: str) -> None:
        async with self.member(broker, name, "one") as one:
            await one.send(name, b"before")
            await one.acknowledge(await one.take(1))
            async with self.member(broker, name, "two") as two:
                (after,) = await one.send(name, b"after")
                # A log that keeps everything gives a new group what was there before as well.
                while after not in ids(taken := await two.take(1)):
                    await two.acknowledge(taken)
                await two.acknowledge(taken)
            (delivery,) = await one.take(1)
            assert delivery.message_id == after
            await one.acknowledge([delivery])

    async def test_a_group_that_is_away_loses_nothing(self, broker: Broker, name: str) -> None:
        async with self.member(broker, name, "stays") as stays:
            async with self.member(broker, name, "goes"):
                pass
            expected = await stays.send(name, *numbered(5))
            async with self.member(broker, name, "goes") as back:
                taken = await back.take(5)
                assert sorted(ids(taken)) == sorted(expected)
                await back.acknowledge(taken)

    async def test_one_message_id_twice_is_two_messages(self, broker: Broker, name: str) -> None:
        async with self.member(broker, name) as member:
            await member.send(name, b"1", b"2", message_id="the same", key="one")
            await member.send(name, b"3", message_id="the same", key="one")
            taken = await member.take(3)
            assert (ids(taken), bodies(taken)) == (["the same"] * 3, [b"1", b"2", b"3"])
            await member.acknowledge(taken)

    async def test_names_are_apart(self, broker: Broker, name: str) -> None:
        async with self.member(broker, f"{name}.a") as a, self.member(broker, f"{name}.b") as b:
            for_a = await a.send(f"{name}.a", b"for a")
            for_b = await a.send(f"{name}.b", b"for b")
            for member, expected in ((a, for_a), (b, for_b)):
                taken = await member.take(1)
                assert ids(taken) == expected
                await member.acknowledge(taken)
                await member.expect_nothing(self.quiet / 2)

    @pytest.mark.parametrize(
        "odd",
        ['"; drop table x; --', "two words", "ünïcödé", "../../../etc/passwd", "%s{}$1", "UPPER", "x" * 200],
    )
    async def test_an_odd_name_works_or_is_refused(self, broker: Broker, name: str, odd: str) -> None:
        odd = f"{name}{odd}"
        refusal = "it worked"
        try:
            async with self.member(broker, odd) as member:
                message = outgoing(odd, b"x")
                if refused := errors_of(await member.connection.publish([message])):
                    raise refused[0]
                taken = await member.take(1)
                assert (taken[0].name, taken[0].message_id) == (odd, message.message_id)
                await member.acknowledge(taken)
        except StreamError as error:
            refusal = str(error)
        assert refusal, "a refusal says why"

    async def test_fetch_never_brings_more_than_asked(self, broker: Broker, name: str) -> None:
        async with self.member(broker, name) as member:
            expected = await member.send(name, *numbered(30))
            taken: list[Delivery] = []
            for limit in (1, 7, 1, 2, 100):
                chunk = await member.poll(self.patience, limit=limit)
                assert 1 <= len(chunk) <= limit
                taken += chunk
            taken += await member.take(30 - len(taken)) if len(taken) < 30 else []
            assert sorted(ids(taken)) == sorted(expected)
            await member.acknowledge(taken)

    async def test_fetch_minds_the_bytes(self, broker: Broker, name: str) -> None:
        async with self.member(broker, name) as member:
            for _ in range(10):
                await member.send(name, bytes(100_000), key="one")
            taken: list[Delivery] = []
            while len(taken) < 10:
                chunk = await member.poll(self.patience, max_bytes=250_000)
                assert chunk
                # "About" allows for a broker that only has an estimate; one that minds nothing would bring a million.
                assert sum(len(delivery.body) for delivery in chunk) <= 500_000
                taken += chunk
            assert len(taken) == 10
            await member.acknowledge(taken)

    async def test_a_body_larger_than_the_bytes_asked_comes_all_the_same(self, broker: Broker, name: str) -> None:
        async with self.member(broker, name) as member:
            expected = await member.send(name, b"small", bytes(300_000), b"small", key="one")
            taken = await member.take(3, max_bytes=10_000)
            assert ids(taken) == expected
            await member.acknowledge(taken)

    async def test_fetch_waits_until_there_is_something(self, broker: Broker, name: str) -> None:
        async with self.member(broker, name) as member:
            await member.expect_nothing(self.quiet)
            began = time.monotonic()
            expected = await member.send(name, b"x")
            taken = await member.take(1)
            assert ids(taken) == expected
            assert time.monotonic() - began < self.grace + 1, "a waiting source is told of a new message"
            await member.acknowledge(taken)

    async def test_large_and_many(self, broker: Broker, name: str, capabilities: Capabilities) -> None:
        size = min(capabilities.max_body or MIB, MIB)
        async with self.member(broker, name) as member:
            expected = await member.send(name, *(bytes([i]) * size for i in range(4)), *numbered(996), key="one")
            taken = await member.take(1000)
            assert ids(taken) == expected
            assert [delivery.body for delivery in taken[:4]] == [bytes([i]) * size for i in range(4)]
            await member.acknowledge(taken)
