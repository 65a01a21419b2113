"""A RabbitMQ server that goes away under a running app, or takes its queues, channels and connections away, while
messages flow through subscribers of every kind; and a process beside it, of the same group, that is killed.

    python -m tests.faults.rabbit_cuts fast|aiormq FAULTS MESSAGES [--seed N]
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import secrets
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.brokers.rabbit_broker_kit import raw
from tests.brokers.rabbit_kit import TRANSPORTS, TransportName
from tests.faults.findings import Judged, Pauses
from tests.faults.pace import Pace
from tests.faults.processes import Processes
from tests.faults.rabbit_app import DEAD, GROUP, QUEUES, RETRIES, app_of
from tests.faults.rabbit_faults import KINDS, Faults
from tests.faults.rabbit_flow import Flow
from tests.faults.rabbit_ledger import RabbitLedger, Watch, read, recording
from tests.faults.rabbit_oracle import judge
from tests.helpers import eventually
from tests.services.proxy import Proxy
from tests.services.rabbit import OwnRabbit, Rabbit

__all__ = ["RabbitCutRun", "rabbit_cut_run"]

SETTLED = 60.0  # seconds until all is handled, at the end


@dataclass(slots=True)
class RabbitCutRun:
    """`refused`: publishes that were answered by an error that says that nothing is stored, by its name.
    `slowest`: seconds until all were at work again, of each kind of fault the longest."""

    judged: Judged
    faults: Counter[str]
    kills: int
    unknown: int
    refused: Counter[str]
    unhealthy_seen: int
    slowest: dict[str, float]
    recoveries: Pauses
    seconds: float

    def __str__(self) -> str:
        judged = self.judged
        return (
            f"{dict(self.faults)} in {self.seconds:.0f} s; {judged.handled} of {judged.published} handled; "
            f"publishes refused {dict(self.refused)}, unknown {self.unknown}; repeated: {judged.causes}; "
            f"health red in {self.unhealthy_seen} faults; at work again after {self.recoveries}, "
            f"of each kind at most {self.slowest}"
        )


async def rabbit_cut_run(
    server: OwnRabbit, directory: Path, *, seed: int, messages: int, faults: int, transport: TransportName
) -> RabbitCutRun:
    """Publish `messages` while `faults` faults happen; end when all is handled and nothing is left on the server."""
    began = time.monotonic()
    ledger, watch = RabbitLedger(directory / "app.log"), Watch(directory)
    facts = server.facts
    others = Processes(
        directory, "rabbit_app", lambda path: [facts.url, facts.stream_url, transport, str(path)], called="other"
    )
    async with Proxy.to_tcp(facts.host, facts.port) as proxy, _ended(others):
        app = app_of(ledger, facts.at(proxy.host, proxy.port).url, facts.stream_url, transport)
        with recording(ledger):
            async with app.running():
                flow, pace = Flow(app), Pace(messages, faults)
                happening = Faults(app, server, proxy, others, flow, watch, random.Random(seed))
                ledger.ended = happening.look
                await others.start()
                async with asyncio.TaskGroup() as both:
                    both.create_task(flow.publish(messages, pace))
                    both.create_task(happening.run(_plan(faults, happening.chance), pace))
                await eventually(lambda: not flow.missing(watch.look()), SETTLED, "all that was published is handled")
                await others.end()
        await _nothing_left(facts)
    (directory / "fates.txt").write_text("\n".join(map(repr, happening.fates)) + "\n")
    judged = judge(read(directory), flow.published, flow.answers, happening.fates, flow.key_of)
    return RabbitCutRun(
        judged,
        happening.counts,
        sum(fate.kills for fate in happening.fates),
        flow.unknown,
        flow.refused,
        happening.red,
        {kind: round(seconds, 3) for kind, seconds in sorted(happening.recoveries, key=lambda one: one[1])},
        Pauses.of(seconds for _, seconds in happening.recoveries),
        time.monotonic() - began,
    )


@asynccontextmanager
async def _ended(others: Processes) -> AsyncIterator[None]:
    try:
        yield
    finally:
        await others.abandon()


def _plan(faults: int, chance: random.Random) -> list[str]:
    """So many of the faults that there are: each once, and the rest by weight, in any order."""
    every = [*KINDS, *(name for name, kind in KINDS.items() for _ in range(kind.weight - 1))]
    plan = [every[number % len(every)] for number in range(faults)]
    chance.shuffle(plan)
    return plan


async def _nothing_left(facts: Rabbit) -> None:
    """Nobody consumes any more: whatever was not acknowledged waits again."""
    queues = [f"{name}.{GROUP}" for name in (*QUEUES, DEAD)]
    queues += [f"{name}.dead" for name in (*QUEUES, DEAD)]  # where the server itself puts aside what it gave up on
    async with raw(facts) as other:
        for queue in queues:
            await other.left(queue, 0)
        if await other.exists(pauses := f"{RETRIES}.{GROUP}.retry.1000"):
            await other.left(pauses, 0)


def main() -> int:
    from tests.services import rabbit as services

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("transport", choices=TRANSPORTS)
    parser.add_argument("faults", type=int)
    parser.add_argument("messages", type=int)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="streamfw-rabbit-cuts-"))
    print(directory, flush=True)
    logging.basicConfig(filename=directory / "app.txt", format="%(asctime)s %(message)s")
    with services.own(services.run_directory(f"cuts-{secrets.token_hex(4)}")) as server:
        run = asyncio.run(
            rabbit_cut_run(
                server,
                directory,
                seed=given.seed,
                messages=given.messages,
                faults=given.faults,
                transport=given.transport,
            )
        )
    print(run, *run.judged.faults, sep="\n")
    return len(run.judged.faults) > 0


if __name__ == "__main__":
    sys.exit(main())
