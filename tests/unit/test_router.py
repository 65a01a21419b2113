"""Routers: prefixes, shared options, middleware from the outside in, nesting."""

from __future__ import annotations

from typing import Any

import pytest

from streamfw import App, Message, Next, Router, subscriber
from streamfw.memory import MemoryBroker
from streamfw.subscriber import declarations
from tests.helpers import eventually


def layer(name: str, seen: list[str]) -> Any:
    async def around(message: Message, call_next: Next) -> object:
        seen.append(name)
        return await call_next(message)

    return around


async def test_prefixes_options_and_middleware_add_up_from_the_outside_in() -> None:
    seen: list[str] = []
    outer = Router("shop.", attempts=3, workers=2, middleware=[layer("outer", seen)])
    inner = Router("bills.", attempts=5, middleware=[layer("inner", seen)])

    @inner.subscriber("paid", middleware=[layer("own", seen)])
    async def paid(number: int) -> None:
        seen.append(f"handler {number}")

    @outer.subscriber("orders", workers=7)
    async def order(number: int) -> None: ...

    outer.include(inner)
    app = App(outer, name="test", brokers={"default": MemoryBroker()}, middleware=[layer("app", seen)])
    plans = {one.subscription.name: one for one in app.build().subscribers}
    assert set(plans) == {"shop.orders", "shop.bills.paid"}
    assert (plans["shop.orders"].declaration.attempts, plans["shop.orders"].declaration.workers) == (3, 7)
    assert (plans["shop.bills.paid"].declaration.attempts, plans["shop.bills.paid"].declaration.workers) == (5, 2)
    async with app.running():
        await app.publish("shop.bills.paid", 1)
        await eventually(lambda: "handler 1" in seen)
    assert seen == ["app", "outer", "inner", "own", "handler 1"]


async def test_a_handler_stays_a_plain_function_and_belongs_to_its_router_alone() -> None:
    router = Router("a.")

    @router.subscriber("b")
    async def handle(number: int) -> int:
        return number + 1

    assert await handle(1) == 2
    assert declarations(handle) == []
    assert [d.name for d in router.declarations()] == ["a.b"]


def test_a_router_may_be_used_under_two_prefixes() -> None:
    common = Router()

    @common.subscriber("events")
    async def handle(number: int) -> None: ...

    north, south = Router("north."), Router("south.")
    north.include(common)
    south.include(common)
    built = App(north, south, brokers={"default": MemoryBroker()}).build()
    assert [one.subscription.name for one in built.subscribers] == ["north.events", "south.events"]


def test_twins_over_router_and_app_are_found() -> None:
    router = Router("a.")

    @router.subscriber("b")
    async def one(number: int) -> None: ...

    @subscriber("a.b")
    async def other(number: int) -> None: ...

    with pytest.raises(ExceptionGroup, match=r"same name in the same group"):
        App(router, other, brokers={"default": MemoryBroker()}).build()


def test_a_misspelt_option_of_a_router_is_told_at_build() -> None:
    router = Router("a.", wrkers=3)  # type: ignore[call-arg]

    @router.subscriber("b")
    async def one(number: int) -> None: ...

    with pytest.raises(ExceptionGroup, match="wrkers"):
        App(router, brokers={"default": MemoryBroker()}).build()


def test_routers_cannot_contain_each_other() -> None:
    one, other, third = Router("1."), Router("2."), Router("3.")
    one.include(other)
    other.include(third)
    with pytest.raises(ValueError, match="contain each other"):
        third.include(one)
    with pytest.raises(ValueError, match="contain each other"):
        one.include(one)
