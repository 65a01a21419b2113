"""The app as a dependency of FastAPI's endpoints.

    web = FastAPI(lifespan=lifespan(stream))

    @web.post("/orders", status_code=202)
    async def order(order: Order, stream: Stream) -> dict[str, str]:
        return {"id": await stream.publish("orders", order)}

It is the app that the web application's lifespan runs, so endpoints need not import it. In tests,
``web.dependency_overrides[current_app]`` puts another in its place.
"""

# The annotations here are read by FastAPI, so they are no strings.
from typing import Annotated

try:
    from fastapi import Depends
    from starlette.requests import HTTPConnection
except ImportError as error:
    raise ImportError("streamfw.integrations.fastapi needs FastAPI: pip install fastapi") from error

from streamfw.app import App
from streamfw.errors import NotRunning

from .asgi import STATE

__all__ = ["Stream", "current_app"]


async def current_app(connection: HTTPConnection) -> App:
    """The app of this web application. Raises `NotRunning` where its lifespan has none."""
    app = connection.scope.get("state", {}).get(STATE)
    if not isinstance(app, App):
        raise NotRunning(
            "no streamfw app runs in this web application: FastAPI(lifespan=streamfw.integrations.asgi.lifespan(app))"
        )
    return app


Stream = Annotated[App, Depends(current_app)]
"""The type of an endpoint's parameter that takes the app."""
