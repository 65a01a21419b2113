"""Order by key or partition, over all members of a group."""

from __future__ import annotations

import asyncio
import time

import pytest

from streamfw.broker import Broker, Capabilities, Delivery, Order

from ._kit import ConformanceKit, Member, bodies, ids, numbered


class OrderConformance(ConformanceKit):
    """What is not declared is refused at build; see the app level."""

    async def test_lanes(self, broker: Broker, name: str, capabilities: Capabilities) -> None:
        for number, order in enumerate((None, *sorted(capabilities.ordered_by))):
            at = f"{name}.{number}"
            async with self.member(broker, at, ordered_by=order) as member:
                await member.send(at, b"1", key="a")
                await member.send(at, b"2", key="b")
                await member.send(at, b"3", key="a")
                lanes: dict[str | None, set[object]] = {}
                taken = await member.take(3)
                for delivery in taken:
                    lanes.setdefault(delivery.key, set()).add(delivery.lane)
                if order is None:
                    assert lanes == {"a": {None}, "b": {None}}
                elif order == "key":
                    assert all(len(of_key) == 1 and None not in of_key for of_key in lanes.values())
                    assert lanes["a"] != lanes["b"]
                else:
                    assert all(len(of_key) == 1 and None not in of_key for of_key in lanes.values())
                await member.acknowledge(taken)

    async def test_a_key_is_in_order_over_the_members(
        self, broker: Broker, name: str, capabilities: Capabilities
    ) -> None:
        for number, order in enumerate(sorted(capabilities.ordered_by)):
            at = f"{name}.{number}"
            async with (
                self.member(broker, at, ordered_by=order) as first,
                self.member(self.another(broker), at, ordered_by=order) as second,
            ):
                for body in numbered(60):
                    await first.send(at, body, key=f"key-{int(body) % 3}")
                taken: list[Delivery] = []
                holders: dict[str | None, Member] = {}

                async def work(
                    member: Member, taken: list[Delivery] = taken, holders: dict[str | None, Member] = holders
                ) -> None:
                    while chunk := await member.poll(self.quiet, limit=4):
                        for key in {delivery.key for delivery in chunk}:
                            assert holders.setdefault(key, member) is member, f"{key} went to two members at once"
                        taken.extend(chunk)
                        await asyncio.sleep(0.01)  # long enough for the other to be given what it must not get
                        await member.acknowledge(chunk)
                        for delivery in chunk:
                            holders.pop(delivery.key, None)

                deadline = time.monotonic() + self.patience
                while len(taken) < 60 and time.monotonic() < deadline:
                    await asyncio.gather(work(first), work(second))
                _assert_in_order(taken)
                assert len(taken) == 60

    async def test_nobody_overtakes_what_is_out(self, broker: Broker, name: str, capabilities: Capabilities) -> None:
        """While a member holds a message of a key, no other member gets a later one of it; when it closes, its
        successor begins with what it left."""
        for number, order in enumerate(sorted(capabilities.ordered_by)):
            at = f"{name}.{number}"
            async with (
                self.member(broker, at, ordered_by=order) as first,
                self.member(self.another(broker), at, ordered_by=order) as second,
            ):
                sent = [i for body in numbered(10) for i in await first.send(at, body, key="one")]
                owner, other, taken = await self._who_gets(first, second, 4)
                assert ids(taken) == sent[:4]
                await owner.acknowledge(taken[:2])
                await other.expect_nothing(self.quiet)
                await owner.close()
                rest = await other.take(8)
                assert ids(rest) == sent[2:], "from the first that was not settled, in order"
                await other.acknowledge(rest)

    async def _who_gets(self, first: Member, second: Member, count: int) -> tuple[Member, Member, list[Delivery]]:
        deadline = time.monotonic() + self.patience
        while time.monotonic() < deadline:
            for owner, other in ((first, second), (second, first)):
                if taken := await owner.poll(self.quiet, limit=count):
                    return owner, other, taken + (await owner.take(count - len(taken)) if len(taken) < count else [])
        pytest.fail("neither member got anything")


def _assert_in_order(taken: list[Delivery]) -> None:
    by_key: dict[str | None, list[int]] = {}
    for delivery in taken:
        by_key.setdefault(delivery.key, []).append(int(delivery.body))
    for key, numbers in by_key.items():
        assert numbers == sorted(set(numbers)), f"{key} came out of order or twice"
    assert sorted(bodies(taken), key=int) == numbered(len(taken))


__all__ = ["Order", "OrderConformance"]
