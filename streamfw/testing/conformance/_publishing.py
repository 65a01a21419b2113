"""What a publish keeps, and what it refuses."""

from __future__ import annotations

import asyncio
import time

import pytest

from streamfw.broker import Broker, Capabilities
from streamfw.errors import PublishError, Rejected, TooLarge
from streamfw.message import Headers, Outgoing

from ._kit import MIB, ConformanceKit, Member, answers_for, bodies, errors_of, ids, numbered, outgoing

HEADERS: tuple[tuple[tuple[str, bytes | None], ...], ...] = (
    (("plain", b"text"),),
    (("empty", b""),),
    (("not-utf-8", b"\xff\xfe\x80"),),
    (("nul", b"a\x00b"),),
    (("lines", b"a\r\nb\n"),),
    (("long", b"x" * 10_000),),
    (("every", bytes(range(256))),),
    (("json-like", b'{"a": [null, "\\u0000"]}'),),
    (("twice", b"1"), ("between", b"2"), ("twice", b"3")),
    (("Case", b"upper"), ("case", b"lower")),
    (("ünï cödé", "wert €".encode()),),
    (("null", None),),
    (("looks-like-base64", b"aGVsbG8="), ("base64", b"x")),
    (("correlation-id", b"c-1"), ("reply-to", b"elsewhere"), ("content-type", b"text/plain")),
    tuple((f"h{number}", b"%d" % number) for number in range(100)),
)

KEYS = ("", "k", "ünïcödé €", "with\x00nul", "x" * 1000, '"; drop table x; --', "\udcff")


class PublishingConformance(ConformanceKit):
    async def test_headers_survive_byte_for_byte_or_are_refused(self, broker: Broker, name: str) -> None:
        async with self.member(broker, name) as member:
            messages = [outgoing(name, key="one", headers=Headers.of(pairs)) for pairs in HEADERS]
            arrived = await self._accepted(member, messages)
            for message in arrived:
                assert message.headers.pairs, "only a message with headers was sent"
            assert any(m.headers.pairs == HEADERS[0] for m in arrived), "plain text headers travel on every broker"

    async def test_keys_survive_or_are_refused(self, broker: Broker, name: str) -> None:
        async with self.member(broker, name) as member:
            messages = [outgoing(name, key=key) for key in (None, *KEYS)]
            arrived = await self._accepted(member, messages)
            assert {None, "k"} <= {message.key for message in arrived}, "these travel on every broker"

    async def _accepted(self, member: Member, messages: list[Outgoing]) -> list[Outgoing]:
        """Publish in one call; those that were accepted, seen to arrive as they were sent."""
        answers = answers_for(messages, await member.connection.publish(messages))
        accepted = [m for m, answer in zip(messages, answers, strict=True) if answer is None]
        assert all(isinstance(error, Rejected) for error in errors_of(answers)), "what cannot travel is `Rejected`"
        taken = {delivery.message_id: delivery for delivery in await member.take(len(accepted))}
        for message in accepted:
            delivery = taken[message.message_id]
            assert delivery.headers.pairs == message.headers.pairs
            assert (delivery.key, delivery.body) == (message.key, message.body)
        await member.acknowledge(taken.values())
        return accepted

    @pytest.mark.parametrize(
        "body", [b"", b"\x00", bytes(range(256)) * 4, b"\xff" * 70_000, "ünïcödé".encode(), b'{"a": "\\u0000"}']
    )
    async def test_bodies_survive_byte_for_byte(self, broker: Broker, name: str, body: bytes) -> None:
        async with self.member(broker, name) as member:
            await member.send(name, body)
            taken = await member.take(1)
            assert bodies(taken) == [body]
            assert type(taken[0].body) is bytes
            await member.acknowledge(taken)

    async def test_one_bad_message_fails_alone(self, broker: Broker, name: str) -> None:
        async with self.member(broker, name) as member:
            bad = self.unpublishable(broker, name)
            good = [outgoing(name, body, key="one") for body in numbered(100)]
            answers = await member.connection.publish([*good[:50], bad, *good[50:]])
            assert len(answers) == 101, "one answer for each message"
            assert isinstance(answers[50], PublishError)
            assert bad.message_id in str(answers[50])
            assert errors_of(answers) == [answers[50]]
            taken = await member.take(100)
            assert ids(taken) == [message.message_id for message in good]
            await member.acknowledge(taken)
            await member.expect_nothing(self.quiet)

    async def test_one_bad_message_among_concurrent_publishes_fails_alone(self, broker: Broker, name: str) -> None:
        async with self.member(broker, name) as member:
            calls = [[outgoing(name, body) for body in numbered(1 + number % 3)] for number in range(40)]
            bad = self.unpublishable(broker, name)
            calls[17].append(bad)
            results = await asyncio.gather(*(member.connection.publish(call) for call in calls))
            for call, answers in zip(calls, results, strict=True):
                failed = [m for m, error in zip(call, answers_for(call, answers), strict=True) if error is not None]
                assert failed == ([bad] if bad in call else [])
            expected = [message.message_id for call in calls for message in call if message is not bad]
            taken = await member.take(len(expected))
            assert sorted(ids(taken)) == sorted(expected)
            await member.acknowledge(taken)

    async def test_a_body_over_the_limit(self, broker: Broker, name: str, capabilities: Capabilities) -> None:
        async with self.member(broker, name) as member:
            limit = capabilities.max_body
            at_limit = bytes(16 * MIB if limit is None else limit)
            answers = errors_of(await member.connection.publish([outgoing(name, at_limit)]))
            assert answers == [], "the limit itself is allowed, and without one there is none at 16 MiB"
            if limit is not None:
                (error,) = await member.connection.publish([outgoing(name, bytes(limit + 1))])
                assert type(error) is TooLarge
                assert str(limit) in str(error), "the error names the limit"
            taken = await member.take(1)
            assert len(taken[0].body) == len(at_limit)
            await member.acknowledge(taken)

    async def test_nothing_to_publish(self, broker: Broker, name: str) -> None:
        async with self.member(broker, name) as member:
            assert list(await member.connection.publish([])) == []
            await member.expect_nothing(self.quiet / 2)

    async def test_one_message_for_several_names(self, broker: Broker, name: str) -> None:
        async with self.member(broker, f"{name}.a") as a, self.member(broker, f"{name}.b") as b:
            messages = [outgoing(f"{name}.{'ab'[number % 2]}", body) for number, body in enumerate(numbered(10))]
            assert errors_of(await a.connection.publish(messages)) == []
            for member, first in ((a, 0), (b, 1)):
                taken = await member.take(5)
                assert sorted(bodies(taken)) == numbered(10)[first::2]
                await member.acknowledge(taken)

    async def test_a_delay_is_kept_or_refused(self, broker: Broker, name: str, capabilities: Capabilities) -> None:
        async with self.member(broker, name) as member:
            before = time.monotonic()
            answers = await member.connection.publish([outgoing(name, b"later", delay=0.7), outgoing(name, b"now")])
            after = time.monotonic()
            taken = await member.take(1)
            assert bodies(taken) == [b"now"]
            if capabilities.delay is None:
                (error,) = errors_of(answers)
                assert type(error) is Rejected, "a broker without delays must say so, not deliver at once"
            else:
                assert errors_of(answers) == []
                taken += await member.take(1)
                assert bodies(taken) == [b"now", b"later"]
                assert time.monotonic() - before >= 0.7, "never early"
                assert time.monotonic() - after <= 0.7 + capabilities.delay + self.grace, "nor much too late"
            await member.acknowledge(taken)

    async def test_priorities_where_there_are_any(self, broker: Broker, name: str, capabilities: Capabilities) -> None:
        async with self.member(broker, name) as member:
            order = [5, 0, 9, 1, 0, -3, 5]
            messages = [outgoing(name, b"%d" % p, priority=p, key="one") for p in order]
            assert errors_of(await member.connection.publish(messages)) == []
            taken = await member.take(len(order))
            expected = sorted(order) if capabilities.priorities else order
            assert [int(body) for body in bodies(taken)] == expected, "without priorities, the order is that published"
            await member.acknowledge(taken)

    async def test_blocked_publishes_are_answered(self, broker: Broker, name: str) -> None:
        """A thousand publishes at once end, each with its own answer."""
        async with self.member(broker, name) as member:
            messages = [outgoing(name, body) for body in numbered(1000)]
            results = await asyncio.gather(*(member.connection.publish([message]) for message in messages))
            assert [errors_of(answers) for answers in results] == [[]] * 1000
            taken = await member.take(1000)
            assert len(set(ids(taken))) == 1000
            await member.acknowledge(taken)
