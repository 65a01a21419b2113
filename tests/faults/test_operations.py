"""The slice of the operations suite that every run of the tests takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.operations import reload_run, service_run
from tests.services.postgres import Postgres

pytestmark = pytest.mark.xdist_group("operations")


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("form", "seed"), [("lease", 1), ("rowlock", 2)])
async def test_signals_and_kills_under_load_lose_nothing(
    database: Postgres, tmp_path: Path, form: str, seed: int
) -> None:
    run = await service_run(database.dsn, tmp_path, seed=seed, each=1, form=form)
    assert run.verdict.good, run.verdict
    assert run.verdict.handled == run.verdict.published > 500
    assert run.operations == {"SIGTERM": 1, "SIGHUP": 1, "kill": 1}


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("form", "seed"), [("lease", 3), ("rowlock", 4)])
async def test_hot_reloads_under_load_lose_nothing_and_repeat_nothing(
    database: Postgres, tmp_path: Path, form: str, seed: int
) -> None:
    run = await reload_run(database.dsn, tmp_path, seed=seed, each=2, form=form)
    assert run.verdict.good, run.verdict
    assert run.verdict.handled == run.verdict.published > 500
    assert run.verdict.explained == 0
    assert run.operations == {"hot reload": 2}
