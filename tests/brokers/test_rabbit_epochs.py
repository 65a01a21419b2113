"""Connections to RabbitMQ that are supervised: how they end, and what comes after."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import aiormq
import pytest
from pamqp import commands

from streamfw.errors import BrokerClosed, BrokerRefused, BrokerUnavailable
from streamfw_rabbit import epochs as module
from streamfw_rabbit.channel import OPEN, Closed, Properties, Receipts
from streamfw_rabbit.epochs import ConnectionOptions, Epochs
from streamfw_rabbit.errors import AccessRefused, ChannelGone, closing_error, is_fatal, reason
from streamfw_rabbit.fastlane import FastEpoch, _LaneProtocol
from tests.helpers import eventually
from tests.services import rabbit as rabbit_services
from tests.services.proxy import Proxy
from tests.services.rabbit import OwnRabbit, Rabbit

from .rabbit_kit import Rig, Tap, TransportName, ended, options, publish, rig, send


@pytest.fixture(scope="module")
def node(services_directory: Path) -> Iterator[OwnRabbit]:
    """A node for the tests of this module that stop, freeze, or block it."""
    with rabbit_services.own(services_directory) as server:
        yield server


# ---------------------------------------------------------------------- ends


async def test_closed_by_the_server(rabbit: Rabbit, transport: TransportName) -> None:
    """Everything that is open hears of it, with the server's words; and the next connection is made."""
    async with rig(rabbit, transport) as r:
        await r.queue()
        await r.fill(b"1", b"2")
        tap, other = await r.consumer(), await r.channel(confirms=True)
        await tap.until(2)
        first = r.epoch
        receipts = send(other, "q", b"3")
        calling = asyncio.create_task(other.qos(1))
        await asyncio.sleep(0)
        assert await asyncio.to_thread(rabbit.close_connections) == 1
        closed = await ended(other)
        assert (closed.kind, closed.code) == ("connection", 320)
        assert "closed by a test" in closed.text
        assert tap.closed == [closed]
        assert (await receipts.wait())[0] in (None, closed)
        await asyncio.wait({calling})
        if calling.exception() is not None:
            with pytest.raises(ChannelGone, match="320"):
                await calling
        assert not tap.channel.ack(1)
        assert tap.channel.counters.late == 1
        with pytest.raises(ChannelGone, match="320"):
            await first.channel()
        second = await r.epochs.connected(10)
        assert (second.number, second.closed) == (2, None)
        assert (r.ends, r.ups) == ([closed], [first, second])
        again = await r.consumer()
        assert again.channel.epoch > other.epoch
        assert [d.redelivered for d in (await again.until(2))[:2]] == [True, True]


async def test_a_socket_that_is_cut(rabbit: Rabbit, transport: TransportName) -> None:
    async with (
        Proxy.to_tcp(rabbit.host, rabbit.port) as proxy,
        rig(rabbit.at(proxy.host, proxy.port), transport) as r,
    ):
        await r.queue()
        channel = await r.channel(confirms=True)
        proxy.black_hole()
        receipts = send(channel, "q", b"x")
        await channel.flush()
        proxy.cut()
        closed = await ended(channel)
        assert (closed.kind, closed.code) == ("lost", 0)
        assert await receipts.wait() == [closed]
        proxy.resume()
        await r.epochs.connected(10)
        assert r.ends == [closed]
        assert await publish(await r.channel(confirms=True), "q", b"x") == [None]


async def test_an_end_is_told_once_and_an_outage_ever_more_rarely(
    rabbit: Rabbit, transport: TransportName, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(module, "_TOLD", 0.25)
    foreign = await aiormq.connect(rabbit.url)
    try:
        async with (
            Proxy.to_tcp(rabbit.host, rabbit.port) as proxy,
            rig(rabbit.at(proxy.host, proxy.port), transport, backoff=(0.01, 0.01)) as r,
        ):
            await r.queue()
            await r.consumer()
            tries = 0
            real = module._connect

            async def counted(*arguments: Any) -> Any:
                nonlocal tries
                tries += 1
                return await real(*arguments)

            monkeypatch.setattr(module, "_connect", counted)
            await proxy.refuse()
            await asyncio.to_thread(rabbit.close_connections)
            await eventually(lambda: foreign.is_closed and r.epochs._down > 1.0)
            await proxy.listen()
            await r.epochs.connected(10)
    finally:
        await foreign.close()
    ours = [record for record in caplog.records if record.name == "streamfw.rabbit"]
    assert tries > 20
    # Ended; down for 0, 0.25, 0.5 and 1 s; up again.
    assert 4 <= len(ours) <= 7, [record.getMessage() for record in ours]
    assert "is up again" in ours[-1].getMessage()
    theirs = [record for record in caplog.records if record.name.startswith("aiormq")]
    assert {id(record.args[0]) for record in theirs if record.args} == {id(foreign)}  # type: ignore[index]
    assert sum(record.exc_info is not None for record in theirs) == 1


async def test_a_peer_that_fell_silent(rabbit: Rabbit) -> None:
    """Its heartbeats do not come: an end after twice the time agreed on, and none before."""
    loop = asyncio.get_running_loop()
    async with Proxy.to_tcp(rabbit.host, rabbit.port) as proxy:
        there = rabbit.at(proxy.host, proxy.port)
        async with rig(there, "aiormq", heartbeat=1) as slow, rig(there, "fast", heartbeat=1) as fast:
            rigs = (slow, fast)
            channels = [await r.channel(confirms=True) for r in rigs]
            await asyncio.sleep(2.5)  # idle, but alive
            assert [channel.closed for channel in channels] == [None, None]
            proxy.black_hole()
            began = loop.time()
            sent = [send(channel, "q", b"x") for channel in channels]
            for channel, receipts in zip(channels, sent, strict=True):
                closed = await ended(channel)
                assert 1.0 < loop.time() - began < 5.0
                assert (closed.kind, closed.code) == ("lost", 0)
                assert "no sign of the server" in closed.text
                assert await receipts.wait() == [closed]
            proxy.cut()
            proxy.resume()
            for r in rigs:
                await r.epochs.connected(10)


async def test_a_busy_connection_is_alive_to_the_library(rabbit: Rabbit, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sees none of the frames that the lane takes, and ends a connection that it takes for dead. Here after 2 s."""
    monkeypatch.setattr(aiormq.Connection, "HEARTBEAT_GRACE_MULTIPLIER", 1)
    async with rig(rabbit, "fast", heartbeat=1) as r:
        await r.queue()
        channel = await r.channel(confirms=True)
        loop = asyncio.get_running_loop()
        end = loop.time() + 3.5
        while loop.time() < end:
            assert await publish(channel, "q", b"x") == [None]
            await asyncio.sleep(0.01)
        protocol = cast("_LaneProtocol", r.epoch._protocol)
        assert 2 <= protocol.heartbeats <= 4


async def test_closing_it_ourselves(rabbit: Rabbit, transport: TransportName) -> None:
    async with rig(rabbit, transport) as r:
        await r.queue()
        tap = await r.consumer()
        epoch = r.epoch
        publishes = await r.channel(confirms=True)
        await r.epochs.close()
        assert tap.closed == [Closed("local")]
        assert epoch.closed == Closed("local")
        with pytest.raises(ChannelGone, match="closed by us"):
            publishes.publish("", "q", Properties(), b"", Receipts())
        with pytest.raises(BrokerClosed):
            await r.epochs.connected(1)
        await publishes.close()
        assert r.ends == []
        assert r.epochs.describe() == "closed"


# ---------------------------------------------------------------------- coming back


async def test_the_hosts_are_tried_in_turn(rabbit: Rabbit, transport: TransportName) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        hosts = (unused.getsockname(), (rabbit.host, rabbit.port))
        async with rig(rabbit, transport, hosts=hosts) as r:
            assert r.epoch.where == f"{rabbit.host}:{rabbit.port}"
            assert r.epochs.connects == 1


async def test_nobody_there(transport: TransportName) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        host, port = unused.getsockname()
        secret = "a-secret-word"
        epochs = Epochs(ConnectionOptions(hosts=((host, port),), password=secret, transport=transport))
        epochs.start()
        with pytest.raises(
            BrokerUnavailable, match=f"not connected within 0.2 s: connecting to {host}:{port}"
        ) as caught:
            await epochs.connected(0.2)
        assert secret not in f"{caught.value} {caught.value.__cause__} {epochs.options}"
        await epochs.close()


async def test_a_server_that_never_answers(transport: TransportName) -> None:
    taken: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda _, writer: taken.append(writer), "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        epochs = Epochs(ConnectionOptions(hosts=((host, port),), transport=transport, timeout=0.2))
        epochs.start()
        with pytest.raises(BrokerUnavailable, match=r"did not answer within 0\.2 s"):
            await epochs.connected(0.4)
        await epochs.close()
        for writer in taken:
            writer.close()


@pytest.mark.parametrize("answer", [b"AMQP\0\0\x09\x01", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
async def test_a_server_that_speaks_something_else(transport: TransportName, answer: bytes) -> None:
    def answers(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(answers, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        epochs = Epochs(ConnectionOptions(hosts=((host, port),), transport=transport))
        epochs.start()
        with pytest.raises((BrokerUnavailable, BrokerRefused), match=f"connecting to {host}:{port}"):
            await epochs.connected(0.2)
        await epochs.close()


async def test_it_closes_though_the_library_swallows_the_cancellation(monkeypatch: pytest.MonkeyPatch) -> None:
    """aiormq does, while it cleans up behind a connection that failed."""
    attempts = 0

    async def swallows(*_: object) -> None:
        nonlocal attempts
        attempts += 1
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            raise BrokerUnavailable("it hung up") from None

    monkeypatch.setattr(module, "_connect", swallows)
    epochs = Epochs(ConnectionOptions(hosts=(("127.0.0.1", 1),)))
    epochs.start()
    await asyncio.sleep(0)
    async with asyncio.timeout(1.0):  # not a pause later, and no other attempt
        await epochs.close()
    assert attempts == 1


def test_the_pause_grows_with_the_outage() -> None:
    """At most a fifth of it: a server that is back after 10 s is found within 2 s."""
    epochs = Epochs(ConnectionOptions(backoff=(0.2, 30.0)))
    for down, most in ((0.0, 0.2), (1.0, 0.2), (10.0, 2.0), (100.0, 20.0), (1000.0, 30.0)):
        epochs._down = down
        pauses = [epochs._pause() for _ in range(500)]
        assert 0 <= min(pauses) < most * 0.1
        assert most * 0.9 < max(pauses) <= most


async def test_an_epoch_that_is_lost_at_once_is_part_of_the_outage(
    rabbit: Rabbit, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig(rabbit, "fast") as r:
        r.epochs._down = 5.0
        r.epoch.lost("a test")
        await r.epochs.connected(10)
        assert r.epochs._down >= 5.0
        monkeypatch.setattr(module, "_STABLE", -1.0)
        r.epoch.lost("a test")
        await r.epochs.connected(10)
        assert r.epochs._down == 0.0


# ---------------------------------------------------------------------- refusals


async def refused(server: Rabbit, transport: TransportName, **more: Any) -> BrokerRefused:
    """The error of a connection that the server refuses: at once, and from then on."""
    epochs = Epochs(options(server, transport, **more))
    told: list[object] = []
    epochs.listen(lambda *change: told.append(change))
    epochs.start()
    with pytest.raises(BrokerRefused) as caught:
        await epochs.connected(10)
    with pytest.raises(BrokerRefused):
        await epochs.connected(10)
    assert told == [(None, None)]
    assert epochs.connects == 0
    assert epochs.describe() == str(caught.value)
    assert server.password not in f"{caught.value!r} {epochs.options!r}"
    await epochs.close()
    return caught.value


async def test_a_wrong_password(rabbit: Rabbit, transport: TransportName) -> None:
    error = await refused(rabbit, transport, password="wrong:/@%")
    assert type(error) is AccessRefused
    assert "403 ACCESS_REFUSED" in str(error)
    assert "wrong" not in str(error)


async def test_a_vhost_that_does_not_exist(rabbit: Rabbit, transport: TransportName) -> None:
    error = await refused(rabbit, transport, vhost="no such/vhost")
    assert type(error) is AccessRefused
    assert "530 NOT_ALLOWED - vhost no such/vhost not found" in str(error)


async def test_a_vhost_that_is_not_ours(rabbit: Rabbit, transport: TransportName) -> None:
    error = await refused(rabbit, transport, vhost="/")
    assert "530 NOT_ALLOWED - access to vhost '/' refused" in str(error)


async def test_a_way_to_authenticate_that_is_not_offered(rabbit: Rabbit, transport: TransportName) -> None:
    assert "authenticate" in str(await refused(rabbit, transport, auth="external"))


async def test_tls(rabbit: Rabbit, transport: TransportName) -> None:
    assert rabbit.ca is not None
    context = ssl.create_default_context(cafile=rabbit.ca)
    async with rig(rabbit, transport, hosts=(("localhost", rabbit.tls_port),), tls=context) as r:
        await r.queue()
        await r.fill(b"x" * 1_000_000, b"y")
        tap = await r.consumer()
        assert [len(delivery.body) for delivery in await tap.until(2)] == [1_000_000, 1]
        assert tap.channel.ack(2, multiple=True)
        await tap.channel.close()
        await r.left(0)
        assert r.epoch.writer.get_extra_info("ssl_object") is not None


async def test_a_certificate_that_does_not_verify(rabbit: Rabbit, transport: TransportName) -> None:
    hosts = (("localhost", rabbit.tls_port),)
    error = await refused(rabbit, transport, hosts=hosts, tls=ssl.create_default_context())
    assert "its certificate does not verify" in str(error)


def test_which_answers_are_final() -> None:
    final = [
        (403, "ACCESS_REFUSED - login"),
        (404, "NOT_FOUND - no queue 'q'"),
        (406, "PRECONDITION_FAILED"),
        (530, "x"),
        (541, "INTERNAL_ERROR - Feature `queue_master_locator` is deprecated.\nBy default, this feature is not"),
    ]
    passing = [
        (320, "CONNECTION_FORCED"),
        (405, "RESOURCE_LOCKED"),
        (541, "INTERNAL_ERROR"),
        (0, ""),
        (404, "NOT_FOUND - home node 'r@h' of durable queue 'q' in vhost '/' is down or inaccessible"),
        (403, "ACCESS_REFUSED - queue 'q' in vhost '/' in exclusive use"),
        (530, "NOT_ALLOWED - access to vhost '/' refused for user 'u': connection limit (9) is reached"),
    ]
    for code, text in final:
        assert is_fatal(Closed("channel", code, text))
        assert isinstance(closing_error(Closed("channel", code, text), "a test"), BrokerRefused)
    for code, text in passing:
        assert not is_fatal(Closed("channel", code, text))
        assert isinstance(closing_error(Closed("channel", code, text), "a test"), ChannelGone)


def test_what_the_library_says_of_an_end() -> None:
    from aiormq import exceptions as driver

    for error, closed in (
        (driver.ChannelPreconditionFailed("why"), Closed("channel", 406, "why")),
        (driver.ChannelClosed(311, "CONTENT_TOO_LARGE"), Closed("channel", 311, "CONTENT_TOO_LARGE")),
        (driver.ChannelClosed(None, None), Closed("local")),
        (driver.ConnectionClosed(320, "CONNECTION_FORCED"), Closed("connection", 320, "CONNECTION_FORCED")),
        (driver.ConnectionNotAllowed("vhost"), Closed("connection", 530, "vhost")),
        (ConnectionResetError(104, "reset"), Closed("lost", 0, "ConnectionResetError: [Errno 104] reset")),
        (TimeoutError(), Closed("lost", 0, "TimeoutError")),
        (None, Closed("local")),
    ):
        assert reason(error) == closed


# ---------------------------------------------------------------------- the lane and the library


async def test_auto_goes_on_without_the_lane_when_it_cannot_read(rabbit: Rabbit) -> None:
    async with rig(rabbit, "auto") as r:
        assert r.epoch.transport == "fast"
        channel = await r.channel()
        first = r.epoch
        assert isinstance(first, FastEpoch)
        first._protocol.data_received(b"not a frame at all")
        closed = await ended(channel)
        assert (closed.kind, closed.text) == ("lost", "the server's stream is damaged: a frame of unknown type 110")
        epoch = await r.epochs.connected(10)
        assert (epoch.number, epoch.transport) == (2, "aiormq")


async def test_auto_goes_on_without_the_lane_when_it_cannot_be_made(
    rabbit: Rabbit, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise AttributeError("changed in aiormq")

    monkeypatch.setattr(FastEpoch, "__init__", broken)
    async with rig(rabbit, "auto") as r:
        assert r.epoch.transport == "aiormq"
    error = await refused(rabbit, "fast")
    assert "changed in aiormq" in str(error)


async def test_what_may_close_a_connection_is_asked_on_one_of_its_own(rabbit: Rabbit, transport: TransportName) -> None:
    """Here what the server has not implemented: immediate publishes (540)."""
    async with rig(rabbit, transport) as r:

        async def immediately() -> None:
            async with r.epochs.apart("trying") as channel:
                await channel.queue_declare("q", durable=True)
                await channel.basic_publish(b"", routing_key="q", immediate=True, wait=False)
                await channel.rpc(commands.Basic.Qos())

        with pytest.raises(BrokerUnavailable, match="540"):
            await immediately()
        assert r.ends == []
        async with r.epochs.apart() as channel:
            assert (await channel.queue_declare("q", passive=True)).queue == "q"


async def test_declarations_that_are_cancelled_break_off_no_call(
    rabbit: Rabbit, transport: TransportName, caplog: pytest.LogCaptureFixture
) -> None:
    """The library closes the channel in the middle of a call that is broken off, and says so."""

    async def declare(r: Rig) -> None:
        async with r.epochs.declarations() as channel:
            await channel.queue_declare("q", durable=True)
            await channel.queue_bind("q", "amq.topic", "one")

    async with rig(rabbit, transport) as r:
        for turns in range(40):
            doing = asyncio.create_task(declare(r))
            for _ in range(turns):
                await asyncio.sleep(0)
            doing.cancel()
            await asyncio.wait({doing})
        await declare(r)
        await eventually(lambda: not r.epoch._calls)
        assert (r.ends, r.epochs.connects) == ([], 1)
    assert [record.getMessage() for record in caplog.records if record.name.startswith("aiormq")] == []


async def test_declarations_on_a_connection_that_ends(rabbit: Rabbit, transport: TransportName) -> None:
    """The library ends its calls by a cancellation of its own then, which is none of the caller."""
    async with rig(rabbit, transport) as r:
        for _ in range(3):
            epoch = await r.epochs.connected(10)

            async def declare() -> None:
                async with r.epochs.declarations() as channel:
                    while True:
                        await channel.queue_declare("q", durable=True)

            declaring = asyncio.create_task(declare())
            await asyncio.sleep(0.02)
            closing = asyncio.create_task(epoch.close())
            with pytest.raises(ChannelGone):
                await declaring
            await closing


@pytest.mark.parametrize("error", [RuntimeError("own"), OSError("own"), TimeoutError("own"), KeyError("own")])
async def test_what_the_caller_raises_while_declaring_stays_his(rabbit: Rabbit, error: Exception) -> None:
    async with rig(rabbit, "fast") as r:
        with pytest.raises(type(error), match="own") as caught:
            async with r.epochs.declarations():
                raise error
        assert caught.value is error


async def test_what_is_known_of_the_server(rabbit: Rabbit, transport: TransportName) -> None:
    async with rig(rabbit, transport) as r:
        assert r.epoch.server_version[:1] >= (3,)
        assert len(r.epoch.server_version) == 3
        assert r.epochs.describe() == f"connected to {rabbit.host}:{rabbit.port}"
        assert r.epochs.blocked_since is None


# ---------------------------------------------------------------------- a node of our own


async def test_blocked(node: OwnRabbit, transport: TransportName) -> None:
    """The server says so to who publishes; who consumes, on another connection, goes on."""
    async with rig(node.facts, transport) as publishes, rig(node.facts, transport) as consumes:
        queue = await publishes.queue(f"blocked-{transport}")
        channel = await publishes.channel(confirms=True)
        await publishes.fill(b"1", name=queue)
        await asyncio.to_thread(node.alarm, True)
        try:
            receipts = send(channel, queue, b"2")
            await eventually(lambda: channel.blocked)
            assert publishes.epochs.blocked_since is not None
            assert publishes.blocks == [True]
            assert "publishing is blocked" in publishes.epochs.describe()
            tap = await consumes.consumer(queue)
            await tap.until(1)
            assert tap.channel.ack(1)
            assert not tap.channel.blocked
            assert receipts.answers == [OPEN]
            # A call on the blocked connection hangs. Whoever opens a channel there hears of it in time.
            with pytest.raises(BrokerUnavailable, match=r"did not open a channel within 0.3 s"):
                await publishes.epoch.channel(timeout=0.3)
        finally:
            await asyncio.to_thread(node.alarm, False)
        assert await receipts.wait() == [None]
        await eventually(lambda: not channel.blocked)
        assert publishes.blocks == [True, False]
        await tap.until(2)
        await eventually(lambda: list(publishes.epoch.channels) == [channel.number])
        assert publishes.ends == consumes.ends == []


async def test_closing_a_blocked_connection(node: OwnRabbit) -> None:
    """What is open may be stored or not: nobody knows, and closing does not wait for long."""
    loop = asyncio.get_running_loop()
    async with rig(node.facts, "aiormq") as slow, rig(node.facts, "fast") as fast:
        rigs = (slow, fast)
        queue = await slow.queue("closed")
        channels = [await r.channel(confirms=True) for r in rigs]
        await asyncio.to_thread(node.alarm, True)
        try:
            sent = [send(channel, queue, b"x") for channel in channels]
            await eventually(lambda: all(channel.blocked for channel in channels))
            began = loop.time()
            await asyncio.gather(*(r.epochs.close() for r in rigs))
            assert loop.time() - began < 6
            assert [await receipts.wait() for receipts in sent] == [[Closed("local")]] * 2
            assert [r.blocks for r in rigs] == [[True, False]] * 2
        finally:
            await asyncio.to_thread(node.alarm, False)


async def test_a_node_that_is_restarted(node: OwnRabbit) -> None:
    """Both transports come back, and are consuming within seconds of its return."""
    loop = asyncio.get_running_loop()
    async with rig(node.facts, "aiormq") as slow, rig(node.facts, "fast") as fast:
        rigs = (slow, fast)
        for r in rigs:
            await r.queue(f"again-{r.epoch.transport}")
        await asyncio.to_thread(node.stop)
        await eventually(lambda: slow.ends and fast.ends)
        assert {(closed.kind, closed.code) for r in rigs for closed in r.ends} == {("connection", 320)}
        for r in rigs:
            assert r.epochs.current is None
            with pytest.raises(BrokerUnavailable, match="connecting to"):
                await r.epochs.connected(0.2)
        await asyncio.to_thread(node.start)
        began = loop.time()
        await asyncio.gather(*(_works(r) for r in rigs))
        assert loop.time() - began < 5


async def _works(r: Rig) -> None:
    epoch = await r.epochs.connected(10)
    queue = f"again-{epoch.transport}"
    tap: Tap = await r.consumer(queue)
    await r.fill(b"x", name=queue)
    await tap.until(1)
