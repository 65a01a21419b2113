"""What asyncpg, the socket and the server raise, as errors of streamfw: most specific first.

SQLSTATE classes and codes: PostgreSQL documentation, appendix A.
"""

from __future__ import annotations

import ssl

import asyncpg

from streamfw.errors import BrokerError, BrokerRefused, BrokerUnavailable

__all__ = ["DRIVER_ERRORS", "breaks_connection", "is_data_error", "translated"]

# What a call of the driver raises when the server, the network or the statement is at fault. asyncpg raises
# InterfaceError for a closed connection, and InternalClientError when the stream of messages makes no sense any more.
DRIVER_ERRORS = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError, TimeoutError)

_MIGRATE = "run `streamfw postgres migrate`"
# A table, schema, function or column that is not there; a code or class, and what to do.
_REFUSED = {
    "28": "the server refuses these credentials: check user and password, and pg_hba.conf",
    "3D000": "there is no such database: create it first",
    "42P01": _MIGRATE,
    "3F000": _MIGRATE,
    "42883": _MIGRATE,
    "42703": _MIGRATE,
    "42501": "the user lacks a right: grant it on the schema, its tables and functions",
}
_TRANSIENT = (
    "08",  # connection
    "53",  # out of disk, memory, connections
    "57",  # shutdown, starting up, cancelled
    "58",  # input or output error
    "40",  # rolled back: deadlock, serialization
    "55P03",  # a lock was not to be had in time
    "25006",  # read-only: a standby, before or after a failover
    "0A000",  # "cached plan must not change result type", in the moment of a migration
    "XX000",
)
_BREAKS = ("08", "57P", "58")


def translated(error: BaseException, doing: str) -> BrokerError:
    """The error of streamfw that says what happened while `doing`; raise it ``from error``."""
    if isinstance(error, BrokerError):
        return error
    if isinstance(error, asyncpg.PostgresError):
        return _by_sqlstate(error, doing)
    text = f"Postgres: {doing}: {_said(error)}"
    if isinstance(error, ssl.SSLCertVerificationError):
        return BrokerRefused(f"{text}; check sslmode and sslrootcert in the URL")
    if isinstance(error, asyncpg.ClientConfigurationError) or "rejected SSL upgrade" in str(error):
        return BrokerRefused(f"{text}; check the URL")
    return BrokerUnavailable(text)


def _by_sqlstate(error: asyncpg.PostgresError, doing: str) -> BrokerError:
    state = error.sqlstate or ""
    text = f"Postgres: {doing}: {_said(error)} (SQLSTATE {state or 'unknown'})"
    hint = _REFUSED.get(state) or _REFUSED.get(state[:2])
    if hint:
        return BrokerRefused(f"{text}; {hint}")
    if state.startswith(_TRANSIENT) or not state:
        return BrokerUnavailable(text)
    return BrokerRefused(text)


def _said(error: BaseException) -> str:
    return str(error).split("\n")[0][:300] or type(error).__name__


def breaks_connection(error: BaseException) -> bool:
    """Whether it may have hit the connection rather than the statement: then nobody knows what was committed."""
    if isinstance(error, asyncpg.PostgresError):
        return (error.sqlstate or "08").startswith(_BREAKS)
    return not isinstance(error, asyncpg.DataError | UnicodeError)


def is_data_error(error: BaseException | None) -> bool:
    """Whether the values of the statement are at fault, so that fewer of them may pass.

    asyncpg's own DataError (a value that cannot be encoded) has no SQLSTATE. 22: data, 23: a constraint, 54: a limit
    of the program, such as an index entry that is too long.
    """
    if isinstance(error, asyncpg.DataError | UnicodeError | OverflowError):
        return True
    return isinstance(error, asyncpg.PostgresError) and (error.sqlstate or "").startswith(("22", "23", "54"))
