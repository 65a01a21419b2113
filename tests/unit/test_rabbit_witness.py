"""What is remembered of a stream, to know it again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamfw.positions import Watermark
from streamfw_rabbit.stream_witness import Seen, Trail, Witness


def seen(offset: int) -> Seen:
    return Seen(offset, f"m-{offset}", 1.0, b"%d" % offset)


def test_each_part_of_a_message_tells() -> None:
    one = seen(5).witness()
    assert one == seen(5).witness()
    others = [
        seen(6),
        seen(5)._replace(message_id="m-6"),
        seen(5)._replace(timestamp=2.0),
        seen(5)._replace(body=b"6"),
        seen(5)._replace(message_id="", body=b"m-55"),
    ]
    assert len({one, *(other.witness() for other in others)}) == 6
    assert seen(5)._replace(message_id="\udcff").witness() != one


def test_as_text_and_back() -> None:
    one = seen(2**40).witness()
    assert len(one.text()) <= 60
    assert Witness.of(one.text(), 2**40 + 1, 10) == one


@pytest.mark.parametrize("text", [None, "", "4", "x:abc", "-1:abc", "10:abc", "11:abc", "4:abc", "²:abc"])
def test_what_does_not_serve_is_none(text: str | None) -> None:
    assert Witness.of(text, 10, 5) is None


@given(st.lists(st.one_of(st.integers(1, 4), st.lists(st.integers(0, 30), max_size=8)), max_size=40))
def test_what_is_stored_was_seen_and_lies_below_the_watermark(steps: list[int | list[int]]) -> None:
    mark, trail = Watermark(0), Trail()
    for step in steps:
        if isinstance(step, int):
            mark.hold(mark.end, step)
            trail.saw(seen(mark.end - 1))
            assert trail.last == seen(mark.end - 1).witness()
        else:
            mark.resolve_all(sorted({offset for offset in step if offset < mark.end}))
        before = trail.stored
        trail.look(mark.position)
        if trail.stored is not None:
            assert trail.stored == seen(trail.stored.offset).witness()
            assert trail.stored.offset < mark.position
            assert before is None or before.offset <= trail.stored.offset
        if mark.position == mark.end > 0:
            assert trail.stored == trail.last
