"""Everything at once, at random, against a model: each message ends exactly once or is still the source's, a key keeps
its order, contexts do not mix, and nothing is left behind in the pump.

A failing seed is printed; `FUZZ_SEEDS=from:to` runs others.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from streamfw import Message
from streamfw.broker import Delivery, Settlement
from streamfw.outcome import DeadLetter, Drop, Outcome, Retry
from streamfw.runtime import pump as pump_module
from streamfw.runtime import settler as settler_module
from streamfw.subscriber import Batch

from . import rig as rig_module
from .rig import BARE, NATIVE, FakeDelivery, FakeSource, Rig, away, prepared, pumping, quick
from .test_pump import leak

FIRST, _, LAST = os.environ.get("FUZZ_SEEDS", "0:400").partition(":")
AT_ONCE = 40
COUNT = 100
KINDS = [NATIVE, BARE, msgspec.structs.replace(NATIVE, release=False), msgspec.structs.replace(BARE, retry=True)]


class NotingSource(FakeSource):
    """Tells a trial of what was put aside: that is handled, too, when it comes to order, though not yet settled."""

    note: Callable[[Message], None]


class NotingPump(pump_module.Pump):
    def _odd(self, delivery: Delivery, outcome: Outcome) -> bool:
        stays = super()._odd(delivery, outcome)
        if isinstance(outcome, Drop | DeadLetter):
            assert isinstance(self.source, NotingSource)
            self.source.note(delivery)
        return stays


class Trial:
    """One pump with its own dice."""

    def __init__(self, seed: int) -> None:
        self.seed, self.dice = seed, random.Random(seed)
        dice = self.dice
        self.workers = dice.choice([1, 2, 8])
        self.ordered = dice.random() < 0.6
        self.batch = Batch(dice.choice([1, 4, 16]), dice.choice([0.0, 0.002])) if dice.random() < 0.4 else None
        self.in_transaction = dice.random() < 0.25
        self.to_the_end = dice.random() < 0.5
        self.wrong: list[object] = []
        self.done: dict[object, list[int]] = {}
        self.running: set[object] = set()
        self.now = 0
        messages = prepared(COUNT, lambda n: f"k{dice.randrange(8)}" if dice.random() < 0.9 else "hot")
        if not self.ordered:
            messages = [msgspec.structs.replace(m, lane=None) for m in messages]
        self.source = NotingSource(messages, dice.choice(KINDS))
        self.source.note = self.note
        self.source.before_settle = self.before_settle
        self.source.settle_faults.extend(self.some(away, 0.1))
        self.source.late_settle_faults.extend(self.some(away, 0.03))
        self.source.reopen_faults.extend(self.some(away, 0.3))
        self.source.finish_faults.extend([lambda deliveries: away()] * dice.choice([0, 0, 3]))

    def some(self, make: Any, share: float) -> list[BaseException | None]:
        return [make() if self.dice.random() < share else None for _ in range(200)]

    async def before_settle(self, settlements: Sequence[Settlement]) -> None:
        if self.dice.random() < 0.4:
            await asyncio.sleep(self.dice.choice([0, 0, 0.001]))

    async def one(self, message: Message) -> None:
        await self.handle([message])

    async def many(self, messages: list[Message]) -> object:
        return await self.handle(messages)

    async def handle(self, messages: list[Message]) -> object:
        dice = self.dice
        if leak.get() is not None:
            self.wrong.append("a leaked variable")
        keys = {message.key for message in messages} if self.ordered else set()
        if keys & self.running:
            self.wrong.append(f"two at once of {keys & self.running}")
        self.running |= keys
        self.now += 1
        if self.now > self.workers:
            self.wrong.append("more at once than workers")
        try:
            if dice.random() < 0.03:
                leak.set(1)
            for _ in range(dice.choice([0, 0, 0, 1, 2])):
                await asyncio.sleep(dice.choice([0, 0, 0.001]))
            await self.mishap(dice.random())
            return self.results(messages)
        finally:
            self.running -= keys
            self.now -= 1

    async def mishap(self, x: float) -> None:
        task = asyncio.current_task()
        assert task is not None
        if x < 0.01:
            await asyncio.sleep(10)  # the timeout
        elif x < 0.02:
            task.cancel()
            await asyncio.sleep(1)
        elif x < 0.04:
            raise KeyError("mishap")
        elif x < 0.06:
            raise Retry(after=self.dice.choice([0, 0.001]))
        elif x < 0.07:
            raise Drop
        elif x < 0.08:
            try:
                async with asyncio.timeout(0.001):
                    await asyncio.sleep(1)
            except TimeoutError:
                pass
        elif x < 0.09:
            task.cancel()  # and returns

    def results(self, messages: list[Message]) -> object:
        if not self.batch or self.in_transaction or self.dice.random() < 0.8:
            for message in messages:
                self.note(message)
            return None
        results: list[object] = []
        failed: set[object] = set()
        for message in messages:
            if self.dice.random() < 0.1:
                failed.add(message.key)
                results.append(self.dice.choice([Retry(after=0.001), ValueError("an element")]))
            else:
                if not (self.ordered and message.key in failed):
                    self.note(message)
                results.append(None)
        return results

    def note(self, message: Message) -> None:
        assert isinstance(message, FakeDelivery)
        self.done.setdefault(message.key, []).append(message.position)

    async def trouble(self, rig: Rig) -> None:
        """What a source does to its pump, while it runs."""
        dice, source, pump = self.dice, self.source, rig.pump
        while True:
            await asyncio.sleep(dice.random() * 0.01)
            x = dice.random()
            if x < 0.3:
                source.fail_fetch(away())
            elif x < 0.6:
                pump.hold()
                if dice.random() < 0.7:
                    await pump.quiesce(dice.choice([0.001, 0.05]))
                if self.ordered and dice.random() < 0.7:
                    moved = f"k{dice.randrange(8)}"
                    source.lose_lane(moved)
                    pump.release(lambda d, moved=moved: d.key == moved)  # type: ignore[misc]
                else:
                    pump.release()
            elif x < 0.7 and self.ordered:
                source.lose_lane(f"k{dice.randrange(8)}")
            elif x < 0.8:
                rig.connection.publish_faults.append(away())
            elif x < 0.9 and (slots := sorted(pump.crew.slots, key=id)):
                dice.choice(slots).task.cancel()

    async def run(self) -> None:
        dice, source = self.dice, self.source
        policy = quick(dice.choice([2, 4, None]), on_error={KeyError: Drop} if dice.random() < 0.3 else None)
        options: dict[str, Any] = {"prefetch": dice.choice([None, 16, 64]), "held": dice.choice([20, 10_000])}
        if not self.batch:
            options["prefetch"] = dice.choice([None, 1, 7, 64])
        async with pumping(
            self.many if self.batch else self.one, source, policy=policy, batch=self.batch, ordered=self.ordered,
            workers=self.workers, timeout=0.03, in_transaction=self.in_transaction, alone=False, **options,
        ) as rig:  # fmt: skip
            trouble = asyncio.create_task(self.trouble(rig))
            if self.to_the_end:
                await asyncio.sleep(dice.random() * 0.1)
                trouble.cancel()
                await asyncio.wait([trouble])
                rig.pump.release()  # it may have been cancelled while it held the pump
                source.fetch_faults.clear()
                await rig.all_ended(COUNT, 40.0)
            else:
                await asyncio.sleep(dice.random() * 0.1)
                await rig.drain(dice.choice([0.0, 0.001, 0.03]))
                trouble.cancel()
                await asyncio.wait([trouble])
            if trouble.done() and not trouble.cancelled():
                assert trouble.exception() is None
        assert rig.failures == []
        await asyncio.sleep(0.01)  # retries that the source itself delays come back
        self.check()

    def check(self) -> None:
        source = self.source
        assert self.wrong == []
        assert {p for p, outcomes in source.ended.items() if len(outcomes) != 1} == set(), "ended twice"
        left = [message.position for message in source.queue]
        assert len(left) == len(set(left))
        assert set(left).isdisjoint(source.ended)
        assert sorted([*left, *source.ended]) == list(range(COUNT)), "nothing is lost"
        if self.to_the_end:
            assert left == []
        if self.ordered:
            for key, numbers in self.done.items():
                first = list(dict.fromkeys(numbers))
                assert first == sorted(first), f"the order of {key}: {numbers}"


@pytest.mark.timeout(120)
async def test_fuzz(monkeypatch: pytest.MonkeyPatch) -> None:
    def soon(attempt: int) -> float:
        return 0.001

    monkeypatch.setattr(rig_module, "Pump", NotingPump)
    monkeypatch.setattr(settler_module, "backoff", soon)
    monkeypatch.setattr(pump_module, "backoff", soon)
    monkeypatch.setattr(pump_module, "PAUSE", (0.001, 0.002))
    monkeypatch.setattr(pump_module, "TICK", 0.02)
    seeds = range(int(FIRST), int(LAST))
    for begin in range(seeds.start, seeds.stop, AT_ONCE):
        some = [Trial(seed) for seed in seeds if begin <= seed < begin + AT_ONCE]
        results = await asyncio.gather(*(trial.run() for trial in some), return_exceptions=True)
        failed = {trial.seed: result for trial, result in zip(some, results, strict=True) if result is not None}
        for seed, error in failed.items():
            error.add_note(f"seed {seed}: FUZZ_SEEDS={seed}:{seed + 1}")
            raise error
        assert len(asyncio.all_tasks()) == 1, "tasks are left over"


async def test_the_model_notices() -> None:
    """The check itself can fail: a source that forgets one, and one that ends one twice."""
    trial = Trial(0)
    trial.source.ended = {n: [Drop()] for n in range(COUNT)}
    trial.source.queue.clear()
    trial.check()
    del trial.source.ended[5]
    with pytest.raises(AssertionError, match="lost"):
        trial.check()
    trial.source.ended[5] = [Drop(), Drop()]
    with pytest.raises(AssertionError, match="twice"):
        trial.check()
    trial.source.ended[5] = [Drop()]
    trial.ordered, trial.done = True, {"k": [1, 3, 2]}
    with pytest.raises(AssertionError, match="order"):
        trial.check()
