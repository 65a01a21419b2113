"""An app inside Starlette, FastAPI and uvicorn: its life, publishing from an endpoint, health, and failing."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, WebSocket
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from streamfw import App, BrokerRefused, NotRunning, subscriber
from streamfw.integrations.asgi import HealthEndpoint, health, lifespan
from streamfw.integrations.fastapi import Stream, current_app
from tests.helpers import eventually

from .test_app import FakeBroker, Pool


class Shipment(BaseModel):
    item: str


@asynccontextmanager
async def serving(web: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of `web` while its lifespan runs, in this loop, as Starlette runs it."""
    async with web.router.lifespan_context(web) as state:
        transport = httpx.ASGITransport(_with_state(web, state))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield client


def _with_state(web: Any, state: Mapping[str, Any]) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await web({**scope, "state": dict(state)}, receive, send)

    return app


def shop() -> tuple[App, list[str]]:
    shipped: list[str] = []

    @subscriber("orders")
    async def ship(item: str) -> None:
        shipped.append(item)

    return App(ship, name="shop"), shipped


# -- the life


async def test_an_endpoint_of_starlette_publishes() -> None:
    stream, shipped = shop()

    async def order(request: Request) -> Response:
        return JSONResponse({"id": await stream.publish("orders", (await request.json())["item"])}, 202)

    async def by_state(request: Request) -> Response:
        return JSONResponse({"id": await request.state.streamfw.publish("orders", "state")}, 202)

    routes = [Route("/orders", order, methods=["POST"]), Route("/state", by_state)]
    async with serving(Starlette(routes=routes, lifespan=lifespan(stream))) as client:
        answer = await client.post("/orders", json={"item": "tea"})
        assert (answer.status_code, len(answer.json()["id"])) == (202, 36)
        await client.get("/state")
        await eventually(lambda: shipped == ["tea", "state"])
    assert not stream.health().ok
    with pytest.raises(NotRunning):
        await stream.publish("orders", "too late")


async def test_the_web_applications_own_lifespan_is_around_it() -> None:
    log: list[object] = []
    pool = Pool()

    @asynccontextmanager
    async def own(web: Starlette) -> AsyncIterator[dict[str, Any]]:
        log.append((type(web).__name__, stream.health().ok))
        yield {"pool": pool}
        log.append(("closed", stream.health().ok))

    async def life() -> AsyncIterator[Pool]:
        log.append("stream begins")
        yield pool
        log.append("stream ends")

    @subscriber("orders")
    async def ship(item: str) -> None: ...

    async def look(request: Request) -> Response:
        assert request.state.streamfw is stream
        return JSONResponse(request.state.pool is pool)

    stream = App(ship, lifespan=life)
    web = Starlette(routes=[Route("/", look)], lifespan=lifespan(stream, own))
    async with serving(web) as client:
        assert (await client.get("/")).json() is True
    assert log == [("Starlette", False), "stream begins", "stream ends", ("closed", False)]


async def test_one_that_yields_nothing() -> None:
    @asynccontextmanager
    async def own(web: Starlette) -> AsyncIterator[None]:
        yield

    stream, _ = shop()
    async with lifespan(stream, own)(None) as state:
        assert dict(state) == {"streamfw": stream}


async def test_a_server_does_not_start_with_an_app_that_cannot() -> None:
    closed = []

    @asynccontextmanager
    async def own(web: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            closed.append(True)

    @subscriber("orders", workers=0)
    async def ship(item: str) -> None: ...

    with pytest.raises(ExceptionGroup, match="workers: 0 is below 1"):
        async with lifespan(App(ship), own)(None):
            pass
    refusing = App(brokers={"default": FakeBroker(BrokerRefused("the password is wrong"))})
    with pytest.raises(BrokerRefused, match="the password is wrong"):
        async with lifespan(refusing, own)(None):
            pass
    assert closed == [True, True]


# -- FastAPI


def fast(stream: App) -> FastAPI:
    web = FastAPI(lifespan=lifespan(stream))
    web.mount("/health", health(stream))

    @web.post("/orders", status_code=202)
    async def order(shipment: Shipment, stream: Stream) -> dict[str, str]:
        return {"id": await stream.publish("orders", shipment)}

    @web.websocket("/orders")
    async def orders(socket: WebSocket, stream: Stream) -> None:
        await socket.accept()
        await stream.publish("orders", Shipment(item=await socket.receive_text()))
        await socket.send_text("accepted")

    return web


def taking_shipments() -> tuple[App, list[Shipment]]:
    shipped: list[Shipment] = []

    @subscriber("orders")
    async def ship(shipment: Shipment) -> None:
        shipped.append(shipment)

    return App(ship), shipped


async def test_endpoints_of_fastapi_take_the_app() -> None:
    stream, shipped = taking_shipments()
    async with serving(fast(stream)) as client:
        assert (await client.post("/orders", json={"item": "tea"})).status_code == 202
        assert (await client.get("/health/")).json()["ok"]
        await eventually(lambda: [one.item for one in shipped] == ["tea"])


async def test_so_do_those_of_websockets() -> None:
    stream, shipped = taking_shipments()
    web, sent = fast(stream), []
    events = iter([{"type": "websocket.connect"}, {"type": "websocket.receive", "text": "milk"}])

    async def receive() -> Any:
        return next(events)

    async def send(event: Any) -> None:
        sent.append(event["type"])

    scope = {"type": "websocket", "path": "/orders", "headers": [], "query_string": b"", "subprotocols": []}
    async with web.router.lifespan_context(web) as state:
        await web({**scope, "state": dict(state or {})}, receive, send)
        await eventually(lambda: [one.item for one in shipped] == ["milk"])
    assert sent[:2] == ["websocket.accept", "websocket.send"]


@asynccontextmanager
async def without_lifespan(web: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(web), base_url="http://test") as client:
        yield client


async def test_a_test_puts_another_in_its_place() -> None:
    stream, _ = taking_shipments()
    web, published = fast(stream), []

    class Fake:
        async def publish(self, name: str, payload: object) -> str:
            published.append((name, payload))
            return "id"

    web.dependency_overrides[current_app] = Fake
    async with without_lifespan(web) as client:
        assert (await client.post("/orders", json={"item": "tea"})).json() == {"id": "id"}
    assert published == [("orders", Shipment(item="tea"))]


async def test_an_endpoint_without_a_lifespan_is_told_so() -> None:
    stream, _ = taking_shipments()
    async with without_lifespan(fast(stream)) as client:
        with pytest.raises(NotRunning, match=r"lifespan=streamfw\.integrations\.asgi\.lifespan"):
            await client.post("/orders", json={"item": "tea"})


# -- health


async def asked(endpoint: HealthEndpoint, method: str = "GET") -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(endpoint), base_url="http://test") as client:
        return await client.request(method, "/")


async def test_health_tells_each_subscriber() -> None:
    stream, _ = shop()
    endpoint = health(stream)
    assert (answer := await asked(endpoint)).status_code == 503
    assert answer.json() == {"ok": False, "subscribers": {}, "error": None}
    async with stream.running():
        answer = await asked(endpoint)
        assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
        (where,) = answer.json()["subscribers"]
        assert answer.json() == {"ok": True, "subscribers": {where: {"ok": True, "detail": ""}}, "error": None}
        assert where.endswith("ship('orders')")
        head = await asked(endpoint, "HEAD")
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == str(len(answer.content))
        post = await asked(endpoint, "POST")
        assert (post.status_code, post.headers["allow"]) == (405, "GET, HEAD")
        assert (await asked(health(stream, details=False))).json() == {"ok": True}


async def test_health_is_http() -> None:
    async def nothing(*args: Any) -> Any: ...

    with pytest.raises(RuntimeError, match="speaks HTTP, not websocket"):
        await health(App())({"type": "websocket"}, nothing, nothing)


async def test_as_a_route_and_mounted() -> None:
    stream, _ = shop()
    routes = [Route("/health", health(stream)), Mount("/probes/ready", health(stream, details=False))]
    async with serving(Starlette(routes=routes, lifespan=lifespan(stream))) as client:
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/probes/ready/")).json() == {"ok": True}


async def test_one_handler_in_two_groups_is_two_subscribers() -> None:
    @subscriber("orders", group="a")
    @subscriber("orders", group="b")
    async def ship(item: str) -> None: ...

    stream = App(ship)
    async with stream.running():
        where = f"{ship.__qualname__}('orders') in group "
        assert set(stream.health().subscribers) == {where + "'a'", where + "'b'"}


# -- failing


async def test_a_subscriber_that_ends_shows_in_health_and_the_rest_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    broker = FakeBroker()
    shipped: list[str] = []

    @subscriber("orders")
    async def ship(item: str) -> None:
        shipped.append(item)

    @subscriber("bills", broker="fake")
    async def bill(item: str) -> None: ...

    stream = App(ship, bill, brokers={"fake": broker})

    async def order(request: Request) -> Response:
        return JSONResponse(await stream.publish("orders", "tea"))

    web = Starlette(routes=[Route("/order", order), Route("/health", health(stream))], lifespan=lifespan(stream))

    async def serve() -> None:
        async with serving(web) as client:
            assert (await client.get("/health")).status_code == 200
            broker.sources["bills"].fail_fetch(BrokerRefused("the table is gone"))
            await eventually(lambda: not stream.health().ok)
            answer = await client.get("/health")
            assert answer.status_code == 503
            assert answer.json()["error"] == "BrokerRefused: the table is gone"
            states = {where: one["ok"] for where, one in answer.json()["subscribers"].items()}
            assert {where.split(".")[-1]: ok for where, ok in states.items()} == {
                "ship('orders')": True,
                "bill('bills')": False,
            }
            assert (await client.get("/order")).status_code == 200, "what works goes on"
            await eventually(lambda: shipped == ["tea"])

    with pytest.raises(BrokerRefused, match="the table is gone"):  # told again when the server shuts down
        await serve()
    assert "a subscriber ended: the table is gone" in caplog.text
    assert broker.log == ["connected", "closed"], "drained and closed all the same"


async def test_the_error_of_the_body_is_not_hidden() -> None:
    stream, _ = shop()
    with pytest.raises(ZeroDivisionError):
        async with lifespan(stream)(None):
            raise ZeroDivisionError
    assert not stream.health().ok


async def test_exit_on_failure_in_a_thread_only_says_so(caplog: pytest.LogCaptureFixture) -> None:
    broker = FakeBroker()

    @subscriber("orders")
    async def ship(item: str) -> None: ...

    stream = App(ship, brokers={"default": broker})
    ends: list[BaseException] = []

    async def main() -> None:
        async with lifespan(stream, exit_on_failure=True)(None):
            broker.sources["orders"].fail_fetch(BrokerRefused("gone"))
            await eventually(lambda: not stream.health().ok)

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            ends.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    await asyncio.to_thread(thread.join)
    assert [str(error) for error in ends] == ["gone"]
    assert "nobody can shut it down from here" in caplog.text


# -- uvicorn

SERVICE = """
    import os, sys
    from starlette.applications import Starlette
    from starlette.responses import PlainTextResponse
    from starlette.routing import Route
    from streamfw import App, BrokerRefused, subscriber
    from streamfw.integrations.asgi import health, lifespan

    @subscriber("orders")
    async def ship(item: str) -> None:
        print("shipped", item, flush=True)

    stream = App(ship, name="shop")

    async def order(request):
        return PlainTextResponse(await stream.publish("orders", "tea"))

    async def fail(request):
        stream.pumps[0].fail(BrokerRefused("the table is gone"))
        return PlainTextResponse("failing")

    routes = [Route("/order", order), Route("/fail", fail), Route("/health", health(stream))]
    web = Starlette(routes=routes, lifespan=lifespan(stream, exit_on_failure=sys.argv[-1] == "exit"))

    if __name__ == "__main__":
        import uvicorn
        stop = uvicorn.run(web, fd=int(sys.argv[1]), log_level="info")
"""


class Service:
    def __init__(self, tmp_path: Path, mode: str) -> None:
        path = tmp_path / "service.py"
        path.write_text(textwrap.dedent(SERVICE))
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        number = self.listener.fileno()
        self.process = subprocess.Popen(
            [sys.executable, str(path), str(number), mode],
            pass_fds=[number],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={name: value for name, value in os.environ.items() if not name.startswith("STREAMFW_")},
        )

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30)

    def end(self) -> str:
        """What it wrote; it has ended, or does not within half a minute."""
        written, _ = self.process.communicate(timeout=30)
        return written

    def close(self) -> None:
        self.listener.close()
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()
        elif self.process.stdout is not None:
            self.process.stdout.close()


@pytest.mark.parametrize("mode", ["stay", "exit"])
def test_under_uvicorn(tmp_path: Path, mode: str) -> None:
    service = Service(tmp_path, mode)
    try:
        assert service.get("/health").json()["ok"]
        assert service.get("/order").status_code == 200
        assert service.get("/fail").text == "failing"
        if mode == "stay":
            assert service.get("/health").status_code == 503
            assert service.get("/order").status_code == 200, "publishing goes on"
            service.process.send_signal(signal.SIGTERM)
        written = service.end()
    finally:
        service.close()
    assert service.process.returncode != 0
    assert "shipped tea" in written
    assert "Application shutdown failed" in written, "the error is raised again at the end"
    assert "the table is gone" in written
