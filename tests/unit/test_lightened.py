"""What a dead letter leaves out when it is too large."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from streamfw.message import DEAD_LETTER_HEADERS, ERROR, LEFT_OUT, ORIGIN, Headers, Outgoing, lightened

TOLD = ((ERROR, b"broken"), (ORIGIN, b"orders"))


def letter(*pairs: tuple[str, bytes | None], key: str | None = None) -> Outgoing:
    return Outgoing(name="orders.dead", body=b"x", message_id="1", key=key, headers=Headers.of((*pairs, *TOLD)))


def weight(message: Outgoing) -> int:
    return len(message.key or "") + sum(len(name) + len(value or b"") for name, value in message.headers.pairs)


def test_the_largest_go_first_and_only_as_many_as_must() -> None:
    whole = letter(("small", b"1"), ("large", b"x" * 500), ("largest", b"x" * 1000), ("void", None))
    lighter = lightened(whole, 10)
    assert lighter is not None
    assert lighter.headers.pairs == (
        ("small", b"1"),
        ("large", b"x" * 500),
        ("void", None),
        *TOLD,
        (LEFT_OUT, b"largest"),
    )
    again = lightened(lighter, 400)
    assert again is not None
    assert again.headers.pairs == (("small", b"1"), ("void", None), *TOLD, (LEFT_OUT, b"largest, large"))
    assert (whole.headers.raw("largest"), again.key, again.body) == (b"x" * 1000, None, b"x")


def test_a_long_key_goes_last_and_then_nothing() -> None:
    whole = letter(("tenant", b"acme"), key="k" * 2000)
    without = lightened(whole, 1500)
    assert without is not None
    assert (without.key, without.headers.raw("tenant")) == ("k" * 2000, None)
    bare = lightened(without, 1500)
    assert bare is not None
    assert (bare.key, bare.headers[LEFT_OUT]) == (None, "tenant, (the key)")
    assert lightened(bare, 1) is None
    assert lightened(letter(key="short"), 1) is None


names = st.text(min_size=1, max_size=300)
pairs = st.lists(st.tuples(names, st.none() | st.binary(max_size=400)), max_size=60)


@given(pairs, st.integers(1, 20_000), st.text(max_size=1500))
def test_it_becomes_lighter_until_there_is_nothing_left(
    own: list[tuple[str, bytes | None]], over: int, key: str
) -> None:
    message: Outgoing | None = letter(*own, key=key)
    at_first, steps = weight(letter(*own, key=key)), 0
    while message is not None and at_first - weight(message) < over:
        assert {name for name, _ in TOLD} <= set(message.headers)
        assert len(message.headers.raw(LEFT_OUT) or b"") < 5000
        message, steps = lightened(message, over), steps + 1
        assert steps <= len(own) + 2
    if message is not None:
        kept = {name for name, _ in message.headers.pairs} - DEAD_LETTER_HEADERS - {LEFT_OUT}
        assert kept <= {name for name, _ in own}
