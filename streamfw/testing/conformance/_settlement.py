"""What becomes of a delivery."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from streamfw.broker import Broker, Capabilities, Settlement
from streamfw.calls import dead_letter_of
from streamfw.errors import BrokerRefused, SettleError, Unsupported
from streamfw.message import ERROR, ERROR_TYPE, ORIGIN, ORIGIN_ATTEMPT, ORIGIN_GROUP, Headers
from streamfw.outcome import ACK, RELEASE, Ack, DeadLetter, Drop, Outcome, Retry

from ._kit import ConformanceKit, Member, bodies, errors_of, ids, numbered, outgoing


class SettlementConformance(ConformanceKit):
    @asynccontextmanager
    async def _one_taken(self, broker: Broker, name: str, **options: Any) -> AsyncIterator[tuple[Member, list[str]]]:
        """A member that has taken what the test settles, and after it the proof that nothing came back."""
        async with self.member(broker, name, **options) as member:
            yield member, await member.send(name, *numbered(3), key="one")
            await member.expect_nothing(self.quiet)
        async with self.member(self.another(broker), name) as successor:
            await successor.expect_nothing(self.quiet)

    @pytest.mark.parametrize("outcome", [ACK, Ack(), Drop()], ids=["ACK", "Ack()", "Drop()"])
    async def test_what_ended_does_not_come_back(self, broker: Broker, name: str, outcome: Outcome) -> None:
        async with self._one_taken(broker, name) as (member, _):
            assert await member.settle(await member.take(3), outcome) == []

    async def test_settling_in_any_order(self, broker: Broker, name: str) -> None:
        async with self._one_taken(broker, name) as (member, _):
            first, second, third = await member.take(3)
            await member.acknowledge([third])
            await member.acknowledge([second, first])

    async def test_settling_twice_changes_nothing(self, broker: Broker, name: str) -> None:
        async with self._one_taken(broker, name) as (member, _):
            taken = await member.take(3)
            await member.acknowledge(taken)
            for error in await member.settle(taken):
                assert isinstance(error, SettleError)
                assert error.delivery in taken
                assert error.delivery.message_id in str(error)

    async def test_settling_nothing(self, broker: Broker, name: str) -> None:
        async with self._one_taken(broker, name) as (member, _):
            assert await member.settle([]) == []
            await member.acknowledge(await member.take(3))

    async def test_an_outcome_not_declared_is_refused(
        self, broker: Broker, name: str, capabilities: Capabilities
    ) -> None:
        """`Unsupported`, and nothing of the group is settled: the runtime never sends it, so it is a mistake to see."""
        absent: list[Outcome] = []
        absent += [] if capabilities.retry else [Retry(0.0)]
        absent += [] if capabilities.release else [RELEASE]
        absent += [] if capabilities.dead_letter else [DeadLetter("no")]
        async with self._one_taken(broker, name) as (member, _):
            first, *rest = await member.take(3)
            for outcome in absent:
                with pytest.raises(Unsupported):
                    await member.source.settle([Settlement(first, ACK), Settlement(rest[0], outcome)])
            await member.acknowledge([first, *rest])

    async def test_a_retry_comes_back_and_counts(self, broker: Broker, name: str, capabilities: Capabilities) -> None:
        async with self._one_taken(broker, name) as (member, sent):
            taken = await member.take(3)
            if capabilities.retry:
                for attempt in (1, 2, 3):
                    assert ids(taken) == sent, "at once and together: they keep their order"
                    assert [delivery.attempt for delivery in taken] == [attempt] * 3
                    assert bodies(taken) == numbered(3)
                    assert await member.settle(taken, Retry(0.0)) == []
                    taken = await member.take(3)
                assert [delivery.attempt for delivery in taken] == [4] * 3
            await member.acknowledge(taken)

    async def test_the_pause_of_a_retry(self, broker: Broker, name: str, capabilities: Capabilities) -> None:
        async with self._one_taken(broker, name) as (member, sent):
            taken = await member.take(3)
            if capabilities.retry and capabilities.delay is not None:
                before = time.monotonic()
                assert await member.settle(taken[:1], Retry(0.7)) == []
                after = time.monotonic()
                again = await member.take(1)
                assert time.monotonic() - before >= 0.7, "never early"
                assert time.monotonic() - after <= 0.7 + capabilities.delay + self.grace, "nor much too late"
                assert (ids(again), again[0].attempt) == (sent[:1], 2)
                taken[:1] = again
            await member.acknowledge(taken)

    async def test_a_release_comes_back_uncounted(self, broker: Broker, name: str, capabilities: Capabilities) -> None:
        async with self._one_taken(broker, name) as (member, sent):
            taken = await member.take(3)
            if capabilities.release:
                await member.acknowledge(taken[:1])
                assert await member.settle(taken[1:], RELEASE) == []
                taken = await member.take(2)
                assert ids(taken) == sent[1:]
                assert [delivery.attempt for delivery in taken] == [1, 1]
            await member.acknowledge(taken)

    async def test_outcomes_mixed_in_one_group(self, broker: Broker, name: str, capabilities: Capabilities) -> None:
        async with self._one_taken(broker, name) as (member, sent):
            acked, odd, dropped = await member.take(3)
            outcome = Retry(0.0) if capabilities.retry else RELEASE if capabilities.release else ACK
            group = [Settlement(acked, ACK), Settlement(odd, outcome), Settlement(dropped, Drop())]
            assert list(await member.source.settle(group)) == []
            if outcome is not ACK:
                again = await member.take(1)
                assert ids(again) == sent[1:2]
                await member.acknowledge(again)

    async def test_attempts_after_a_cut_and_in_another_process(
        self, broker: Broker, name: str, capabilities: Capabilities
    ) -> None:
        """Durable attempts are seen by whoever gets the message next; others are this process's own."""
        durable = capabilities.attempts == "durable"
        async with self.member(broker, name) as member:
            await member.send(name, b"x")
            for attempt in (1, 2):
                (delivery,) = await member.take(1)
                assert delivery.attempt == attempt or not durable
                if capabilities.retry:
                    assert await member.settle([delivery], Retry(0.0)) == []
                    await member.flush()
                    await self.interrupt(broker)
                else:
                    break
        async with self.member(self.another(broker), name) as successor:
            (delivery,) = await successor.take(1)
            assert delivery.attempt == (3 if capabilities.retry else 1) if durable else delivery.attempt >= 1
            await successor.acknowledge([delivery])

    async def test_a_dead_letter_tells_its_origin(self, broker: Broker, name: str, capabilities: Capabilities) -> None:
        if not capabilities.dead_letter:
            # The runtime publishes them; the app level sees to it. Their place must exist once a source is open.
            async with self.member(broker, name, dead_letter=f"{name}.dead") as member:
                await member.send(f"{name}.dead", b"kept")
            async with self.member(broker, f"{name}.dead") as dead:
                taken = await dead.take(1)
                assert bodies(taken) == [b"kept"]
                await dead.acknowledge(taken)
            return
        async with self.member(broker, name, "shop", dead_letter=f"{name}.dead") as member:
            original = outgoing(name, b"\xff\x00raw", key="k", headers=Headers([("a", b"\xfe"), ("b", b"2")]))
            assert errors_of(await member.connection.publish([original])) == []
            taken = await member.take(1)
            outcome = DeadLetter("ValueError: no such item")
            outcome.error_type = "ValueError"
            assert await member.settle(taken, outcome) == []
            await member.expect_nothing(self.quiet)
        async with self.member(broker, f"{name}.dead") as dead:
            (letter,) = await dead.take(1)
            assert (letter.body, letter.key, letter.message_id) == (original.body, "k", original.message_id)
            assert letter.attempt == 1
            assert dict(letter.headers.pairs) == dict(original.headers.pairs) | {
                ERROR: b"ValueError: no such item",
                ERROR_TYPE: b"ValueError",
                ORIGIN: name.encode(),
                ORIGIN_GROUP: b"shop",
                ORIGIN_ATTEMPT: b"1",
            }
            await dead.acknowledge([letter])

    async def test_a_dead_letter_without_a_place_is_discarded(
        self, broker: Broker, name: str, capabilities: Capabilities
    ) -> None:
        async with self.member(broker, name, dead_letter=None) as member:
            await member.send(name, b"x")
            taken = await member.take(1)
            outcome = DeadLetter("nobody wants it") if capabilities.dead_letter else Drop()
            assert await member.settle(taken, outcome) == []
            await member.expect_nothing(self.quiet)

    async def test_dead_letters_are_listed_requeued_and_purged(
        self, broker: Broker, name: str, capabilities: Capabilities
    ) -> None:
        dead = f"{name}.dead"
        async with (
            self.member(broker, name, "failed", dead_letter=dead) as failed,
            self.member(broker, name, "other", dead_letter=dead) as other,
        ):
            sent = await failed.send(name, *numbered(4), key="one", headers=Headers({"tenant": "acme"}))
            await other.acknowledge(await other.take(4))
            taken = await failed.take(4)
            if capabilities.dead_letter:
                assert await failed.settle(taken, DeadLetter("broken")) == []
            else:  # as the runtime does
                buried = [dead_letter_of(delivery, DeadLetter("broken"), dead, "failed") for delivery in taken]
                assert errors_of(await failed.connection.publish(buried)) == []
                await failed.acknowledge(taken)
            await failed.flush()
            try:
                letters = await failed.connection.dead_letters(dead)
            except Unsupported:
                assert not capabilities.dead_letter, "who moves them can show them"
                return
            listed = await letters.list()
            assert [message.message_id for message in listed] == sent
            assert [message.body for message in listed] == numbered(4)
            assert {message.headers[ERROR] for message in listed} == {"broken"}
            assert len(await letters.list(2)) == 2
            try:
                assert await letters.requeue(sent[:1]) == 1
            except BrokerRefused:  # the other group would get it, too
                assert not capabilities.dead_letter, "who moves them knows the way back"
                assert (await letters.purge(), list(await letters.list())) == (4, [])
                return
            assert await letters.requeue(["no such message"]) == 0
            assert await letters.purge(sent[1:2]) == 1
            assert await letters.requeue() == 2
            assert (await letters.requeue(), await letters.purge(), list(await letters.list())) == (0, 0, [])
            back = await failed.take(3)
            assert sorted(ids(back)) == sorted([sent[0], *sent[2:]])
            assert [delivery.attempt for delivery in back] == [1, 1, 1], "their attempts begin anew"
            assert {delivery.headers.pairs for delivery in back} == {(("tenant", b"acme"),)}
            await failed.acknowledge(back)
            await other.expect_nothing(self.quiet)

    async def test_transactions_where_there_are_any(
        self, broker: Broker, name: str, capabilities: Capabilities
    ) -> None:
        options = {"transactional": capabilities.transactions, "workers": 3}  # who locks rows holds as many
        async with self._one_taken(broker, name, **options) as (member, _):
            taken = await member.take(3)
            if not capabilities.transactions:
                with pytest.raises(Unsupported):
                    async with member.source.transaction(taken[:1]):
                        pytest.fail("a broker without transactions must not enter one")
                await member.acknowledge(taken)
                return
            async with member.source.transaction(taken[:1]) as unit:
                await unit.finish(ACK)
            async with member.source.transaction(taken[1:]):
                pass  # left without `finish`: rolled back, and still ours
            await member.acknowledge(taken[1:])
