"""The slice of the RabbitMQ suite that every run of the tests takes, and what its oracle must not overlook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.faults.findings import Judged
from tests.faults.rabbit_cuts import rabbit_cut_run
from tests.faults.rabbit_faults import KINDS
from tests.faults.rabbit_ledger import read
from tests.faults.rabbit_oracle import NOTICED, READ, SECOND, STORED, Answer, Fate, judge
from tests.services.rabbit import OwnRabbit

pytestmark = pytest.mark.xdist_group("rabbit-cuts")


@pytest.mark.timeout(240)
async def test_ten_faults_under_a_running_app_lose_nothing(own_rabbit: OwnRabbit, tmp_path: Path) -> None:
    run = await rabbit_cut_run(own_rabbit, tmp_path, seed=1, messages=1_500, faults=10, transport="fast")
    print(run)
    judged = run.judged
    assert not judged.faults, judged.faults
    assert judged.handled == judged.published > 1_500, "probes as well"
    assert dict(run.faults) == dict.fromkeys(KINDS, 1)
    assert run.kills == 1
    assert run.unhealthy_seen >= 8, "health told of all but the alarm and the other process's end"
    assert run.recoveries.count == 10


# ---------------------------------------------------------------------- the oracle

# Two ids for `single`, one of `log` and two of one key in `ordered`, handled by `app`; the other process has nothing.
AT = 10 * SECOND
KEYS = {3: "k", 4: "k"}
PUBLISHED = {0: "single", 1: "single", 2: "log", 3: "ordered", 4: "ordered", 5: "retries", 7: "retries"}
APP = [
    "C 1 app.1 single.soak",
    "C 1 app.2 ordered.soak",
    "C 1 app.3 retries.soak",
    "H 10 20 single 0 1 1 ok app.1 1",
    "H 20 30 single 1 1 1 ok app.1 2",
    "H 10 20 log 2 1 1 ok app.s0 7",
    "H 10 20 ordered 3 1 1 ok app.2 1",
    "H 20 30 ordered 4 1 1 ok app.2 2",
    "H 10 20 retries 5 1 1 retry app.3 1",
    "H 30 40 retries 5 1 2 ok app.3 3",
    "H 10 20 retries 7 1 1 dead app.3 2",
    "H 30 40 retries.dead 7 1 1 ok app.4 1",
    "A 30 app.1 2 1",
]
LATE = AT + SECOND
AGAIN = f"H {LATE} {LATE + 10} single 1 1 1 ok other.1 1"
END = f"E {AT + 10} app.1 lost 0"
FATE = Fate(AT, "cut", AT + 20, process="app")


def judged(
    directory: Path,
    app: Sequence[str],
    *other: str,
    fates: Sequence[Fate] = (),
    answers: Mapping[tuple[int, int], Answer] | None = None,
) -> Judged:
    (directory / "app.log").write_text("\n".join(app) + "\n")
    (directory / "other.log").write_text("".join(f"{line}\n" for line in other))
    told: dict[tuple[int, int], Answer] = {(number, 1): "stored" for number in PUBLISHED}
    return judge(read(directory), PUBLISHED, told | dict(answers or {}), fates, lambda number: KEYS.get(number, ""))


def unsettled(at: int = AT) -> list[str]:
    """As `APP`, with the acknowledgement written at that time."""
    return [*APP[:-1], f"A {at} app.1 2 1"]


def test_the_oracle_has_no_objection_to_what_came_once(tmp_path: Path) -> None:
    found = judged(tmp_path, APP)
    assert not found.faults
    assert (found.published, found.handled, found.duplicates.total()) == (7, 7, 0)


@pytest.mark.parametrize(
    ("lines", "other", "objection"),
    [
        ([line for line in APP if "single 0" not in line], [], "1 ids were lost"),
        ([line for line in APP if "dead" not in line], [], "1 ids were lost"),
        ([line for line in APP if "1 2 ok app.3" not in line], [], "1 ids were lost"),
        (APP, ["H 50 60 single 0 7 1 ok other.1 1"], "copies are strangers"),
        (APP, ["H 50 60 single 99 1 1 ok other.1 1"], "copies are strangers"),
        (APP, ["H 50 60 batch 0 1 1 ok other.1 1"], "came to their end elsewhere"),
        (APP, [AGAIN], "repeats have no cause"),
        (APP, ["H 50 60 log 2 1 1 ok other.s0 7"], "repeats have no cause"),
        ([*APP, "H 50 60 log 2 1 1 ok app.s0 7"], [], "repeats have no cause"),
        ([*APP, "H 50 60 retries 5 1 2 ok app.3 4"], [], "repeats have no cause"),
        ([*APP, "H 50 60 retries.dead 7 1 1 ok app.4 2"], [], "repeats have no cause"),
        ([*APP, END], [], "channels ended without a fault"),
        ([*APP, "E 50 app.2 channel 406"], [], "channels ended without a fault"),
        ([line.replace("H 20 30 ordered", "H 19 30 ordered") for line in APP], [], "messages were out of order"),
    ],
)
def test_the_oracle_objects(tmp_path: Path, lines: list[str], other: list[str], objection: str) -> None:
    found = judged(tmp_path, lines, *other)
    assert any(objection in fault for fault in found.faults), found.faults


def test_the_oracle_takes_the_end_of_a_channel_by_us_for_no_fault(tmp_path: Path) -> None:
    assert not judged(tmp_path, [*APP, "E 50 app.2 local 0"]).faults


@pytest.mark.parametrize(
    ("app", "fate", "explained"),
    [
        ([*APP[:-1], END], FATE, True),
        ([*unsettled(), END], FATE, True),
        ([*unsettled(AT - READ), END], FATE, True),
        ([*unsettled(AT - READ - 1), END], FATE, False),  # the server has surely read it
        (unsettled(), FATE, False),  # its channel lives
        ([*unsettled(), f"E {AT - 1} app.1 lost 0"], FATE, False),  # it had ended before
        ([*unsettled(), f"E {FATE.until + NOTICED + 1} app.1 lost 0"], FATE, False),
        ([*unsettled(), END], Fate(AT, "cut", AT + 20, process="other"), False),
        ([*unsettled(), END], Fate(AT, "cut", AT + 20, queue="batch.soak"), False),
        ([*unsettled(), END], Fate(AT, "cut", AT + 20, queue="single.soak"), True),
        ([*unsettled(), END], Fate(AT, "cut", AT + 20, ends=False), False),
        (unsettled(), Fate(AT, "cut", AT + 20, process="app", kills=True), True),
        ([*unsettled(AT - READ - 1)], Fate(AT, "cut", AT + 20, process="app", kills=True), False),
        ([*unsettled(), END], Fate(LATE + 1, "cut", LATE + 20), False),
        ([*APP[:-1], f"E {LATE + SECOND} app.1 lost 0"], FATE, True),  # it knew it late
    ],
)
def test_the_oracle_knows_whether_the_end_of_a_channel_explains_a_repeat(
    tmp_path: Path, app: list[str], fate: Fate, explained: bool
) -> None:
    found = judged(tmp_path, app, AGAIN, fates=[fate])
    assert found.duplicates == ({"cut": 1} if explained else {})
    assert bool(found.faults) == (not explained), found.faults


@pytest.mark.parametrize(("ended", "explained"), [(f"E {AT + 10} app.1 lost 0", True), ("", False)])
def test_the_oracle_knows_that_who_was_cut_off_may_begin_later_than_who_got_it_next(
    tmp_path: Path, ended: str, explained: bool
) -> None:
    late = [line.replace("H 20 30 single", f"H {AT + 5} {AT + 9} single") for line in APP[:-1]]
    app = [*late, ended] if ended else late
    found = judged(tmp_path, app, f"H {AT + 3} {AT + 4} single 1 1 1 ok other.1 1", fates=[FATE])
    assert found.duplicates == ({"cut": 1} if explained else {})
    assert bool(found.faults) == (not explained), found.faults


@pytest.mark.parametrize(("answer", "explained"), [("unknown", True), ("stored", False), ("refused", False)])
def test_the_oracle_knows_whether_it_was_right_to_publish_again(
    tmp_path: Path, answer: Answer, explained: bool
) -> None:
    second: dict[tuple[int, int], Answer] = {(1, 1): answer, (1, 2): "stored"}
    found = judged(tmp_path, APP, AGAIN.replace("single 1 1", "single 1 2"), answers=second)
    assert found.duplicates == {"published again": 1}
    assert bool(found.faults) == (not explained), found.faults


@pytest.mark.parametrize(
    ("ended", "fate", "explained"),
    [
        (AT - STORED, FATE, True),
        (AT - STORED - 1, FATE, False),  # its offset was stored
        (AT, Fate(AT, "cut", AT + 20, process="other"), False),
        (AT, Fate(LATE + 1, "cut", LATE + 20), False),
    ],
)
def test_the_oracle_knows_whether_a_message_of_a_stream_may_come_again(
    tmp_path: Path, ended: int, fate: Fate, explained: bool
) -> None:
    app = [line.replace("H 10 20 log", f"H {ended - 10} {ended} log") for line in APP]
    found = judged(tmp_path, app, f"H {LATE} {LATE + 10} log 2 1 1 ok other.s0 7", fates=[fate])
    assert found.duplicates == ({"cut": 1} if explained else {})
    assert bool(found.faults) == (not explained), found.faults


@pytest.mark.parametrize("again", ["retries 5 1 2 ok app.3 9", "retries.dead 7 1 1 ok app.4 9"])
@pytest.mark.parametrize(
    ("fate", "explained"),
    [
        (Fate(15, "alarm", 25, ends=False), True),
        (Fate(15, "cut", 25, process="other"), False),
        (Fate(LATE + 1, "cut", LATE + 20), False),
    ],
)
def test_the_oracle_knows_whether_a_copy_may_have_been_made_again(
    tmp_path: Path, again: str, fate: Fate, explained: bool
) -> None:
    found = judged(tmp_path, [*APP, f"H {LATE} {LATE + 10} {again}"], fates=[fate])
    assert found.duplicates == ({"copied again": 1} if explained else {})
    assert bool(found.faults) == (not explained), found.faults
