"""Fixtures for all tests: servers (see `tests.services`) and the event loop.

`--loop asyncio|uvloop` chooses the event loop of all async tests.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.services import kafka as kafka_services
from tests.services import postgres as services
from tests.services import rabbit as rabbit_services

pytest_plugins = ["tests.left_open"]

# A run in the background, or under `nohup`, ignores these; the programs that tests start would inherit it.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)

LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--loop", choices=("asyncio", "uvloop"), default="asyncio", help="event loop of the async tests")


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> Mapping[str, LoopFactory]:
    name: str = config.getoption("--loop")
    if name == "uvloop":
        import uvloop

        return {name: uvloop.new_event_loop}
    return {name: asyncio.new_event_loop}


@pytest.fixture(scope="session")
def services_directory(request: pytest.FixtureRequest) -> Path:
    """The directory of this run's servers, the same for all its workers."""
    worker: Mapping[str, str] = getattr(request.config, "workerinput", {})
    return services.run_directory(f"run-{worker.get('testrunuid', os.getpid())}")


@pytest.fixture(scope="session")
def postgres(services_directory: Path) -> Iterator[services.Postgres]:
    """The newest Postgres, shared by the whole run: it must not be stopped, and its other databases not be touched."""
    with services.shared(services.NEWEST, services_directory) as server:
        yield server


@pytest.fixture(scope="session")
def postgres15(services_directory: Path) -> Iterator[services.Postgres]:
    """Postgres 15, shared by the whole run; over TLS unless one asks for `over_socket()`."""
    with services.shared(services.OLDEST, services_directory) as server:
        yield server


@pytest.fixture(scope="session")
def databases(postgres: services.Postgres, request: pytest.FixtureRequest) -> Iterator[services.Databases]:
    """Makes databases on the newest Postgres, for a test that needs several."""
    with services.Databases(postgres, _worker(request)) as databases:
        yield databases


@pytest.fixture(scope="session")
def databases15(postgres15: services.Postgres, request: pytest.FixtureRequest) -> Iterator[services.Databases]:
    """The same on Postgres 15."""
    with services.Databases(postgres15, _worker(request)) as databases:
        yield databases


@pytest.fixture
def database(databases: services.Databases) -> Iterator[services.Postgres]:
    """A new empty database on the newest Postgres, dropped at the end of the test."""
    made = databases.create()
    yield made
    databases.drop(made)


@pytest.fixture
def database15(databases15: services.Databases) -> Iterator[services.Postgres]:
    """A new empty database on Postgres 15, dropped at the end of the test."""
    made = databases15.create()
    yield made
    databases15.drop(made)


@pytest.fixture
def own_postgres(services_directory: Path) -> Iterator[services.OwnPostgres]:
    """A server of the test's own, without fsync: to be stopped, restarted, killed and frozen."""
    with services.own(services.NEWEST, services_directory) as server:
        yield server


@pytest.fixture
def own_durable_postgres(services_directory: Path) -> Iterator[services.OwnPostgres]:
    """A server of the test's own that syncs to disk, as servers in use do."""
    with services.own(services.NEWEST, services_directory, fsync=True) as server:
        yield server


@pytest.fixture(scope="session")
def kafka(services_directory: Path) -> Iterator[kafka_services.Kafka]:
    """A Kafka node, shared by the whole run: it must not be stopped; a test makes its own topics and groups."""
    with kafka_services.shared(kafka_services.ONE, services_directory) as server:
        yield server


@pytest.fixture
def own_kafka(services_directory: Path) -> Iterator[kafka_services.OwnKafka]:
    """A Kafka node of the test's own: to be stopped, restarted, killed and frozen."""
    with kafka_services.own(kafka_services.ONE, services_directory) as server:
        yield server


@pytest.fixture
def own_kafka_cluster(services_directory: Path) -> Iterator[kafka_services.OwnKafka]:
    """Three Kafka nodes of the test's own, which keep every topic on all of them."""
    with kafka_services.own(kafka_services.THREE, services_directory) as server:
        yield server


@pytest.fixture(scope="session")
def rabbit_server(services_directory: Path) -> Iterator[rabbit_services.Rabbit]:
    """A RabbitMQ node, shared by the whole run: it must not be stopped, and its other vhosts not be touched."""
    with rabbit_services.shared(services_directory) as server:
        yield server


@pytest.fixture(scope="session")
def vhosts(rabbit_server: rabbit_services.Rabbit, request: pytest.FixtureRequest) -> rabbit_services.Vhosts:
    """Makes vhosts on the shared RabbitMQ node, for a test that needs several."""
    return rabbit_services.Vhosts(rabbit_server, _worker(request))


@pytest.fixture
def rabbit(vhosts: rabbit_services.Vhosts) -> Iterator[rabbit_services.Rabbit]:
    """A new empty vhost on the shared RabbitMQ node, and its user; deleted at the end of the test."""
    made = vhosts.create()
    yield made
    vhosts.drop(made)


@pytest.fixture
def own_rabbit(services_directory: Path) -> Iterator[rabbit_services.OwnRabbit]:
    """A RabbitMQ node of the test's own: to be stopped, restarted, killed and frozen."""
    with rabbit_services.own(services_directory) as server:
        yield server


def _worker(request: pytest.FixtureRequest) -> str:
    worker: Mapping[str, str] = getattr(request.config, "workerinput", {})
    return f"test_{worker.get('workerid', 'main')}"
