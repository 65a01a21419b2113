"""A case that runs in a process of its own: ``python -m benchmarks.X_process LOOP JOB N SERVER PID``.

It prints what it measured (a `Sample`) as one line of JSON. What ``await h()`` costs is measured in the same process,
before and after.
"""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import msgspec

from .document import ROOT
from .harness import Sample, Window
from .loops import run
from .stats import median

__all__ = [
    "BATCH",
    "CUSTOMERS",
    "PUBLISHERS",
    "UNIT",
    "Here",
    "Job",
    "Order",
    "body",
    "main",
    "noop",
    "noop_batch",
    "peer_order",
    "run_job",
    "spread",
]

UNIT = "await h() us"
BATCH, PUBLISHERS = 100, 100
CUSTOMERS = 1000
PATIENCE = 240  # seconds
T = TypeVar("T")


# -- what is sent, and what handles it


class Order(msgspec.Struct):
    id: int
    item: str
    customer: str
    amount: float
    note: str


def body(number: int, note: int = 15) -> bytes:
    """145 bytes of JSON and `note` more, or a few less."""
    return (
        f'{{"id": {number}, "item": "{"x" * 60}", "customer": "customer-{number % CUSTOMERS:06}", '
        f'"amount": 12.5, "note": "{"y" * note}"}}'
    ).encode()


def peer_order() -> Any:
    """The same message as a model of pydantic, for peers that decode by these."""
    from pydantic import create_model

    return create_model("Order", id=int, item=str, customer=str, amount=float, note=str)


async def noop(order: Order) -> None: ...


async def noop_batch(orders: list[Order]) -> None: ...


async def spread(publish: Callable[[Sequence[T]], Awaitable[None]], items: Sequence[T]) -> None:
    """Let `PUBLISHERS` tasks each publish their share."""
    await asyncio.gather(*(publish(items[place::PUBLISHERS]) for place in range(PUBLISHERS)))


# -- in the process


@dataclass(frozen=True)
class Here:
    """Where to measure. `server` says how it is reached, as the jobs understand it; `pid` is its process, 0 for one
    whose CPU is not to be read."""

    server: str
    pid: int

    def window(self) -> Window:
        return Window(self.pid or None)


Job: TypeAlias = Callable[[Here, int], Awaitable[Sample]]


async def _unit(times: int) -> float:
    """Microseconds of one ``await h()``."""
    h, order = noop, msgspec.json.decode(body(0), type=Order)
    began = time.process_time()
    for _ in itertools.repeat(None, times):
        await h(order)
    return (time.process_time() - began) / times * 1e6


async def _measured(job: Job, here: Here, count: int) -> Sample:
    """A job, with the unit beside it."""
    units = [await _unit(100_000) for _ in range(5)]
    sample = await job(here, count)
    units += [await _unit(100_000) for _ in range(5)]
    sample.extra[UNIT] = median(units)
    return sample


def main(jobs: Mapping[str, Job]) -> None:
    """Do what the command line says."""
    loop, job, count, server, pid = sys.argv[1:]
    sample = run(_measured(jobs[job], Here(server, int(pid)), int(count)), loop)
    print(msgspec.json.encode(sample).decode())


# -- from outside


def run_job(module: str, loop: str, job: str, count: int, here: Here) -> Sample:
    """Run a job of `module` in a process of its own. Raises `RuntimeError` with what it said when it failed."""
    command = [sys.executable, "-m", module, loop, job, str(count), here.server, str(here.pid)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=PATIENCE)
    if done.returncode:
        what = " ".join(command[2:6])  # without the server: its URL may have a password
        raise RuntimeError(f"{what} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Sample)
