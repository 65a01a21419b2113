"""The RabbitMQ servers that tests stand on: what their fixtures promise."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import struct
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiormq
import psutil  # type: ignore[import-untyped, unused-ignore]
import pytest
from aiormq.abc import AbstractChannel, AbstractConnection
from aiormq.exceptions import AMQPConnectionError, AMQPError, ChannelAccessRefused

from tests.services import rabbit as services
from tests.services._homes import free_port, is_free
from tests.services._rabbit_control import term
from tests.services._rabbit_root import programs
from tests.services.rabbit import OwnRabbit, Rabbit, RabbitServerError, Vhosts

ROOT = Path(__file__).parents[2]


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory that counts as the system's temporary one."""
    with tempfile.TemporaryDirectory(prefix="streamfw-test-") as name:
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)


@pytest.fixture(scope="module")
def management() -> int:
    """The port of the management plugin of `node`."""
    return free_port()


@pytest.fixture(scope="module")
def one_node(services_directory: Path, management: int) -> Iterator[OwnRabbit]:
    """A node for those tests of this module that stop it, or hurt it otherwise."""
    settings = {"management.tcp.ip": "127.0.0.1", "management.tcp.port": str(management)}
    with services.own(services_directory, settings=settings, plugins=["rabbitmq_management"]) as server:
        yield server


@pytest.fixture
def node(one_node: OwnRabbit) -> OwnRabbit:
    """It runs."""
    one_node.start()
    return one_node


alone = pytest.mark.xdist_group("rabbit-node")
"""For those that use `node`: one worker starts it."""


@asynccontextmanager
async def connected(url: str, ca: Path | None = None) -> AsyncIterator[AbstractConnection]:
    trusting = ssl.create_default_context(cafile=ca) if ca else None
    connection = await aiormq.connect(url, context=trusting)
    try:
        yield connection
    finally:
        await connection.close()


async def closed(connection: AbstractConnection) -> None:
    """Wait until the server closed it."""
    await asyncio.wait([connection.closing], timeout=10)
    assert connection.closing.done()


async def declare(connection: AbstractConnection, queue: str) -> AbstractChannel:
    """Open a channel and declare a quorum queue."""
    channel = await connection.channel()
    await channel.queue_declare(queue, durable=True, arguments={"x-queue-type": "quorum"})
    return channel


async def take(rabbit: Rabbit, queue: str) -> bytes:
    """The first message of a queue; it stays there."""
    async with connected(rabbit.url) as connection:
        channel = await connection.channel()
        got = await channel.basic_get(queue)
        return got.body


# ---------------------------------------------------------------------- the shared one


async def test_it_answers(rabbit: Rabbit) -> None:
    async with connected(rabbit.url) as connection:
        channel = await declare(connection, "q")
        await channel.basic_publish(b"hello", routing_key="q")
    assert await take(rabbit, "q") == b"hello"
    assert rabbit.at("localhost", rabbit.port).url == rabbit.url.replace("@127.0.0.1:", "@localhost:")


async def test_it_answers_over_tls_to_who_trusts_its_ca(rabbit: Rabbit) -> None:
    for url in (rabbit.tls_url, rabbit.tls_url.replace("@127.0.0.1:", "@localhost:")):
        async with connected(url, rabbit.ca) as connection:
            await connection.channel()
    with pytest.raises(ssl.SSLCertVerificationError):
        await asyncio.open_connection(rabbit.host, rabbit.tls_port, ssl=ssl.create_default_context())


async def test_it_answers_clients_of_the_stream_protocol(rabbit: Rabbit) -> None:
    reader, writer = await asyncio.open_connection(rabbit.host, rabbit.stream_port)
    request = struct.pack(">HHII", 17, 1, 7, 0)  # peer properties: version, correlation, and none of ours
    writer.write(struct.pack(">I", len(request)) + request)
    answer = await reader.readexactly(struct.unpack(">I", await reader.readexactly(4))[0])
    assert struct.unpack_from(">HHIH", answer) == (0x8000 | 17, 1, 7, 1)
    assert b"RabbitMQ" in answer
    writer.close()
    await writer.wait_closed()
    assert rabbit.stream_url.startswith("rabbitmq-stream://")
    assert rabbit.stream_url.endswith(f"@127.0.0.1:{rabbit.stream_port}/{rabbit.vhost}")


async def test_a_wrong_password_is_refused(rabbit: Rabbit) -> None:
    with pytest.raises(AMQPConnectionError, match="ACCESS_REFUSED"):
        async with connected(f"amqp://{rabbit.user}:wrong@{rabbit.host}:{rabbit.port}/{rabbit.vhost}"):
            pass


def test_passwords_are_not_shown(rabbit: Rabbit, rabbit_server: Rabbit) -> None:
    for each in (rabbit, rabbit_server):
        assert each.password
        assert each.password not in repr(each)


async def test_vhosts_are_apart(rabbit: Rabbit, vhosts: Vhosts) -> None:
    other = vhosts.create()
    assert other.vhost != rabbit.vhost
    async with connected(rabbit.url) as ours, connected(other.url) as theirs:
        for number, connection in enumerate((ours, theirs)):
            channel = await declare(connection, "same")
            await channel.basic_publish(f"{number}".encode(), routing_key="same")
        assert await take(rabbit, "same") == b"0"
        assert await take(other, "same") == b"1"
        for vhost in (other.vhost, "%2F"):
            with pytest.raises(AMQPError, match=r"Connection\.Close"):  # to Connection.Open, with 530
                async with connected(f"{rabbit.url.rpartition('/')[0]}/{vhost}"):
                    pass
        vhosts.drop(other)
        await closed(theirs)
        assert not ours.closing.done()
    with pytest.raises(AMQPConnectionError, match="ACCESS_REFUSED"):  # its user is gone too
        async with connected(other.url):
            pass


async def test_the_server_closes_the_connections_of_one_vhost(rabbit: Rabbit, vhosts: Vhosts) -> None:
    other = vhosts.create()
    async with connected(rabbit.url) as ours, connected(rabbit.url) as second, connected(other.url) as theirs:
        assert rabbit.close_connections() == 2
        await closed(ours)
        await closed(second)
        assert await theirs.channel()
        assert other.close_connections() == 1
    vhosts.drop(other)


async def test_rights_can_be_taken_and_given(rabbit: Rabbit) -> None:
    async with connected(rabbit.url) as connection:
        rabbit.permit(configure="allowed.*")
        with pytest.raises(ChannelAccessRefused):
            await declare(connection, "other")
        assert await declare(connection, "allowed-1")
        rabbit.permit()
        assert await declare(connection, "other")


def test_the_node_is_asked_by_rabbitmqctl_and_by_erlang(rabbit: Rabbit) -> None:
    assert rabbit.vhost in rabbit.ctl("list_vhosts").split()
    with pytest.raises(RabbitServerError, match=r"(?s)rabbitmqctl list_permissions failed \(\d+\): .*no such"):
        rabbit.ctl("list_permissions", "-p", "no such")
    assert rabbit.evaluate("A = 6, A * 7") == "42"
    text = 'quo"te, back\\slash, ümlaut ✓'
    assert rabbit.evaluate(f"{term(text)} =:= unicode:characters_to_binary({list(map(ord, text))})") == "true"
    with pytest.raises(RabbitServerError, match=r"\{error,badarith\}"):
        rabbit.evaluate("1 / 0")


def test_it_listens_on_loopback_only(rabbit: Rabbit) -> None:
    mine = [each for each in psutil.process_iter() if in_home(each, rabbit.home)]
    found = [address for each in mine for address in each.net_connections() if address.status == psutil.CONN_LISTEN]
    assert {rabbit.port, rabbit.tls_port, rabbit.stream_port} < {each.laddr.port for each in found}
    assert {each.laddr.ip for each in found} <= {"127.0.0.1", "::1"}


def in_home(process: psutil.Process, home: Path | None) -> bool:
    """Say whether it runs, and its HOME is this directory or below it."""
    try:
        found = Path(process.environ().get("HOME", "/"))
        return home is not None and found.is_relative_to(home) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


# ---------------------------------------------------------------------- a node of one's own


@alone
async def test_who_publishes_is_blocked_by_an_alarm_until_it_ends(node: OwnRabbit) -> None:
    async with connected(node.facts.url) as connection:
        channel = await declare(connection, "q")
        await channel.basic_publish(b"before", routing_key="q")
        node.alarm(True)
        blocked = asyncio.create_task(channel.basic_publish(b"meanwhile", routing_key="q"))
        done, _ = await asyncio.wait([blocked], timeout=0.2)
        assert not done
        node.alarm(False)
        await blocked
        assert node.facts.evaluate("rabbit_alarm:get_alarms()") == "[]"


@alone
async def test_a_frozen_node_answers_nothing_until_it_is_thawed(node: OwnRabbit) -> None:
    async with connected(node.facts.url) as connection:
        node.freeze()
        try:
            answer = asyncio.create_task(declare(connection, "q"))
            done, _ = await asyncio.wait([answer], timeout=0.2)
            assert not done
        finally:
            node.thaw()
        assert await answer


@alone
async def test_the_server_closes_all_connections(node: OwnRabbit) -> None:
    made = Vhosts(node.facts, "closing").create()
    async with connected(node.facts.url) as first, connected(made.url) as second:
        assert node.close_all_connections() == 2
        await closed(first)
        await closed(second)


def test_a_node_that_does_not_come_up_says_why(services_directory: Path) -> None:
    with (
        pytest.raises(pytest.fail.Exception, match=r"(?s)RabbitMQ ended while it started:.*no\.such\.setting"),
        services.own(services_directory, settings={"no.such.setting": "1"}),
    ):
        pass


# ---------------------------------------------------------------------- a server that the environment names


@alone
async def test_a_server_elsewhere_has_vhosts_by_its_management(
    node: OwnRabbit, management: int, monkeypatch: pytest.MonkeyPatch, temporary: Path
) -> None:
    monkeypatch.setenv("TEST_RABBITMQ_URL", node.facts.url)
    login = f"{node.facts.user}:{node.facts.password}"
    with services.shared(temporary) as server:
        assert server.url == node.facts.url
        assert Vhosts(server, "test").create() is server  # nothing makes one
        monkeypatch.setenv("TEST_RABBITMQ_MANAGEMENT_URL", f"http://{login}@127.0.0.1:{management}")
        vhosts = Vhosts(server, "test")
        made = vhosts.create()
        assert made.vhost != server.vhost
        async with connected(made.url) as connection:
            assert await declare(connection, "q")
        vhosts.drop(made)
        assert made.vhost not in node.facts.evaluate("rabbit_vhost:list_names()")
        with pytest.raises(RabbitServerError, match="404"):
            vhosts.drop(made)
        with pytest.raises(RabbitServerError, match="TEST_RABBITMQ_URL"):
            server.ctl("list_vhosts")
        monkeypatch.setenv("TEST_RABBITMQ_MANAGEMENT_URL", f"http://{login}@127.0.0.1:{free_port()}")
        with pytest.raises(RabbitServerError, match="had no answer") as raised:
            Vhosts(server, "test").create()
        assert node.facts.password not in str(raised.value)
    assert list(temporary.iterdir()) == []


def test_a_server_elsewhere_is_named_by_a_url(monkeypatch: pytest.MonkeyPatch, temporary: Path) -> None:
    for url in ("amqps://host/", "host:5672"):
        monkeypatch.setenv("TEST_RABBITMQ_URL", url)
        with pytest.raises(pytest.fail.Exception, match="amqp://user:password"), services.shared(temporary):
            pass
    monkeypatch.setenv("TEST_RABBITMQ_URL", "amqp://host")
    with services.shared(temporary) as server:
        assert server.url == "amqp://guest:guest@host:5672/%2F"
        for name in ("tls_url", "stream_url"):
            with pytest.raises(RabbitServerError, match="host:5672 was not started here: unset TEST_RABBITMQ_URL"):
                getattr(server, name)


# ---------------------------------------------------------------------- their lives


@alone
async def test_a_node_keeps_address_and_data_over_everything(node: OwnRabbit) -> None:
    async with connected(node.facts.url) as connection:
        channel = await declare(connection, "kept")
        await channel.basic_publish(b"durable", routing_key="kept")
    for end in (node.stop, node.kill):
        async with connected(node.facts.url) as connection:
            before = node.pids()
            await asyncio.to_thread(end)
            await closed(connection)
        assert is_free(node.facts.port)
        with pytest.raises(OSError):
            await asyncio.open_connection(node.facts.host, node.facts.port)
        await asyncio.to_thread(node.start)
        assert await take(node.facts, "kept") == b"durable"
        assert node.pids() != before


@alone
async def test_a_node_that_cannot_be_asked_is_stopped_by_its_pid(node: OwnRabbit) -> None:
    assert node.facts.home is not None
    (node.facts.home / "control").unlink()
    await asyncio.to_thread(node.stop)
    assert is_free(node.facts.port)


_USE = """
import sys
import msgspec
from tests.services import _rabbit_node, rabbit
choose = _rabbit_node._choose_ports
first = [msgspec.structs.replace(choose(), distribution=int(sys.argv[1]))]
_rabbit_node._choose_ports = lambda: first.pop() if first else choose()
with rabbit.shared(rabbit.run_directory("killed")) as server:
    print(server.url, flush=True)
    sys.stdin.read()
"""


def processes_in(directory: Path) -> list[str]:
    return [each.name() for each in psutil.process_iter() if in_home(each, directory)]


async def test_one_node_for_all_users_of_a_run_and_what_a_killed_run_left_is_removed_by_the_next(
    temporary: Path,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:  # a port that somebody takes meanwhile
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _USE, str(taken.getsockname()[1])),
            cwd=ROOT,
            env={**os.environ, "TMPDIR": str(temporary)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        url = (await process.stdout.readline()).decode().strip()
    with services.shared(services.run_directory("killed")) as second:
        assert second.url == url
    used = services.run_directory("next")  # while the other run lives, nothing happens
    async with connected(url) as connection:
        process.kill()
        await process.communicate()
        assert await connection.channel()
        assert {"beam.smp", "epmd"} < set(processes_in(temporary))
        assert services.run_directory("next") == used
        assert processes_in(temporary) == []
        assert [path.name for path in used.parent.iterdir()] == ["next"]
        await closed(connection)


@pytest.mark.parametrize(("lacking", "package"), [("rabbitmqctl", "rabbitmq-server"), ("erl", "erlang")])
def test_programs_that_are_missing_are_named(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, lacking: str, package: str
) -> None:
    for name in {"rabbitmq-server", "rabbitmqctl"} - {lacking}:
        (temporary / name).touch()
    monkeypatch.delenv("TEST_RABBITMQ_ROOT", raising=False)
    monkeypatch.setenv("TEST_RABBITMQ_PROGRAMS", str(temporary))
    if lacking == "erl":
        monkeypatch.setenv("PATH", str(temporary))
        monkeypatch.setattr("tests.services._rabbit_node.make_certificates", lambda where: (where / "ca.crt").touch())
    with pytest.raises(pytest.fail.Exception, match=f"apt-get install {package}"), services.own(temporary / "run"):
        pass
    assert not list(temporary.glob("run/*"))


def test_a_root_that_lacks_programs_is_named(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_RABBITMQ_ROOT", str(temporary))
    monkeypatch.setattr("os.geteuid", lambda: 0)
    said = r"lacks /usr/lib/rabbitmq/bin/rabbitmq-server, /usr/bin/erl: see scripts/rabbit-root"
    with pytest.raises(RabbitServerError, match=said):
        programs()
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(RabbitServerError, match="run the tests as root"):
        programs()


def test_a_command_has_a_node_while_it_runs(temporary: Path) -> None:
    script = 'echo said "$TEST_RABBITMQ_URL" "$0"; exit 3'
    done = subprocess.run(
        [sys.executable, "-m", "tests.services.rabbit", "run", "--", "sh", "-c", script, "<{url}?x>"],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(temporary)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (3, "")
    said, url, argument = done.stdout.split()
    assert (said, argument) == ("said", f"<{url}?x>")
    assert url.startswith("amqp://streamfw:")
    assert processes_in(temporary) == []
    assert list(temporary.glob("*/*")) == []
