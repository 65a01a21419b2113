"""Bodies that are not there."""

from __future__ import annotations

import pytest

from streamfw import TOMBSTONE, App, Message, MsgpackCodec, subscriber
from streamfw.codec import Codec, JsonCodec
from streamfw.errors import DecodeError, Rejected
from streamfw.handler import compile_call


@pytest.mark.parametrize("codec", [JsonCodec(), MsgpackCodec()])
async def test_a_body_that_may_be_none_is_none_for_a_tombstone(codec: Codec) -> None:
    async def handle(order: dict[str, int] | None) -> object:
        return order

    call = compile_call(handle, codec, "handle").call
    assert await call(Message(name="x", body=TOMBSTONE)) is None
    assert await call(Message(name="x", body=codec.encode({"a": 1}))) == {"a": 1}
    assert await call(Message(name="x", body=codec.encode(None))) is None


async def test_another_body_cannot_be_decoded() -> None:
    async def handle(order: dict[str, int]) -> None: ...

    with pytest.raises(DecodeError, match="tombstone"):
        await compile_call(handle, JsonCodec(), "handle").call(Message(name="x", body=TOMBSTONE))


async def test_as_bytes_it_is_empty_and_known_by_the_message() -> None:
    async def handle(body: bytes, message: Message) -> object:
        return body, message.body is TOMBSTONE

    assert await compile_call(handle, JsonCodec(), "handle").call(Message(name="x", body=TOMBSTONE)) == (b"", True)
    assert repr(TOMBSTONE) == "TOMBSTONE"


async def test_where_no_keys_are_kept_it_is_refused() -> None:
    @subscriber("prices")
    async def handle(price: dict[str, int] | None) -> None: ...

    app = App(handle, brokers={"default": "memory://"})
    async with app.running():
        with pytest.raises(Rejected, match="tombstone"):
            await app.publish("prices", TOMBSTONE, key="a")
