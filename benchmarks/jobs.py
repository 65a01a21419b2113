"""The message, the handlers and the middleware that every scenario without a server uses."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any

import msgspec

from streamfw import Header, Message, State
from streamfw.middleware import Next

__all__ = ["BODY", "Order", "Pool", "answers", "around", "four", "fresh", "lifespan", "noop"]

BODY = (
    b'{"id": 123456, "customer": "customer-000017", "item": "espresso machine", "qty": 3, "price": 129.95, '
    b'"note": "leave at the back door, ring twice, thanks"}'
)


class Order(msgspec.Struct):
    id: int
    customer: str
    item: str
    qty: int
    price: float
    note: str


class Pool:
    """Stands for what a lifespan yields."""


async def noop(order: Order) -> None: ...


async def answers(order: Order) -> int | None:
    """May return a value, which is a reply to a message that asks for one; these do not."""
    return None


async def four(
    order: Order, tenant: Annotated[str, Header("tenant")], message: Message, pool: Annotated[Pool, State]
) -> None: ...


async def around(message: Message, call_next: Next) -> object:
    return await call_next(message)


async def lifespan() -> AsyncIterator[Pool]:
    yield Pool()


def fresh(handler: Any) -> Any:
    """The same function without the marks of other cases."""
    handler.__dict__.clear()
    return handler
