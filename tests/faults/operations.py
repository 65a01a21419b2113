"""What operators and developers do to a running service while messages flow: new code by ``--reload``, a SIGHUP that
replaces its processes one by one, a SIGTERM and another start, a process that is killed."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import asyncpg
import psutil  # type: ignore[import-untyped, unused-ignore]

from streamfw.broker import Connection
from streamfw.message import Outgoing, new_message_id
from streamfw_postgres import PostgresBroker
from tests.faults.ledger import Verdict, judge
from tests.helpers import eventually

__all__ = ["OperationsRun", "reload_run", "service_run"]

ROOT = Path(__file__).resolve().parents[2]
QUEUE = "operations"
LEASE = 2.0

# A handler takes up to 20 ms; the name of a process in its ledger is the version of the code and its id.
SERVICE = """\
import asyncio, os, random
from pathlib import Path
from typing import Annotated
from streamfw import App, Attempt, Message, subscriber
from streamfw_postgres import PostgresBroker
from tests.faults.ledger import Ledger, recorded

VERSION = "@VERSION@"
ledger = Ledger(Path(os.environ["LEDGERS"]) / f"{VERSION}-{os.getpid()}.log")

@subscriber("operations", workers=8)
async def handle(body: dict, message: Message, attempt: Annotated[int, Attempt]) -> None:
    ledger.started(message.message_id, attempt)
    await asyncio.sleep(random.random() * 0.02)

broker = PostgresBroker(os.environ["URL"], lease=float(os.environ["LEASE"]), form=os.environ["FORM"])
app = App(handle, name="operations", brokers={"default": recorded(broker, ledger)})
"""


@dataclass(slots=True)
class OperationsRun:
    verdict: Verdict
    operations: Counter[str]
    seconds: float


class Service:
    """``streamfw run`` with two processes, in a directory of its own."""

    def __init__(self, url: str, directory: Path, form: str, *options: str) -> None:
        self.directory, self.options = directory, options
        self.ledgers = directory / "ledgers"
        self.ledgers.mkdir()
        self._log = directory / "log"
        self._environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith("STREAMFW_")},
            "URL": url, "LEDGERS": str(self.ledgers), "LEASE": str(LEASE), "FORM": form, "PYTHONPATH": str(ROOT),
        }  # fmt: skip
        self._process: asyncio.subprocess.Process | None = None
        self._version = 0
        self.killed: set[str] = set()
        self.deploy()

    def deploy(self) -> None:
        """Write another version of the code, in one step."""
        self._version += 1
        new = self.directory / ".service.new"
        new.write_text(SERVICE.replace("@VERSION@", f"{self._version:04}"))
        new.replace(self.directory / "service.py")

    async def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "streamfw.cli", "run", "service:app", "--workers", "2", *self.options,
                cwd=self.directory, env=self._environ, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    async def terminate(self) -> None:
        """SIGTERM: it must drain, and exit with 0."""
        assert self._process is not None
        self._process.terminate()
        code = await asyncio.wait_for(self._process.wait(), 60)
        assert code == 0, f"it ended with {code} after SIGTERM: {self.tail()}"

    async def abandon(self) -> None:
        if self._process is not None and self._process.returncode is None:
            children = psutil.Process(self._process.pid).children()
            self._process.kill()
            for child in children:
                child.kill()
            await self._process.wait()

    def working(self) -> set[str]:
        """The processes of the present code that live and have handled something."""
        assert self._process is not None
        living = {child.pid for child in psutil.Process(self._process.pid).children()}
        return {
            path.stem
            for path in self.ledgers.glob(f"{self._version:04}-*.log")
            if int(path.stem.partition("-")[2]) in living and path.stat().st_size
        }

    async def until_working(self, processes: int) -> None:
        """Wait until so many work."""
        await self._until(lambda: len(self.working()) >= processes, f"{processes} processes work")

    async def until_said(self, text: str, times: int) -> None:
        await self._until(lambda: self._log.read_text().count(text) >= times, f"said {text!r} {times} times")

    def said(self, text: str) -> int:
        return self._log.read_text().count(text)

    def kill(self, name: str) -> None:
        os.kill(int(name.partition("-")[2]), signal.SIGKILL)
        self.killed.add(name)

    async def _until(self, condition: Callable[[], object], what: str) -> None:
        try:
            await eventually(condition, 60, what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.tail()}") from None

    def tail(self) -> str:
        return self._log.read_text()[-3000:]


class Load:
    """Publishes without a break, as long as not too much waits."""

    def __init__(self, connection: Connection, watcher: asyncpg.Connection[asyncpg.Record]) -> None:
        self._connection, self._watcher = connection, watcher
        self.published: set[str] = set()
        self.enough = False

    async def waiting(self) -> int:
        count: int = await self._watcher.fetchval("select count(*) from streamfw.message")
        return count

    async def flow(self) -> None:
        """Until it is `enough`. Not cancelled: one could not tell whether what it just published is stored."""
        while not self.enough:
            if await self.waiting() < 400:
                messages = [Outgoing(name=QUEUE, body=b"{}", message_id=new_message_id()) for _ in range(40)]
                errors = await self._connection.publish(messages)
                assert not any(errors), errors
                self.published.update(message.message_id for message in messages)
            await asyncio.sleep(0.02)


@asynccontextmanager
async def _under_load(service: Service, url: str) -> AsyncIterator[Load]:
    """Messages flow while the context lasts; at its end all are handled, and the service has drained."""
    async with PostgresBroker(url, auto_migrate=True).connect() as connection:
        watcher = await asyncpg.connect(url)
        flow: asyncio.Task[None] | None = None
        try:
            load = Load(connection, watcher)
            flow = asyncio.create_task(load.flow())
            await service.start()
            yield load
            load.enough = True
            await flow
            await _emptied(load, service)
            await service.terminate()
        finally:
            if flow is not None:
                flow.cancel()
            await service.abandon()
            await watcher.close()


async def _emptied(load: Load, service: Service) -> None:
    end = time.monotonic() + 120
    while left := await load.waiting():
        assert time.monotonic() < end, f"{left} messages are left: {service.tail()}"
        await asyncio.sleep(0.05)


async def service_run(url: str, directory: Path, *, seed: int, each: int, form: str = "lease") -> OperationsRun:
    """`each` times a SIGTERM and another start, a SIGHUP after a deployment, and a killed process, in any order."""
    began, chance = time.monotonic(), random.Random(seed)
    service = Service(url, directory, form)
    kinds = [("SIGTERM", _terminate), ("SIGHUP", _hang_up), ("kill", _kill)] * each
    chance.shuffle(kinds)
    async with _under_load(service, url) as load:
        operations = await _operate(service, kinds, chance)
    return _judged(service, load, operations, form, began)


async def reload_run(url: str, directory: Path, *, seed: int, each: int, form: str = "lease") -> OperationsRun:
    """The same under ``--reload``: `each` times a change of the source, also of one that cannot be imported."""
    began, chance = time.monotonic(), random.Random(seed)
    service = Service(url, directory, form, "--reload")
    kinds = [("hot reload", _change if number % 3 else _break_and_mend) for number in range(each)]
    chance.shuffle(kinds)
    async with _under_load(service, url) as load:
        operations = await _operate(service, kinds, chance)
    return _judged(service, load, operations, form, began)


def _judged(service: Service, load: Load, operations: Counter[str], form: str, began: float) -> OperationsRun:
    assert not service.said("instead of draining"), service.tail()
    verdict = judge(service.ledgers, load.published, service.killed, counted=form == "lease")
    return OperationsRun(verdict, operations, time.monotonic() - began)


Operation = Callable[[Service, random.Random], Awaitable[None]]


async def _operate(service: Service, kinds: Sequence[tuple[str, Operation]], chance: random.Random) -> Counter[str]:
    done: Counter[str] = Counter()
    for name, operation in kinds:
        await service.until_working(2)
        await asyncio.sleep(chance.random() * 0.3)
        await operation(service, chance)
        done[name] += 1
    await service.until_working(2)
    return done


async def _terminate(service: Service, chance: random.Random) -> None:
    await service.terminate()
    await service.start()


async def _hang_up(service: Service, chance: random.Random) -> None:
    replaced = service.said("replaced 2 workers")
    service.deploy()
    service.signal(signal.SIGHUP)
    await service.until_said("replaced 2 workers", replaced + 1)


async def _kill(service: Service, chance: random.Random) -> None:
    service.kill(chance.choice(sorted(service.working())))


async def _change(service: Service, chance: random.Random) -> None:
    service.deploy()


async def _break_and_mend(service: Service, chance: random.Random) -> None:
    failed = service.said("waiting for a change in")
    (service.directory / "service.py").write_text("if True\n")
    await service.until_said("waiting for a change in", failed + 1)
    service.deploy()
