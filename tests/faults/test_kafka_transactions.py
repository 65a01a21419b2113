"""A seeded slice of the transactions' fault suite; the soak runs it in full."""

from __future__ import annotations

import pytest

from tests.faults.kafka_transactions import copy_run
from tests.services.kafka import Kafka


@pytest.mark.timeout(180)
@pytest.mark.parametrize("batch", [0, 20])
async def test_killed_copiers_repeat_nothing_that_is_seen(kafka: Kafka, batch: int) -> None:
    run = await copy_run(kafka, seed=1, messages=1_500, kills=3, batch=batch)
    assert run.kills == 3
    assert run.visits >= 2
    assert run.lost == []
    assert run.twice == []
