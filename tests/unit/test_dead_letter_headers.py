"""What a dead letter tells besides the original's own headers."""

from __future__ import annotations

from streamfw.message import (
    ORIGIN,
    ORIGIN_ATTEMPT,
    ORIGIN_OFFSET,
    ORIGIN_PARTITION,
    Headers,
    dead_letter_headers,
    original_headers,
)


def test_a_letter_that_becomes_one_again_tells_of_its_last_place_only() -> None:
    """It came from a log at first, and from a queue now: its offset then is no place in that queue."""
    original = Headers({"tenant": "acme"})
    place = {ORIGIN_PARTITION: "1", ORIGIN_OFFSET: "7"}
    first = dead_letter_headers(original, "no", "ValueError", "orders", "shop", 3, place)
    assert (first[ORIGIN_PARTITION], first[ORIGIN_OFFSET]) == ("1", "7")
    again = dead_letter_headers(first, "no", "ValueError", "orders.dead", "shop", 1)
    assert (again[ORIGIN], again[ORIGIN_ATTEMPT], again["tenant"]) == ("orders.dead", "1", "acme")
    assert ORIGIN_OFFSET not in again
    assert ORIGIN_PARTITION not in again
    assert original_headers(again) == original
