"""The slice of the kill suite that every run of the tests takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.kills import kill_run, poison_run
from tests.services.postgres import OwnPostgres

pytestmark = pytest.mark.xdist_group("kills")


@pytest.mark.timeout(240)
@pytest.mark.parametrize("form", ["lease", "rowlock", "journal"])
async def test_five_killed_workers_lose_nothing(own_durable_postgres: OwnPostgres, tmp_path: Path, form: str) -> None:
    run = await kill_run(own_durable_postgres.facts.dsn, tmp_path, seed=1, messages=2_000, kills=5, form=form)
    assert run.verdict.good, run.verdict
    assert run.verdict.handled == run.verdict.published == 2_000
    assert run.kills == 5
    assert run.left == 0


@pytest.mark.timeout(240)
@pytest.mark.parametrize("form", ["lease", "rowlock"])
async def test_a_message_that_kills_its_process_is_the_only_dead_letter(
    own_durable_postgres: OwnPostgres, tmp_path: Path, form: str
) -> None:
    run = await poison_run(own_durable_postgres.facts.dsn, tmp_path, messages=1_000, form=form)
    assert run.verdict.good, run.verdict
    assert run.dead == 1
    assert run.left == 0
    assert run.kills >= 3, "it was delivered at least three times"
