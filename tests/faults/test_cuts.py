"""The slice of the cut suite that every run of the tests takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.cuts import cut_run
from tests.services.postgres import OwnPostgres


@pytest.mark.timeout(180)
@pytest.mark.parametrize("form", ["lease", "rowlock", "journal"])
async def test_twenty_cuts_under_a_running_app_lose_nothing(
    own_durable_postgres: OwnPostgres, tmp_path: Path, form: str
) -> None:
    run = await cut_run(own_durable_postgres, tmp_path, seed=3, messages=600, faults=20, form=form)
    assert run.verdict.good, run.verdict
    assert run.verdict.handled == run.verdict.published
    assert sum(run.faults.values()) == 20
    assert run.unhealthy_seen, "health told of a server that was away"
