"""Handlers with ``run_in="process"``: in child processes, which may be killed, and which no app leaves behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from streamfw import App, Batch, BuildError, Message, Next, Router, subscriber
from streamfw.memory import MemoryBroker
from streamfw.runtime.processes import Processes
from tests.helpers import eventually, eventually_blocking
from tests.unit import blocking_handlers as handlers
from tests.unit.blocking_handlers import Done, Order

ROOT = Path(__file__).parents[2]
SOON = 30.0  # seconds: an interpreter has to start, on a busy machine


@pytest.fixture(autouse=True)
def _no_process_is_left_behind() -> Iterator[None]:
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    yield
    eventually_blocking(lambda: {one.pid for one in psutil.Process().children(recursive=True)} <= before, SOON)


class Finished:
    """A handler of what the handlers publish, and what it got."""

    def __init__(self) -> None:
        self.got: list[Done] = []

        @subscriber("done")
        async def finished(done: Done) -> None:
            self.got.append(done)

        self.handler = finished

    async def wait(self, count: int) -> list[Done]:
        await eventually(lambda: len(self.got) >= count, SOON)
        return self.got


def pool(app: App) -> Processes:
    processes = app.build().offload.processes
    assert processes is not None
    return processes


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def pid_in(path: Path) -> int:
    await eventually(path.exists, SOON)
    return int(path.read_text())


async def letters(app: App, name: str, count: int = 1) -> list[str]:
    """The reasons of the dead letters at `name`, once there are so many."""
    dead = await app.connection().dead_letters(name)

    async def found() -> list[str]:
        reasons = [one.headers["streamfw-error"] for one in await dead.list()]
        return reasons if len(reasons) >= count else []

    return await eventually(found)


# ------------------------------------------------------------------ the same as any other handler


async def test_it_takes_what_a_handler_takes_in_children_that_start_once() -> None:
    done = Finished()
    async with App(handlers.everything, done.handler).running() as app:
        pids = set(pool(app).pids)
        for number in range(40):
            await app.publish("all", Order(number), key="k", headers={"tenant": "acme"}, message_id=f"m{number}")
        got = await done.wait(40)
        assert set(pool(app).pids) == pids
    assert len(pids) == 2
    assert os.getpid() not in pids
    assert {one.pid for one in got} <= pids
    one = min(got, key=lambda one: one.id)
    assert (one.attempt, one.tenant, one.key, one.message_id) == (1, "acme", "k", "m0")
    assert msgspec.json.decode(one.body) == {"id": 0, "folder": ""}


async def test_a_body_by_keyword_and_a_codec_with_a_state_of_its_own() -> None:
    done = Finished()
    app = App(handlers.by_keyword, handlers.strictly, done.handler, processes=1)
    async with app.running():
        assert len(pool(app).pids) == 1
        await app.publish("by-keyword", Order(1))
        await app.publish("strict", Order(2))
        assert sorted(one.id for one in await done.wait(2)) == [1, 2]
        await app.publish("strict", Order(3, "a" * 30))
        await eventually(lambda: app.pumps[1].counters.dead == 1)
        assert await letters(app, "strict.dead") == ["DecodeError: the body cannot be decoded: more than 30 bytes"]


async def test_outcomes_and_errors_come_back_as_what_they_are() -> None:
    async with App(handlers.outcomes).running() as app:
        for number in range(7):
            await app.publish("outcomes", Order(number))
        await app.publish("outcomes", b"{}")
        counters = app.pumps[0].counters
        await eventually(lambda: counters.dead == 5 and counters.acked == 2, SOON)
        assert counters.dropped == 1
        reasons = await letters(app, "outcomes.dead", 5)
    expected = [
        "DecodeError: the body cannot be decoded: Object missing required field `id`",
        "for a reason",
        "Custom: mine",
        "RuntimeError: Fussy: 1 and 2 (it cannot be pickled, so this stands for it)",
        "TypeError: the result, a TextIOWrapper, cannot be pickled: cannot pickle",
    ]
    missing = [text for text in expected if not any(reason.startswith(text) for reason in reasons)]
    assert missing == [], reasons


async def test_a_batch_a_bad_element_and_a_partial_failure() -> None:
    handler = as_declared(handlers.batched, "list", batch=Batch(4, wait=5), attempts=1)
    async with App(handler).running() as app:
        for body in (Order(1), Order(-2), b"{", Order(3)):
            await app.publish("list", body)
        counters = app.pumps[0].counters
        await eventually(lambda: counters.settled == 4, SOON)
        assert (counters.acked, counters.dead) == (2, 2)
        assert "Custom: -2" in await letters(app, "list.dead", 2)


async def test_a_batch_of_messages() -> None:
    handler = as_declared(handlers.of_messages, "messages", batch=Batch(2, wait=5))
    async with App(handler).running() as app:
        for number in range(2):
            await app.publish("messages", Order(number), message_id=f"m{number}")
        await eventually(lambda: app.pumps[0].counters.dead == 2, SOON)
        assert sorted(await letters(app, "messages.dead", 2)) == ["m0", "m1"]


def as_declared(handler: Any, source: str, **options: Any) -> Router:
    """`handler`, declared in another way than where it stands."""
    router = Router()
    router.subscriber(source, run_in="process", **options)(handler)
    return router


async def test_context_variables_stay_here() -> None:
    done = Finished()

    async def around(message: Message, call_next: Next) -> object:
        handlers.VARIABLE.set(5)
        return await call_next(message)

    async with App(handlers.variables, done.handler, middleware=[around]).running() as app:
        await app.publish("variables", Order(0))
        (one,) = await done.wait(1)
    assert one.pid == 0


# ------------------------------------------------------------------ children that end


async def test_a_child_that_is_killed_fails_its_message_alone(tmp_path: Path) -> None:
    async with App(handlers.stops).running() as app:
        for number in (1, 2):
            await app.publish("stops", Order(number, str(tmp_path)))
        victim, other = await pid_in(tmp_path / "runs1-1"), await pid_in(tmp_path / "runs1-2")
        assert victim != other
        os.kill(victim, signal.SIGKILL)
        assert await pid_in(tmp_path / "ended-1") != victim  # its second attempt
        assert not (tmp_path / "ended-2").exists()
        (tmp_path / "go-2").touch()
        assert await pid_in(tmp_path / "ended-2") == other
        counters = app.pumps[0].counters
        await eventually(lambda: counters.acked == 2)
        assert (counters.retried, counters.dead) == (1, 0)
        await eventually(lambda: len(pool(app).pids) == 2, SOON)
        assert victim not in pool(app).pids
        assert pool(app).deaths == 1


async def test_a_message_that_kills_its_child_each_time_goes_by_the_policy() -> None:
    async with App(handlers.kills_itself).running() as app:
        await app.publish("poison", Order(1), message_id="m1")
        counters = app.pumps[0].counters
        await eventually(lambda: counters.dead == 1, SOON)
        assert counters.retried == 1
        (reason,) = await letters(app, "poison.dead")
        assert reason.startswith("WorkerDied: the process ")
        assert reason.endswith(" of kills_itself('poison') was ended by SIGKILL")
        await eventually(lambda: pool(app).deaths == 2 and len(pool(app).pids) == 1, SOON)


async def test_children_that_die_with_nothing_to_do_cost_no_message_anything() -> None:
    done = Finished()
    async with App(handlers.everything, done.handler).running() as app:
        before = set(pool(app).pids)
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        await eventually(lambda: len(pool(app).pids) == 2 and before.isdisjoint(pool(app).pids), SOON)
        for number in range(10):
            await app.publish("all", Order(number))
        await done.wait(10)
        assert app.pumps[0].counters.retried == 0


async def test_a_timeout_kills_the_child_and_all_that_it_started(tmp_path: Path) -> None:
    handler = as_declared(handlers.overdue, "overdue", attempts=1, timeout=2.0)
    async with App(handler).running() as app:
        await app.publish("overdue", Order(1, str(tmp_path)))
        child = await pid_in(tmp_path / "runs1-1")
        grandchild = int((tmp_path / "grandchild-1").read_text())
        assert is_alive(grandchild)
        await eventually(lambda: app.pumps[0].counters.dead == 1, SOON)
        assert not is_alive(child)
        await eventually(lambda: not is_alive(grandchild))
        (reason,) = await letters(app, "overdue.dead")
        assert reason.startswith("TimeoutError")
        await eventually(lambda: len(pool(app).pids) == 1, SOON)
        assert pool(app).deaths == 0, "it was we who ended it"


async def test_a_drain_kills_what_does_not_end_and_gives_it_back(tmp_path: Path) -> None:
    broker = MemoryBroker("memory://")
    app = App(handlers.stops, brokers={"default": broker}, drain_timeout=0.05)
    async with app.running():
        await app.publish("stops", Order(1, str(tmp_path)))
        child = await pid_in(tmp_path / "runs1-1")
    assert not is_alive(child)
    (tmp_path / "runs1-1").unlink()
    (tmp_path / "go-1").touch()
    async with app.running():
        assert await pid_in(tmp_path / "ended-1") != child
        assert (tmp_path / "runs1-1").exists(), "no attempt was counted"
        await eventually(lambda: app.pumps[0].counters.acked == 1)


async def test_a_drain_lets_a_child_finish(tmp_path: Path) -> None:
    app = App(handlers.stops, drain_timeout=SOON)
    async with app.running():
        await app.publish("stops", Order(1, str(tmp_path)))
        child = await pid_in(tmp_path / "runs1-1")
        counters = app.pumps[0].counters
        asyncio.get_running_loop().call_later(0.2, (tmp_path / "go-1").touch)
    assert await pid_in(tmp_path / "ended-1") == child
    assert counters.acked == 1


async def test_the_signals_of_a_terminal_and_of_a_service_manager_do_not_reach_a_handler(tmp_path: Path) -> None:
    async with App(handlers.signalled).running() as app:
        (child,) = pool(app).pids
        assert os.getpgid(child) == child, "it has a group of its own"
        await app.publish("signalled", Order(1, str(tmp_path)))
        assert await pid_in(tmp_path / "ended-1") == child
        await eventually(lambda: app.pumps[0].counters.acked == 1)


# ------------------------------------------------------------------ starting, and the parent's end


async def test_a_child_that_cannot_import_its_handler_fails_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFUSE_TO_BE_IMPORTED", "1")
    with pytest.raises(ExceptionGroup) as caught:
        async with App(handlers.everything).running():
            pass
    (error,) = caught.value.exceptions
    assert isinstance(error, BuildError)
    assert error.where == "everything('all')"
    assert "ImportError: not in this process" in str(error)


async def test_a_child_that_ends_while_it_starts_fails_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ExceptionGroup) as caught:
        async with App(handlers.everything).running():
            pass
    (error,) = caught.value.exceptions
    assert "ended with exit code" in str(error)


HEAD = """
import os
from streamfw import App, subscriber

@subscriber("orders", run_in="process", publishes="done")
def work(order: dict[str, int]) -> dict[str, int]:
    return {"id": order["id"], "pid": os.getpid()}

@subscriber("done")
async def done(order: dict[str, int]) -> None:
    print("done", order["id"], order["pid"] != os.getpid(), flush=True)
    os.kill(os.getpid(), 15)

async def publishing(app: App):
    import asyncio
    async def publish() -> None:
        while not app.health().ok:
            await asyncio.sleep(0.01)
        await app.publish("orders", {"id": 7})
    task = asyncio.create_task(publish())
    yield
    await task

app = App(work, done, lifespan=publishing)
"""


def script(tmp_path: Path, text: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "shop.py").write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "shop.py"]
    return subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=SOON, check=False
    )


def test_handlers_of_a_script(tmp_path: Path) -> None:
    done = script(tmp_path, HEAD + 'if __name__ == "__main__":\n    app.run()\n')
    assert (done.returncode, done.stdout) == (0, "done 7 True\n"), done.stderr


def test_a_script_that_runs_its_app_when_it_is_imported(tmp_path: Path) -> None:
    done = script(tmp_path, HEAD + "app.run()\n")
    assert done.returncode == 1
    assert "belongs under `if __name__ == '__main__':`" in done.stderr


ORPHANS = """
import asyncio, sys
from streamfw import App
from tests.unit import blocking_handlers as handlers

async def main() -> None:
    async with App(handlers.hog, handlers.stops).running() as app:
        await app.publish("hog", handlers.Order(1, sys.argv[1]))
        print(*app.build().offload.processes.pids, flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


def test_no_child_outlives_its_parent_however_that_ends(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", ORPHANS, str(tmp_path)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        eventually_blocking((tmp_path / "runs1-1").exists, SOON)  # one of them never gives its interpreter away
        assert len(pids) == 3
        assert all(is_alive(pid) for pid in pids)
        parent.kill()
    eventually_blocking(lambda: not any(is_alive(pid) for pid in pids), SOON)


async def test_a_large_body_and_a_large_result_go_both_ways() -> None:
    done = Finished()
    text = "x" * 5_000_000
    async with App(handlers.everything, done.handler).running() as app:
        await app.publish("all", Order(1, text))
        (one,) = await done.wait(1)
    assert len(one.body) > 5_000_000


async def test_a_child_whose_socket_somebody_else_holds_is_found_dead(tmp_path: Path) -> None:
    """A process that a handler forked keeps the socket open, so nothing hangs up when the child dies."""
    async with App(handlers.forks, processes=1).running() as app:
        await app.publish("forks", Order(1, str(tmp_path)))
        child = await pid_in(tmp_path / "runs1-1")
        fork = int((tmp_path / "fork-1").read_text())
        try:
            os.kill(child, signal.SIGKILL)
            await eventually(lambda: app.pumps[0].counters.dead == 1, SOON)
            await eventually(lambda: len(pool(app).pids) == 1 and child not in pool(app).pids, SOON)
        finally:
            try:
                os.kill(fork, signal.SIGKILL)
            except ProcessLookupError:
                pass
