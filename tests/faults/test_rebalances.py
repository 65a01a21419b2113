"""The slice of the rebalance suite that every run of the tests takes, and what its oracle must not overlook."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.faults.kafka_ledger import read
from tests.faults.rebalance_member import BATCH, COMMIT_EVERY
from tests.faults.rebalance_oracle import Fate, Findings, judge, out_of_order
from tests.faults.rebalances import Mode, rebalance_run
from tests.services.kafka import Kafka, OwnKafka

pytestmark = pytest.mark.xdist_group("rebalances")


@pytest.mark.timeout(180)
async def test_ten_rebalances_lose_nothing_and_moves_repeat_nothing(kafka: Kafka, tmp_path: Path) -> None:
    run = await rebalance_run(kafka, tmp_path, seed=1, messages=12_000, events=10)
    print(run)
    found = run.findings
    assert not found.faults, found.faults
    assert found.handled == found.published == 12_000
    assert found.duplicates["moved"] == 0
    assert found.generations >= 10
    assert run.events.total() == 10
    assert min(run.events.values()) >= 2
    assert found.kept > 0 < found.new
    # What bounds the cost of a kill is the distance of commits: it must be about what was asked for.
    assert found.cadence < 2 * COMMIT_EVERY


@pytest.mark.timeout(180)
@pytest.mark.parametrize("mode", ["key", "batch"])
async def test_order_and_batches_hold_across_rebalances(kafka: Kafka, tmp_path: Path, mode: Mode) -> None:
    run = await rebalance_run(kafka, tmp_path, seed=2, messages=4_000, events=4, mode=mode)
    print(run)
    found = run.findings
    assert not found.faults, found.faults
    assert found.handled == found.published == 4_000
    assert found.largest_batch <= BATCH.size
    assert (found.batches > 0) == (mode == "batch")


@pytest.mark.timeout(180)
async def test_members_move_while_their_server_is_away(own_kafka: OwnKafka, tmp_path: Path) -> None:
    run = await rebalance_run(own_kafka.facts, tmp_path, seed=6, messages=3_000, events=3, server=own_kafka)
    print(run)
    assert not run.findings.faults, run.findings.faults
    assert run.findings.handled == run.findings.published == 3_000
    assert run.of_server.total() == 1


# ---------------------------------------------------------------------- the oracle

SECOND = 1_000_000_000
# Two owners of partition 0: the first handles 0 to 2 and commits 2, the second begins there.
FIRST = ["P 0 1 0 0 one.1", "A 0 1 1 0 1", "H 10 20 0 0 0 one.1 0", "H 20 30 1 0 1 one.1 0"]
COMMIT = ["C 40 50 1 0:2", "R 90 1 1"]
SECOND_OWNER = ["P 100 2 0 2 two.1", "A 100 2 1 0 1", "H 110 120 2 0 2 two.1 0"]


def judged(directory: Path, one: Sequence[str], two: Sequence[str], *fates: Fate, fifo: bool = True) -> Findings:
    (directory / "one.log").write_text("\n".join(one) + "\n")
    (directory / "two.log").write_text("\n".join(two) + "\n")
    return judge(read(directory), range(3), fates, session=2.0, fifo=fifo)


def test_the_oracle_has_no_objection_to_a_clean_move(tmp_path: Path) -> None:
    found = judged(tmp_path, FIRST + COMMIT, SECOND_OWNER)
    assert not found.faults
    assert found.handled == 3
    assert (found.kept, found.new, found.generations) == (0, 2, 2)
    assert found.duplicates.total() == 0


LATE = "H 50 60 2 0 2 one.1 0"  # the first owner handles 2 as well, after its last commit


@pytest.mark.parametrize(
    ("one", "two", "objection"),
    [
        (FIRST + COMMIT, SECOND_OWNER[:2], "ids were lost"),
        (FIRST + COMMIT, [*SECOND_OWNER, "H 130 140 7 0 7 two.1 0"], "strange ids"),
        ([*FIRST, LATE, *COMMIT], SECOND_OWNER, "repeats came from moves alone"),
        (FIRST + COMMIT, [*SECOND_OWNER, "H 130 140 2 0 2 two.1 0"], "handled twice by one owner"),
        (FIRST + COMMIT, [*SECOND_OWNER, "H 130 140 1 0 1 two.1 0"], "before the start of the later owner"),
        (FIRST + COMMIT, [*SECOND_OWNER, "C 130 140 2 0:1"], "commits went back"),
        ([*FIRST, "C 60 70 1 0:3", *COMMIT], SECOND_OWNER, "owners began before what was committed"),
        ([*FIRST, "G 0 1", *COMMIT], SECOND_OWNER, "partitions had gaps"),
    ],
)
def test_the_oracle_objects(tmp_path: Path, one: list[str], two: list[str], objection: str) -> None:
    found = judged(tmp_path, one, two)
    assert any(objection in fault for fault in found.faults), found.faults


@pytest.mark.parametrize(
    ("fate", "cause"),
    [
        (Fate(80, "kill", "one"), "kill"),
        (Fate(80, "stop", "one"), "stop"),
        (Fate(80, "server", until=85), "server"),
        (Fate(-20 * SECOND, "server", until=-19 * SECOND), "moved"),
        (Fate(80, "kill", "two"), "moved"),
        (Fate(80, "leave", "one"), "moved"),
        (Fate(115, "kill", "one"), "moved"),  # when the partition was another's already
    ],
)
def test_the_oracle_knows_the_cause_of_a_repeat(tmp_path: Path, fate: Fate, cause: str) -> None:
    found = judged(tmp_path, [*FIRST, LATE, *COMMIT], SECOND_OWNER, fate)
    assert found.duplicates == {cause: 1}
    assert bool(found.faults) == (cause == "moved")


@pytest.mark.parametrize(
    ("stood_still", "how", "cause"), [(True, "fenced", "starved"), (False, "fenced", "moved"), (True, "moved", "moved")]
)
def test_the_oracle_excuses_only_a_member_that_was_taken_for_dead_because_its_loop_stood_still(
    tmp_path: Path, stood_still: bool, how: str, cause: str
) -> None:
    still = [f"L {75 + SECOND} {3 * SECOND}"] if stood_still else []
    found = judged(tmp_path, [*FIRST, LATE, *still, f"E {80 + SECOND} one.1 {how}"], SECOND_OWNER)
    assert found.duplicates == {cause: 1}
    assert bool(found.faults) == (cause == "moved")


@pytest.mark.parametrize("fifo", [True, False])
def test_the_oracle_knows_what_was_done_behind_another_message(tmp_path: Path, fifo: bool) -> None:
    one = [*FIRST[:3], "H 20 30 2 0 2 one.1 0", "C 40 50 1 0:1", "R 90 1 1"]  # 1 waits in its lane
    two = ["P 100 2 0 1 two.1", "A 100 2 1 0 1", "H 110 120 1 0 1 two.1 0", "H 120 130 2 0 2 two.1 0"]
    found = judged(tmp_path, one, two, fifo=fifo)
    assert found.duplicates == {"moved" if fifo else "behind": 1}
    assert bool(found.faults) == fifo
    # But what is below the mark of the later owner is done.
    late = judged(tmp_path, [*FIRST, LATE, *COMMIT[1:], "C 40 50 1 0:1"], [two[0], *two[2:]], fifo=fifo)
    assert late.duplicates == {"moved": 2}
    assert late.faults


def test_the_oracle_bounds_what_a_kill_repeats(tmp_path: Path) -> None:
    at = 10 * SECOND
    early = [f"H {number * 10} {number * 10 + 5} {number} 0 {number} one.1 0" for number in range(3)]
    one = ["P 0 1 0 0 one.1", "A 0 1 1 0 1", *early, f"C {at - SECOND} {at - SECOND} 1 1:5"]
    two = [f"P {at + 5} 2 0 0 two.1", *(f"H {at + 10} {at + 20} {number} 0 {number} two.1 0" for number in range(3))]
    found = judged(tmp_path, one, two, Fate(at, "kill", "one"))
    # They had ended long before the last commit, which should have covered them.
    assert any("kills repeated more" in fault for fault in found.faults), found.faults
    assert [(cost.repeated, cost.most) for cost in found.kills] == [(3, 0)]


def test_the_oracle_sees_a_key_out_of_order(tmp_path: Path) -> None:
    lines = ["P 0 1 0 0 one.1", "H 10 30 0 0 0 one.1 0", "H 20 40 2 0 2 one.1 0", "H 50 60 1 0 1 one.1 0"]
    (tmp_path / "one.log").write_text("\n".join(lines) + "\n")
    assert len(out_of_order(read(tmp_path), keys=2)) == 2  # over all owners, and in its own
    assert out_of_order(read(tmp_path), keys=3) == []
