"""Reading and filling a Kafka topic, against what one would write by hand with the same client."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.harness import Case, Goal, Scenario
from benchmarks.process import BATCH, PUBLISHERS, UNIT, Here, body, run_job
from benchmarks.topic import FILLED, PARTITIONS, RECORDS, server, version

__all__ = ["scenario"]

PEER_RECORDS, PUBLISHED = 5_000, 20_000
HAND = "by hand: getmany, decode, await, commit each second"
HAND_LISTS = f"by hand, lists of {BATCH}"
SEND = f"by hand, send_and_wait by {PUBLISHERS} tasks"
PEER = "FastStream, AckPolicy.ACK"


def scenario(loop: str) -> Scenario:
    """The scenario on one loop."""
    facts = {"records": f"{RECORDS:,} of {len(body(RECORDS - 1))} bytes", "partitions": str(PARTITIONS)}

    @contextmanager
    def cases() -> Iterator[Sequence[Case]]:
        with server() as running:
            facts["Kafka"] = version()
            yield _Bench(Here(running.facts.bootstrap, running.pids()[1]), loop).cases()

    return Scenario(
        name="kafka",
        title="Reading and filling a Kafka topic",
        about=(
            f"One Kafka node in KRaft mode; {RECORDS:,} records of 160 bytes of JSON in {PARTITIONS} partitions, in "
            f"batches of {FILLED // 1024} KiB, read by a new group in each run. Each run is a process of its own, and "
            "`await h()` is measured in it. By hand: aiokafka with the broker's own options. A window ends with the "
            "last commit. CPU us is the reading (or publishing) process, server CPU the node, a message; `over` and "
            f"`client` count the former. FastStream reads {PEER_RECORDS:,} of the records."
        ),
        cases=cases,
        unit=UNIT,
        facts=facts,
    )


@dataclass(frozen=True)
class _Bench:
    here: Here
    loop: str

    def cases(self) -> list[Case]:
        def over(at_most: float, reference: str = HAND) -> list[Goal]:
            return [
                Goal(measure="over", reference=reference, at_most=at_most),
                Goal(measure="client", reference=PEER, at_most=0.05),
            ]

        published = [Goal(measure="client", reference=SEND), Goal(measure="speed", reference=SEND)]
        return [
            self._case(HAND, "hand"),
            self._case("app, workers=1", "one", over(10)),
            self._case("app, workers=8", "eight", over(10)),
            self._case("app, keyed lanes, workers=8", "keys", over(12)),
            self._case(HAND_LISTS, "lists"),
            self._case(f"app, batches of {BATCH}", "batches", over(3, HAND_LISTS)),
            self._case(PEER, "peer", count=PEER_RECORDS),
            self._case(SEND, "send", count=PUBLISHED),
            self._case(f"app, single publishes by {PUBLISHERS} tasks", "publish", published, PUBLISHED),
        ]

    def _case(self, name: str, job: str, goals: Sequence[Goal] = (), count: int = RECORDS) -> Case:
        return Case(
            name=name,
            count=count,
            run=lambda n: run_job("benchmarks.kafka_process", self.loop, job, n, self.here),
            goals=goals,
        )
