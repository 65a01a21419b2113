"""The slices of the Kafka cut suites that every run of the tests takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.kafka_cuts import kafka_cut_run
from tests.services.kafka import OwnKafka

pytestmark = pytest.mark.xdist_group("kafka-cuts")


@pytest.mark.timeout(240)
async def test_a_server_that_goes_away_under_a_running_app_loses_nothing(own_kafka: OwnKafka, tmp_path: Path) -> None:
    run = await kafka_cut_run(own_kafka, tmp_path, seed=1, messages=600, faults=10)
    print(run)
    assert not run.findings.faults, run.findings.faults
    assert run.findings.handled == run.findings.published > 500
    assert run.faults.total() == 10
    assert run.faults["server killed (SIGKILL)"] >= 1
    assert run.unhealthy_seen >= 1, "health told of a server that was away"


@pytest.mark.timeout(240)
async def test_the_loss_of_one_node_of_three_under_a_running_app_loses_nothing(
    own_kafka_cluster: OwnKafka, tmp_path: Path
) -> None:
    run = await kafka_cut_run(own_kafka_cluster, tmp_path, seed=1, messages=300, faults=3)
    print(run)
    assert not run.findings.faults, run.findings.faults
    assert run.findings.handled == run.findings.published > 250
    assert run.faults["node killed (SIGKILL)"] >= 1
