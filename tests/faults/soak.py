"""``make soak``: every fault suite at its full size, in rounds, resumable; writes ``docs/reliability/results.json``.

    python -m tests.faults.soak [--seed N] [--only SUITE] [--restart]

A round that passed is written down at once, and not run again for the same commit. A round that fails ends the soak
with what the oracle said, and its directory is kept.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from tests.brokers.rabbit_kit import TRANSPORTS
from tests.faults.cuts import cut_run
from tests.faults.findings import Judged, Pauses
from tests.faults.kafka_cuts import kafka_cut_run
from tests.faults.kafka_transactions import copy_run
from tests.faults.kills import KillRun, kill_run, poison_run
from tests.faults.ledger import Verdict
from tests.faults.operations import reload_run, service_run
from tests.faults.rabbit_cuts import rabbit_cut_run
from tests.faults.rabbit_faults import KILLED
from tests.faults.rebalance_oracle import Findings
from tests.faults.rebalances import Mode, rebalance_run
from tests.services import kafka, postgres, rabbit
from tests.services.kafka import OwnKafka
from tests.services.postgres import OwnPostgres
from tests.services.rabbit import OwnRabbit

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "reliability" / "results.json"
Counts = dict[str, Any]
Server = TypeVar("Server")
WORST = ("seconds",)
"""Counts of these names are not summed over the rounds: the largest counts."""


@dataclass(frozen=True, slots=True)
class Suite(Generic[Server]):
    """`rounds` rounds; each is given a server of its own in a directory (`server`), a directory for what is written
    down, and a seed, and answers its counts. Raises when the oracle objects."""

    name: str
    what: str
    rounds: int
    run: Callable[[Server, Path, int], Counts]
    server: Callable[[Path], AbstractContextManager[Server]]


def _postgres(directory: Path) -> AbstractContextManager[OwnPostgres]:
    return postgres.own(postgres.NEWEST, directory, fsync=True)


def _kafka(directory: Path) -> AbstractContextManager[OwnKafka]:
    return kafka.own(kafka.ONE, directory)


def _three_kafkas(directory: Path) -> AbstractContextManager[OwnKafka]:
    return kafka.own(kafka.THREE, directory)


def _rabbit(directory: Path) -> AbstractContextManager[OwnRabbit]:
    return rabbit.own(directory)


# ---------------------------------------------------------------------- Postgres


def _checked(verdict: Verdict) -> Counts:
    assert verdict.good, f"lost {verdict.lost[:5]}, strangers {verdict.strangers[:5]}, {verdict.unexplained[:5]}"
    return {"published": verdict.published, "handled": verdict.handled, "lost": 0, "duplicates": verdict.explained}


def _kills(server: OwnPostgres, directory: Path, seed: int) -> Counts:
    run: KillRun = asyncio.run(kill_run(server.facts.dsn, directory, seed=seed, messages=2_000, kills=5))
    return {"kills": run.kills, **_checked(run.verdict)}


def _lock_kills(server: OwnPostgres, directory: Path, seed: int) -> Counts:
    form = ("rowlock", "journal")[seed % 2]
    run = asyncio.run(kill_run(server.facts.dsn, directory, seed=seed, messages=2_000, kills=5, form=form))
    return {"kills": run.kills, **_checked(run.verdict)}


def _lock_poison(server: OwnPostgres, directory: Path, seed: int) -> Counts:
    return _poison(server, directory, seed, "rowlock")


def _poison(server: OwnPostgres, directory: Path, seed: int, form: str = "lease") -> Counts:
    run = asyncio.run(poison_run(server.facts.dsn, directory, form=form))
    assert run.dead == 1, f"{run.dead} dead letters instead of one"
    return {"kills": run.kills, "dead_letters": run.dead, **_checked(run.verdict)}


def _cuts(server: OwnPostgres, directory: Path, seed: int, form: str = "lease") -> Counts:
    run = asyncio.run(cut_run(server, directory, seed=seed, messages=2_000, faults=20, form=form))
    faults = {name: run.faults[name] for name in sorted(run.faults)}
    return {"faults": faults, "outcome_unknown": run.unknown, **_checked(run.verdict)}


def _operations(server: OwnPostgres, directory: Path, seed: int) -> Counts:
    """Each form of a queue in turn."""
    form = ("lease", "rowlock")[seed % 2]
    parts = {name: directory / name for name in ("service", "reload")}
    for path in parts.values():
        path.mkdir()
    service = asyncio.run(service_run(server.facts.dsn, parts["service"], seed=seed, each=5, form=form))
    reload = asyncio.run(reload_run(server.facts.dsn, parts["reload"], seed=seed, each=5, form=form))
    faults = {**service.operations, **reload.operations}
    checked = _summed([_checked(service.verdict), _checked(reload.verdict)])
    return {"kills": faults.pop("kill"), "faults": faults, **checked}


def _lock_cuts(server: OwnPostgres, directory: Path, seed: int) -> Counts:
    return _cuts(server, directory, seed, ("rowlock", "journal")[seed % 2])


# ---------------------------------------------------------------------- Kafka


def _found(findings: Findings) -> Counts:
    return {**_judged(findings), "partitions": {"kept": findings.kept, "new": findings.new}}


def _judged(judged: Judged) -> Counts:
    assert not judged.faults, "; ".join(judged.faults)
    return {
        "published": judged.published,
        "handled": judged.handled,
        "lost": 0,
        "duplicates": judged.duplicates.total(),
        "duplicates_by_cause": dict(sorted(judged.duplicates.items())),
    }


def _seconds(**pauses: Pauses) -> Counts:
    """In milliseconds' precision: a file that people read."""
    found: Counts = {}
    for name, pause in pauses.items():
        values = {key: round(value, 3) for key, value in asdict(pause).items() if key != "count"}
        found[name] = {"seconds": values}
    return found


def _rebalances(
    server: OwnKafka, directory: Path, seed: int, messages: int = 20_000, events: int = 30, mode: Mode = "single"
) -> Counts:
    """Without a mode that is asked for, every other round lets the events overlap."""
    storm = mode == "single" and seed % 2 == 1
    run = asyncio.run(
        rebalance_run(server.facts, directory, seed=seed, messages=messages, events=events, mode=mode, storm=storm)
    )
    found = run.findings
    kill = {"repeated": sum(each.repeated for each in found.kills), "at_most": sum(each.most for each in found.kills)}
    return {
        "kills": run.events["kill"],
        "faults": {f"members that {_DID[name]}": run.events[name] for name in _DID},
        **_found(found),
        "generations": found.generations,
        "repeated_after_kills": kill,
        **_seconds(pause_of_a_member=found.pauses, pause_of_the_group=found.group_pauses),
    }


_DID = {"join": "joined", "leave": "left", "stop": "stood still past their session"}


def _harmed(server: OwnKafka, directory: Path, seed: int) -> Counts:
    run = asyncio.run(rebalance_run(server.facts, directory, seed=seed, messages=6_000, events=9, server=server))
    return {
        "kills": run.events["kill"],
        "faults": {**{f"members that {_DID[name]}": run.events[name] for name in _DID}, **run.of_server},
        **_found(run.findings),
        "generations": run.findings.generations,
    }


def _ordered(server: OwnKafka, directory: Path, seed: int) -> Counts:
    return _rebalances(server, directory, seed, messages=5_000, events=8, mode=("key", "batch")[seed % 2])


def _kafka_cuts(server: OwnKafka, directory: Path, seed: int, messages: int = 2_000, faults: int = 20) -> Counts:
    run = asyncio.run(kafka_cut_run(server, directory, seed=seed, messages=messages, faults=faults))
    return {
        "faults": {name: run.faults[name] for name in sorted(run.faults)},
        "outcome_unknown": run.unknown,
        **_found(run.findings),
        **_seconds(at_work_again=run.recoveries),
    }


def _transactions(server: OwnKafka, directory: Path, seed: int) -> Counts:
    run = asyncio.run(copy_run(server.facts, seed=seed, messages=4_000, kills=8, batch=(0, 20)[seed % 2]))
    assert not run.lost, f"{len(run.lost)} lost, for example {run.lost[:3]}"
    assert not run.twice, f"{len(run.twice)} seen twice, for example {run.twice[:3]}"
    faults = {"members that joined and left": run.visits}
    counts = {"kills": run.kills, "faults": faults, "published": run.messages, "handled": len(run.seen)}
    return {**counts, "lost": 0, "duplicates": 0}


# ---------------------------------------------------------------------- RabbitMQ


def _rabbit_cuts(server: OwnRabbit, directory: Path, seed: int) -> Counts:
    """Each transport in turn."""
    transport = TRANSPORTS[seed % 2]
    run = asyncio.run(rabbit_cut_run(server, directory, seed=seed, messages=10_000, faults=20, transport=transport))
    counts = {
        "kills": run.kills,
        "faults": {name: run.faults[name] for name in sorted(run.faults) if not name.startswith(KILLED)},
        "outcome_unknown": run.unknown,
        **_judged(run.judged),
        **_seconds(at_work_again=run.recoveries),
    }
    assert run.recoveries.longest <= AT_WORK, f"not within {AT_WORK} s: {run.slowest}"
    return counts


AT_WORK = 5.0  # seconds from when the server takes connections until every subscriber has handled a fresh message


SUITES: tuple[Suite[Any], ...] = (
    Suite(
        "postgres-lease-kills", "worker processes killed with SIGKILL while 20,000 messages flow", 10, _kills, _postgres
    ),
    Suite("postgres-lease-poison", "one message in 1,000 that kills its process, attempts=3", 3, _poison, _postgres),
    Suite(
        "postgres-rowlock-kills",
        "the same by row locks, every other round with attempts counted",
        10,
        _lock_kills,
        _postgres,
    ),
    Suite(
        "postgres-rowlock-poison",
        "the same by row locks: one message that kills its process",
        3,
        _lock_poison,
        _postgres,
    ),
    Suite(
        "operations",
        "a service reloaded, restarted, replaced and killed under load, 20 times each",
        4,
        _operations,
        _postgres,
    ),
    Suite("postgres-lease-cuts", "connections, backends and the server cut under a running app", 10, _cuts, _postgres),
    Suite(
        "postgres-rowlock-cuts",
        "the same by row locks, every other round with attempts counted",
        10,
        _lock_cuts,
        _postgres,
    ),
    Suite(
        "kafka-rebalances",
        "members of a group that join, leave, are killed and stand still, 300 events while 200,000 messages flow",
        10,
        _rebalances,
        _kafka,
    ),
    Suite("kafka-order", "the same with messages ordered by key, or in batches, in turn", 4, _ordered, _kafka),
    Suite(
        "kafka-coordinator",
        "members that come and go, while the one of three servers that coordinates their group is lost or away",
        5,
        _harmed,
        _three_kafkas,
    ),
    Suite(
        "kafka-transactions",
        "copiers from topic to topic in transactions, killed, while others join their group and leave it; every other "
        "round in batches",
        5,
        _transactions,
        _kafka,
    ),
    Suite("kafka-cuts", "connections and the one server cut under a running app", 5, _kafka_cuts, _kafka),
    Suite(
        "kafka-node-loss",
        "one server of three lost, or away for a while, under a running app",
        5,
        partial(_kafka_cuts, messages=1_000, faults=6),
        _three_kafkas,
    ),
    Suite(
        "rabbit-cuts",
        "a server, its connections, channels and queues cut under a running app with subscribers of every kind, and a "
        "process beside it killed, 200 faults while 100,000 messages flow; either transport in turn",
        10,
        _rabbit_cuts,
        _rabbit,
    ),
)


def _commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    # What the results themselves change does not make another program of it.
    changed = git("status", "--porcelain", "--", ".", ":!docs/reliability")
    return git("log", "-1", "--format=%H", "--", ".", ":!docs/reliability") + ("+changes" if changed else "")


def _read() -> dict[str, Any]:
    if RESULTS.exists():
        document: dict[str, Any] = json.loads(RESULTS.read_text())
        return document
    return {"schema": 1, "suites": {}}


def _write(document: dict[str, Any]) -> None:
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")


def _summed(rounds: list[Counts]) -> Counts:
    total: Counts = {}
    for counts in rounds:
        for name, value in counts.items():
            if name in WORST:
                known = total.setdefault(name, {})
                total[name] = {each: max(known.get(each, 0.0), most) for each, most in value.items()}
            elif isinstance(value, dict):
                total[name] = _summed([total.get(name, {}), value])
            else:
                total[name] = total.get(name, 0) + value
    return total


def _run_suite(suite: Suite[Any], document: dict[str, Any], commit: str, seed: int, restart: bool) -> None:
    known = document["suites"].get(suite.name, {})
    rounds: list[Counts] = known.get("rounds", [])
    if restart or known.get("commit") != commit or known.get("seed") != seed:
        rounds = []
    for number in range(len(rounds), suite.rounds):
        began = time.monotonic()
        directory = Path(tempfile.mkdtemp(prefix=f"streamfw-soak-{suite.name}-{number}-"))
        with suite.server(postgres.run_directory(f"soak-{suite.name}")) as server:
            counts = suite.run(server, directory, seed * 1000 + number)
        rounds.append(counts)
        print(f"{suite.name} {number + 1}/{suite.rounds}: {counts} in {time.monotonic() - began:.0f} s", flush=True)
        document["suites"][suite.name] = {
            "what": suite.what,
            "commit": commit,
            "seed": seed,
            "complete": len(rounds) == suite.rounds,
            "date": datetime.now(UTC).date().isoformat(),
            "python": platform.python_version(),
            "rounds": rounds,
            "total": _summed(rounds),
        }
        _write(document)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=[suite.name for suite in SUITES])
    parser.add_argument("--restart", action="store_true", help="forget the rounds that passed")
    arguments = parser.parse_args()
    document, commit = _read(), _commit()
    for suite in SUITES:
        if arguments.only in (None, suite.name):
            _run_suite(suite, document, commit, arguments.seed, arguments.restart)
    return 0


if __name__ == "__main__":
    sys.exit(main())
