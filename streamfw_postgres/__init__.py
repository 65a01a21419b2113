"""The Postgres broker of streamfw: queues in tables.

`PostgresBroker` is found by the schemes ``postgres``, ``postgresql`` and ``postgres+embedded``; `Queue` is a
subscriber's source object, for what only a Postgres queue has.
"""

from typing import Annotated, TypeAlias

import asyncpg

from streamfw.handler import UnitConnection

from .broker import PostgresBroker, migrate
from .queue import Queue
from .status import QueueStatus, Status, TableStatus

__all__ = ["PostgresBroker", "Queue", "QueueStatus", "Status", "TableStatus", "Transaction", "migrate"]

Transaction: TypeAlias = Annotated[asyncpg.Connection, UnitConnection()]
"""A handler's parameter: the connection of the transaction that also ends its message (``transactional=True``).
A handler leaves no session settings behind: ``set local``, never ``set``."""
