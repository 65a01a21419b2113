"""The servers that tests stand on: what their fixtures promise."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import psutil  # type: ignore[import-untyped, unused-ignore]
import pytest

from tests.helpers import eventually
from tests.services import postgres as services
from tests.services.postgres import NEWEST, OLDEST, Databases, OwnPostgres, Postgres

ROOT = Path(__file__).parents[2]


@pytest.fixture
def open_directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary directory that every account can enter, and that counts as the system's."""
    with tempfile.TemporaryDirectory(prefix="streamfw-test-") as name:
        path = Path(name)
        path.chmod(0o755)
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield path


async def ask(server: Postgres, query: str) -> object:
    connection = await server.connect()
    try:
        return await connection.fetchval(query)
    finally:
        await connection.close()


# ---------------------------------------------------------------------- the shared ones


async def test_the_newest_is_reached_by_socket_and_tcp(database: Postgres) -> None:
    assert database.host == str(database.sockets)
    assert int(str(await ask(database, "show server_version_num"))) >= 180000
    for way in (database, database.over_tcp(), database.over_tcp().over_socket()):
        assert await ask(way, "select current_database()") == database.database
    assert await ask(database.over_tcp(), "select host(inet_server_addr())") == "127.0.0.1"
    assert database.named("postgres").database == "postgres"


async def test_shared_servers_do_not_wait_for_the_disk_and_decode_their_log(
    database: Postgres, database15: Postgres
) -> None:
    for each in (database, database15):
        assert await ask(each, "show fsync") == "off"
        assert await ask(each, "show wal_level") == "logical"


async def test_databases_are_new_and_their_own(databases: Databases) -> None:
    first, second = databases.create(), databases.create()
    assert first.database != second.database
    await ask(first, "create table t as select 1")
    assert await ask(second, "select to_regclass('t')") is None
    for each in (first, second):
        databases.drop(each)


async def test_a_database_is_dropped_with_what_is_connected_to_it(databases: Databases) -> None:
    made = databases.create()
    connection = await made.connect()
    await connection.execute("begin; create table t (x int)")
    databases.drop(made)
    await eventually(connection.is_closed)
    with pytest.raises(asyncpg.InvalidCatalogNameError):
        await made.connect()


def test_the_password_is_not_shown(postgres: Postgres, postgres15: Postgres) -> None:
    for each in (postgres, postgres15):
        assert each.password
        assert each.password not in repr(each)
        assert each.password in each.dsn


async def test_the_oldest_is_reached_over_tls_verified(database15: Postgres) -> None:
    assert int(str(await ask(database15, "show server_version_num"))) // 10000 == 15
    assert await ask(database15, "select ssl from pg_stat_ssl where pid = pg_backend_pid()") is True
    assert "sslmode=verify-full" in database15.dsn
    assert await ask(database15.over_socket(), "select ssl from pg_stat_ssl where pid = pg_backend_pid()") is False


async def test_the_oldest_refuses_tcp_without_tls_and_is_not_trusted_without_its_ca(database15: Postgres) -> None:
    plain = f"postgresql://postgres:{database15.password}@localhost:{database15.port}/{database15.database}"
    with pytest.raises(asyncpg.InvalidAuthorizationSpecificationError, match="no encryption"):
        await asyncpg.connect(plain, ssl=False)
    with pytest.raises(ssl.SSLCertVerificationError):
        await asyncpg.connect(plain, ssl=ssl.create_default_context())


# ---------------------------------------------------------------------- a server of one's own


async def test_a_server_of_ones_own_keeps_address_and_data_over_everything(own_postgres: OwnPostgres) -> None:
    facts = own_postgres.facts
    await ask(facts, "create table t as select 42 as answer")
    for end in (own_postgres.stop, own_postgres.kill, own_postgres.crash):
        connection = await facts.connect()
        end()
        await eventually(connection.is_closed)
        with pytest.raises(OSError):
            await facts.connect()
        own_postgres.start()
        assert await ask(facts, "select answer from t") == 42
        assert await ask(facts.over_tcp(), "select answer from t") == 42
    own_postgres.restart()
    assert await ask(facts, "select answer from t") == 42


async def test_a_frozen_server_answers_nothing_until_it_is_thawed(own_postgres: OwnPostgres) -> None:
    connection = await own_postgres.facts.connect()
    own_postgres.freeze()
    answer = asyncio.create_task(connection.fetchval("select 1"))
    main = psutil.Process(own_postgres.server.pid())
    await eventually(lambda: {process.status() for process in (main, *main.children())} == {psutil.STATUS_STOPPED})
    assert not answer.done()
    own_postgres.thaw()
    assert await answer == 1
    await connection.close()


async def test_a_server_may_be_left_frozen(services_directory: Path) -> None:
    with services.own(NEWEST, services_directory) as server:
        server.freeze()
        home = server.server.home
    assert not home.exists()


async def test_a_durable_server_syncs(own_durable_postgres: OwnPostgres) -> None:
    assert await ask(own_durable_postgres.facts, "show fsync") == "on"
    assert await ask(own_durable_postgres.facts, "show full_page_writes") == "on"


async def test_settings_of_ones_own(services_directory: Path) -> None:
    with services.own(OLDEST, services_directory, settings={"max_connections": "17"}) as server:
        assert await ask(server.facts, "show max_connections") == "17"


# ---------------------------------------------------------------------- their lives


async def test_one_server_for_all_users_that_the_last_removes(open_directory: Path) -> None:
    with services.shared(NEWEST, open_directory / "run") as first:
        with services.shared(NEWEST, open_directory / "run") as second:
            assert first == second
        assert await ask(first, "select 1") == 1
    assert list(open_directory.iterdir()) == []


_USE = """
import sys, pathlib
from tests.services import postgres as services
with services.shared(services.NEWEST, services.run_directory("killed")) as server:
    print(server.sockets, flush=True)
    sys.stdin.read()
"""


async def test_what_a_killed_run_left_is_removed_by_the_next(open_directory: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _USE),
        cwd=ROOT,
        env={"TMPDIR": str(open_directory), "PYTHONPATH": ":".join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    sockets = Path((await process.stdout.readline()).decode().strip())
    used = services.run_directory("next")  # while the other run lives, nothing happens
    assert sockets.is_dir()
    process.kill()
    await process.communicate()
    assert sockets.is_dir()
    assert services.run_directory("next") == used
    assert [path.name for path in used.parent.iterdir()] == ["next"]


async def test_a_port_that_somebody_took_meanwhile(
    open_directory: Path, monkeypatch: pytest.MonkeyPatch, postgres: Postgres
) -> None:
    ports = iter((postgres.port, services.free_port()))
    monkeypatch.setattr(services, "free_port", lambda: next(ports))
    with services.shared(NEWEST, open_directory / "run") as server:
        assert server.port != postgres.port
        assert await ask(server.over_tcp(), "select 1") == 1


def test_programs_that_are_missing_fail_the_run(open_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_POSTGRES15_PROGRAMS", str(open_directory))
    with (
        pytest.raises(pytest.fail.Exception, match="apt-get install postgresql"),
        services.shared(OLDEST, open_directory / "run"),
    ):
        pass
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with (
        pytest.raises(pytest.fail.Exception, match=r"pip install 'streamfw\[embedded\]'"),
        services.shared(NEWEST, open_directory / "run"),
    ):
        pass
