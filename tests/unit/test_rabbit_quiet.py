"""Which records of the library are left out: those of our connections that are told elsewhere, and nobody else's."""

from __future__ import annotations

import asyncio
import logging

import aiormq
import pytest

from streamfw_rabbit._quiet import QuietConnection, _filter


def passes(message: str, *arguments: object) -> bool:
    record = logging.LogRecord("aiormq.connection", logging.ERROR, "", 0, message, arguments, None)
    return bool(_filter.filter(record))


@pytest.mark.parametrize("message", _filter.TOLD)
async def test_what_is_told_of_our_connections_is_left_out(message: str) -> None:
    ours, theirs = QuietConnection("amqp://guest:guest@127.0.0.1:1/"), aiormq.Connection("amqp://127.0.0.1:1/")
    assert not passes(message, ours)
    assert passes(message, theirs)


async def test_what_comes_for_a_channel_that_we_have_closed_is_left_out() -> None:
    assert passes(_filter.LATE, 3, "a frame")
    _filter.readers.add(asyncio.current_task())
    assert not passes(_filter.LATE, 3, "a frame")
    assert passes("Unexpected frame %r", "a frame")
