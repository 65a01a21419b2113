"""How a reader goes on in a stream: every case, against a stream that is known whole."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from streamfw_rabbit.stream_entry import Entry
from streamfw_rabbit.stream_witness import Seen

PATIENCE = 10.0


def message(offset: int, stream: str) -> Seen:
    return Seen(offset, f"{stream}-{offset}", 0.0, b"")


@given(
    same=st.booleans(),
    first=st.integers(0, 12),
    length=st.integers(0, 12),
    gaps=st.sets(st.integers(0, 24)),
    following=st.integers(0, 12),
    witness=st.one_of(st.none(), st.integers(0, 11)),
)
def test_against_the_stream_itself(
    same: bool, first: int, length: int, gaps: set[int], following: int, witness: int | None
) -> None:
    """What is there is `kept`; `same`: it is what the witness was read of."""
    if witness is not None and witness >= following:
        witness = None
    if same and witness is not None:
        gaps = gaps - {witness}
    kept = [offset for offset in range(first, first + length) if offset not in gaps]
    entry = Entry(following, None if witness is None else message(witness, "old").witness())
    assert entry.asked_for == (following if witness is None else witness)
    begin, end = (kept[0], kept[-1] + 1) if kept else (None, None)
    came = [offset for offset in kept if offset >= entry.asked_for]
    taken = bool(came) and entry.came(message(came[0], "old" if same else "new"))
    verdicts = [entry.look(begin, end, now, PATIENCE) for now in (0.0, PATIENCE)]

    if not kept:
        assert set(verdicts) == {"well" if following == 0 else "open"}
    elif witness is None:
        assert taken == bool(came)
        assert verdicts == (["open", "another"] if kept[-1] + 1 < following else ["well", "well"])
        dropped = bool(came) and begin is not None and begin > following
        assert entry.gone == ((following, came[0] - 1) if dropped else None)
    elif not came:
        assert verdicts == ["open", "another"], "it ends before the witness"
        assert "before" in entry.why
    elif came[0] == witness and same:
        assert taken
        assert verdicts == ["well", "well"]
        assert entry.gone is None
    else:
        assert not taken
        assert entry.blocked
        lost = begin is not None and begin > witness
        assert set(verdicts) == {"no telling" if lost else "another"}


def test_a_stream_that_catches_up_is_well() -> None:
    entry = Entry(5)
    assert entry.look(0, 3, 0.0, PATIENCE) == "open"
    assert entry.look(0, 5, 9.0, PATIENCE) == "well"
    assert not entry.is_short


def test_a_witness_that_has_not_come_yet_is_waited_for() -> None:
    entry = Entry(5, message(4, "old").witness())
    assert entry.look(0, 3, 0.0, PATIENCE) == "open"
    assert entry.look(0, 6, 9.0, PATIENCE) == "open", "it is there, and has not come yet"
    assert not entry.is_short
    assert entry.look(0, 3, 12.0, PATIENCE) == "open", "the time begins anew"


def test_what_came_before_the_server_dropped_it_is_not_gone() -> None:
    entry = Entry(21)
    assert entry.look(1400, 1600, 0.0, PATIENCE) == "open", "what comes first is not known yet"
    assert entry.came(message(1445, "old"))
    assert entry.look(1530, 1600, 5.0, PATIENCE) == "well"
    assert entry.gone == (21, 1444)
