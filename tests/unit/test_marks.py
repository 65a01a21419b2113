"""What was given to the app is what runs, however it was marked; what is marked wrongly is told with a way out."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import pytest

from streamfw import (
    App,
    Attempt,
    Backoff,
    Batch,
    DeadLetter,
    Drop,
    MessageBatch,
    Next,
    Retry,
    Router,
    State,
    subscriber,
)
from streamfw.memory import MemoryBroker
from tests.helpers import eventually


def app_of(*handlers: Any, **options: Any) -> App:
    return App(*handlers, brokers={"default": MemoryBroker()}, **options)


async def test_a_decorator_above_the_mark_runs_too() -> None:
    seen: list[str] = []

    def noted(function: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
        @functools.wraps(function)
        async def with_a_note(*args: Any, **kwargs: Any) -> None:
            seen.append("noted")
            await function(*args, **kwargs)

        return with_a_note

    @noted
    @subscriber("orders")
    async def handle(number: int) -> None:
        seen.append(f"handled {number}")

    async with app_of(handle).running() as app:
        await app.publish("orders", 7)
        await eventually(lambda: len(seen) == 2)
    assert seen == ["noted", "handled 7"]


async def test_a_method_of_an_object_is_a_handler() -> None:
    class Shop:
        def __init__(self) -> None:
            self.seen: list[int] = []

        @subscriber("orders")
        async def ship(self, number: int) -> None:
            self.seen.append(number)

    shop = Shop()
    async with app_of(shop.ship).running() as app:
        await app.publish("orders", 7)
        await eventually(lambda: shop.seen)
    assert shop.seen == [7]


@pytest.mark.parametrize("outcome", [Drop, DeadLetter, Retry])
async def test_returning_an_outcomes_class_is_raising_it(outcome: type[Any]) -> None:
    @subscriber("orders", attempts=2)
    async def handle(number: int) -> Any:
        return outcome

    async with app_of(handle).running() as app:
        await app.publish("orders", 7)
        counters = app.pumps[0].counters
        await eventually(lambda: counters.dropped or counters.dead or counters.retried)
        assert counters.acked == 0


async def test_middleware_of_a_batch_knows_its_name() -> None:
    names: list[str] = []

    async def around(batch: MessageBatch, call_next: Next) -> object:
        names.append(batch.name)
        return await call_next(batch)

    @subscriber("orders", batch=Batch(10))
    async def handle(numbers: list[int]) -> None: ...

    async with app_of(handle, middleware=[around]).running() as app:
        await app.publish("orders", 7)
        await eventually(lambda: names)
    assert names == ["orders"]


def test_the_same_handler_twice_is_told_once() -> None:
    @subscriber("orders")
    async def handle(number: int) -> None: ...

    with pytest.raises(ExceptionGroup, match="is given twice") as caught:
        app_of(handle, handle).build()
    assert len(caught.value.exceptions) == 1


def test_a_list_of_handlers_is_told_how() -> None:
    @subscriber("orders")
    async def handle(number: int) -> None: ...

    with pytest.raises(ExceptionGroup, match=r"App\(\*handlers\)"):
        app_of([handle]).build()


def test_a_marker_in_the_place_of_the_type_is_told_how() -> None:
    @subscriber("orders")
    async def handle(number: int, attempt: Attempt, pool: State) -> None:  # type: ignore[valid-type]
        ...

    with pytest.raises(ExceptionGroup) as caught:
        app_of(handle).build()
    text = str(caught.value)
    assert "attempt: Annotated[<its type>, Attempt]" in text
    assert "pool: Annotated[<its type>, State]" in text


def test_a_routers_prefix_may_be_named() -> None:
    assert Router(prefix="shop.").prefix == "shop."


@pytest.mark.parametrize(("url", "proposal"), [("postgre://x", "postgres"), ("mem://x", "memory")])
def test_a_misspelt_scheme_is_proposed(url: str, proposal: str) -> None:
    with pytest.raises(ExceptionGroup, match=f"did you mean '{proposal}"):
        App(brokers={"default": url}).build()


async def test_a_cancellation_of_something_the_handler_waits_for_is_its_failure() -> None:
    attempts: list[int] = []

    @subscriber("orders", attempts=3, backoff=Backoff(first=0.01, max=0.01))
    async def handle(number: int, attempt: Annotated[int, Attempt]) -> None:
        attempts.append(attempt)
        waited = asyncio.create_task(asyncio.sleep(10))
        waited.cancel()
        await waited

    async with app_of(handle).running() as app:
        await app.publish("orders", 7)
        await eventually(lambda: app.pumps[0].counters.dead == 1)
    assert attempts == [1, 2, 3]
