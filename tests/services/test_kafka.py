"""The Kafka servers that tests stand on: what their fixtures promise."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import psutil  # type: ignore[import-untyped, unused-ignore]
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaConnectionError, TopicAlreadyExistsError
from aiokafka.structs import TopicPartition

from tests.helpers import eventually, eventually_blocking
from tests.services import _kafka_java
from tests.services import kafka as services
from tests.services._homes import free_port
from tests.services.kafka import ONE, Kafka, OwnKafka

ROOT = Path(__file__).parents[2]
MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory that counts as the system's temporary one."""
    with tempfile.TemporaryDirectory(prefix="streamfw-test-") as name:
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)


def new_name() -> str:
    return f"services-{secrets.token_hex(4)}"


@asynccontextmanager
async def admin(bootstrap: str, **options: object) -> AsyncIterator[AIOKafkaAdminClient]:
    client = AIOKafkaAdminClient(bootstrap_servers=bootstrap, **options)
    try:
        await client.start()
        yield client
    finally:
        await client.close()


def login(kafka: Kafka, mechanism: str, password: str | None = None) -> dict[str, str]:
    user = kafka.logins[mechanism]
    return {
        "sasl_mechanism": mechanism,
        "sasl_plain_username": user.user,
        "sasl_plain_password": password or user.password,
    }


async def write(bootstrap: str, topic: str, *values: bytes) -> None:
    async with AIOKafkaProducer(bootstrap_servers=bootstrap, enable_idempotence=True) as producer:
        for value in values:
            await producer.send_and_wait(topic, value, partition=0)


async def read(bootstrap: str, topic: str, count: int) -> list[bytes]:
    """The first records of partition 0."""
    found: list[bytes] = []
    async with AIOKafkaConsumer(bootstrap_servers=bootstrap) as consumer:
        partition = TopicPartition(topic, 0)
        consumer.assign([partition])
        await consumer.seek_to_beginning(partition)
        while len(found) < count:
            found.append((await consumer.getone()).value)
    return found


# ---------------------------------------------------------------------- the shared one


async def test_it_answers_without_a_login(kafka: Kafka) -> None:
    async with admin(kafka.bootstrap) as client:
        assert (await client.describe_cluster())["controller_id"] == 1
    assert kafka.url == f"kafka://{kafka.bootstrap}"


async def test_it_answers_over_tls_to_who_trusts_its_ca(kafka: Kafka) -> None:
    for name in (kafka.tls, kafka.tls.replace("127.0.0.1", "localhost")):
        trusting = ssl.create_default_context(cafile=kafka.ca)
        async with admin(name, security_protocol="SSL", ssl_context=trusting) as client:
            assert (await client.describe_cluster())["brokers"]
    host, port = kafka.tls.split(":")
    with pytest.raises(ssl.SSLCertVerificationError):
        await asyncio.open_connection(host, int(port), ssl=ssl.create_default_context())


@pytest.mark.parametrize("mechanism", MECHANISMS)
async def test_it_answers_to_who_logs_in(kafka: Kafka, mechanism: str, caplog: pytest.LogCaptureFixture) -> None:
    trusting = ssl.create_default_context(cafile=kafka.ca)
    plain = {"security_protocol": "SASL_PLAINTEXT"}
    encrypted = {"security_protocol": "SASL_SSL", "ssl_context": trusting}
    for bootstrap, options in ((kafka.sasl, plain), (kafka.sasl_tls, encrypted)):
        async with admin(bootstrap, **options, **login(kafka, mechanism)) as client:
            assert (await client.describe_cluster())["brokers"]
        caplog.clear()
        with pytest.raises(KafkaConnectionError):
            async with admin(bootstrap, **options, **login(kafka, mechanism, "wrong")):
                pass
        assert "AuthenticationFailed" in caplog.text


async def test_passwords_are_not_shown(kafka: Kafka) -> None:
    assert {login.mechanism for login in kafka.logins.values()} == set(MECHANISMS)
    for each in kafka.logins.values():
        assert each.password
        assert each.password not in repr(kafka)
        assert each.password not in repr(each)


async def test_topics_are_made_as_asked_and_only_on_request(kafka: Kafka) -> None:
    name = await kafka.create_topic(new_name(), partitions=3, cleanup_policy="compact")
    with pytest.raises(TopicAlreadyExistsError):
        await kafka.create_topic(name)
    async with admin(kafka.bootstrap) as client:
        (made,) = await client.describe_topics([name])
        assert len(made["partitions"]) == 3
        missing = new_name()
        await client.describe_topics([missing])
        assert missing not in await client.list_topics()
    assert await kafka.leader(name, 2) == 1
    assert await kafka.coordinator(new_name()) == 1


def record_of(output: bytes) -> Mapping[str, object]:
    found: Mapping[str, object] = json.loads(output.splitlines()[-1])
    return found


async def test_the_java_tools_are_there(kafka: Kafka) -> None:
    topic = await kafka.create_topic(new_name(), partitions=1)
    told = ("--bootstrap-server", kafka.bootstrap, "--topic", topic)
    done = await asyncio.to_thread(
        services.java_tool, "org.apache.kafka.tools.ConsoleProducer", *told, input=b"from Java\n"
    )
    assert done.returncode == 0, done.stderr
    assert await read(kafka.bootstrap, topic, 1) == [b"from Java"]


# ---------------------------------------------------------------------- a server of one's own


async def test_a_server_of_ones_own_keeps_address_and_data_over_everything(own_kafka: OwnKafka) -> None:
    facts = own_kafka.facts
    topic = await facts.create_topic("kept", partitions=1)
    values: list[bytes] = []
    for end in (own_kafka.stop, own_kafka.kill):
        values.append(end.__name__.encode())
        await write(facts.bootstrap, topic, values[-1])
        end()
        assert own_kafka.pids() == {}
        with pytest.raises(KafkaConnectionError):
            await facts.leader(topic)
        own_kafka.start()
        assert await read(facts.bootstrap, topic, len(values)) == values
    before = own_kafka.pids()
    own_kafka.restart()
    assert own_kafka.pids().keys() == before.keys()
    assert own_kafka.pids() != before
    assert await read(facts.bootstrap, topic, len(values)) == values


async def test_a_frozen_node_answers_nothing_until_it_is_thawed(own_kafka: OwnKafka) -> None:
    facts = own_kafka.facts
    async with admin(facts.bootstrap) as client:
        await client.describe_cluster()
        own_kafka.freeze()
        main = psutil.Process(own_kafka.pids()[1])
        await eventually(lambda: main.status() == psutil.STATUS_STOPPED)
        answer = asyncio.create_task(client.describe_cluster())
        done, _ = await asyncio.wait([answer], timeout=0.1)
        assert not done
        own_kafka.thaw()
        assert (await answer)["brokers"]


async def test_clients_come_by_way_of_a_proxy(own_kafka: OwnKafka) -> None:
    facts = own_kafka.facts
    topic = await facts.create_topic("far", partitions=1)
    (proxy,) = own_kafka.proxies()
    async with proxy:
        assert facts.proxied_url == f"kafka://{proxy.host}:{proxy.port}"
        async with AIOKafkaProducer(bootstrap_servers=facts.proxied) as producer:
            await producer.send_and_wait(topic, b"one")
            assert proxy.accepted >= 2  # the first to ask for the brokers, the next to the one it was told
            proxy.cut()
            await producer.send_and_wait(topic, b"two")
        assert await read(facts.bootstrap, topic, 2) == [b"one", b"two"]


async def test_a_server_may_have_settings_of_its_own_and_be_left_frozen(services_directory: Path) -> None:
    with services.own(ONE, services_directory, settings={"auto.create.topics.enable": "true"}) as server:
        await write(server.facts.bootstrap, "made", b"by writing")
        server.freeze()
        pids = server.pids().values()
        assert pids
    assert not server.home.exists()
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_server_that_does_not_come_up_says_why(services_directory: Path) -> None:
    with (
        pytest.raises(pytest.fail.Exception, match=r"(?s)node 1 ended while it started:.*no\.such\.Reporter"),
        services.own(ONE, services_directory, settings={"metric.reporters": "no.such.Reporter"}),
    ):
        pass


# ---------------------------------------------------------------------- three nodes


async def test_three_nodes_serve_while_one_is_lost(own_kafka_cluster: OwnKafka) -> None:
    facts = own_kafka_cluster.facts
    topic = await facts.create_topic("kept", partitions=1)
    await write(facts.bootstrap, topic, b"by three")
    lost = await facts.leader(topic)
    own_kafka_cluster.kill(lost)
    assert own_kafka_cluster.pids().keys() == {1, 2, 3} - {lost}
    await write(facts.bootstrap, topic, b"by two")
    assert await facts.leader(topic) != lost
    own_kafka_cluster.start(lost)
    own_kafka_cluster.stop(await facts.leader(topic))
    assert len(own_kafka_cluster.pids()) == 2
    assert await read(facts.bootstrap, topic, 2) == [b"by three", b"by two"]
    assert await facts.coordinator("a group") in own_kafka_cluster.pids()


# ---------------------------------------------------------------------- their lives


async def test_one_server_for_all_users_that_the_last_removes(temporary: Path) -> None:
    with services.shared(ONE, temporary / "run") as first:
        with services.shared(ONE, temporary / "run") as second:
            assert first == second
        async with admin(first.bootstrap) as client:
            assert (await client.describe_cluster())["brokers"]
    assert list(temporary.iterdir()) == []


_USE = """
import sys
from tests.services import kafka as services
with services.shared(services.ONE, services.run_directory("killed")) as server:
    print(server.bootstrap, flush=True)
    sys.stdin.read()
"""


def nodes_in(directory: Path, main_class: str = "") -> list[int]:
    """The processes of the nodes whose homes are below it; only those that run this class, if one is given."""
    lines = [(each.pid, each.info["cmdline"] or []) for each in psutil.process_iter(["cmdline"])]
    ours = [(pid, words) for pid, words in lines if any(word.startswith(f"{directory}/") for word in words)]
    return [pid for pid, words in ours if not main_class or main_class in words]


async def use_in(temporary: Path) -> asyncio.subprocess.Process:
    """A process that uses the shared server of the run ``killed``."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _USE),
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(temporary)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


@pytest.mark.parametrize("main_class", ["kafka.tools.StorageTool", "kafka.Kafka"])
async def test_a_worker_that_is_killed_while_it_starts_the_server(temporary: Path, main_class: str) -> None:
    process = await use_in(temporary)
    await eventually(lambda: nodes_in(temporary, main_class), deadline=30.0)
    process.kill()
    await process.communicate()
    with services.shared(ONE, services.run_directory("killed")) as server:
        async with admin(server.bootstrap) as client:
            assert (await client.describe_cluster())["brokers"]
        assert len(nodes_in(temporary, "kafka.Kafka")) == 1
    await eventually(lambda: nodes_in(temporary) == [])


async def test_what_a_killed_run_left_is_removed_by_the_next(temporary: Path) -> None:
    process = await use_in(temporary)
    assert process.stdout is not None
    assert (await process.stdout.readline()).startswith(b"127.0.0.1:")
    used = services.run_directory("next")  # while the other run lives, nothing happens
    assert len(nodes_in(temporary)) == 1
    process.kill()
    await process.communicate()
    assert len(nodes_in(temporary)) == 1
    assert services.run_directory("next") == used
    assert [path.name for path in used.parent.iterdir()] == ["next"]
    assert nodes_in(temporary) == []


async def test_a_port_that_somebody_took_meanwhile(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, kafka: Kafka
) -> None:
    taken = int(kafka.bootstrap.rpartition(":")[2])
    first = iter([taken])
    monkeypatch.setattr("tests.services._kafka_cluster.free_port", lambda: next(first, None) or free_port())
    with services.shared(ONE, temporary / "run") as server:
        assert str(taken) not in f"{server}"
        async with admin(server.bootstrap) as client:
            assert (await client.describe_cluster())["brokers"]


# ---------------------------------------------------------------------- what it is made of


def test_java_and_maven_that_are_missing_are_named(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(missing: str, name: str) -> str | None:
        return None if name == missing else which(name)

    which = shutil.which
    monkeypatch.setattr(_kafka_java, "CACHE", temporary / "cache")
    for missing, package in (("java", "default-jre-headless"), ("mvn", "maven")):
        monkeypatch.setattr(shutil, "which", lambda name, missing=missing: without(missing, name))
        with (
            pytest.raises(pytest.fail.Exception, match=f"apt-get install {package}"),
            services.shared(ONE, temporary / "run"),
        ):
            pass
        with pytest.raises(pytest.fail.Exception, match=f"apt-get install {package}"):
            services.java_tool("org.apache.kafka.tools.ConsoleProducer")


def test_a_java_that_is_too_old_is_named(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = temporary / "java"
    old.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\"' >&2\n")
    old.chmod(0o755)
    monkeypatch.setenv("PATH", str(temporary), prepend=os.pathsep)
    with pytest.raises(pytest.fail.Exception, match=r"Java 17 or later, and .*11\.0\.2"):
        services.java_tool("org.apache.kafka.tools.ConsoleProducer")


def test_maven_that_fails_says_so_and_leaves_nothing_half_done(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maven = temporary / "mvn"
    maven.write_text("#!/bin/sh\necho 'no such artifact'; exit 1\n")
    maven.chmod(0o755)
    monkeypatch.setattr(_kafka_java, "CACHE", temporary / "cache")
    monkeypatch.setenv("PATH", str(temporary), prepend=os.pathsep)
    with pytest.raises(pytest.fail.Exception, match="no such artifact"):
        services.java_tool("org.apache.kafka.tools.ConsoleProducer")
    assert [path.name for path in temporary.glob("cache/*/*")] == ["lock"]


# ---------------------------------------------------------------------- for a command


class Command:
    """``python -m tests.services.kafka run -- ...``, in a process of its own."""

    def __init__(self, temporary: Path, *command: str) -> None:
        self.temporary = temporary
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.services.kafka", "run", "--", *command],
            cwd=ROOT,
            env={**os.environ, "TMPDIR": str(temporary)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ended(self) -> tuple[int, str, str]:
        """Its exit code and what it said; nothing of it is left."""
        out, err = self.process.communicate(timeout=40)
        assert nodes_in(self.temporary) == []
        assert list(self.temporary.glob("*/*")) == []
        return self.process.returncode, out, err


def test_a_command_has_a_node_while_it_runs(temporary: Path) -> None:
    code, out, err = Command(temporary, "sh", "-c", 'echo "$TEST_KAFKA_URL" "$0"; exit 3', "<{url}?x>").ended()
    assert (code, err) == (3, "")
    first, second = out.split()
    assert first.startswith("kafka://127.0.0.1:")
    assert second == f"<{first}?x>"


def test_a_command_that_cannot_be_run(temporary: Path) -> None:
    code, out, err = Command(temporary, "no-such-command").ended()
    assert (code, out) == (127, "")
    assert "no-such-command" in err


@pytest.mark.parametrize(
    ("script", "number", "expected"),
    [
        ("trap 'echo caught; exit 5' INT; echo ready; while :; do sleep 0.05; done", signal.SIGINT, (5, "caught\n")),
        ("echo ready; exec sleep 100", signal.SIGTERM, (143, "")),
    ],
)
def test_a_signal_is_the_commands_and_the_node_is_stopped(
    temporary: Path, script: str, number: signal.Signals, expected: tuple[int, str]
) -> None:
    command = Command(temporary, "sh", "-c", script)
    assert command.process.stdout is not None
    assert command.process.stdout.readline() == "ready\n"
    assert len(nodes_in(temporary)) == 1
    command.process.send_signal(number)
    code, out, err = command.ended()
    assert (code, out, err) == (*expected, "")


@pytest.mark.parametrize("main_class", ["kafka.tools.StorageTool", "kafka.Kafka"])
def test_a_signal_before_the_command_runs_ends_it_all(temporary: Path, main_class: str) -> None:
    command = Command(temporary, "echo", "ran")
    eventually_blocking(lambda: nodes_in(temporary, main_class), deadline=30.0)
    command.process.send_signal(signal.SIGTERM)
    assert command.ended() == (143, "", "")
