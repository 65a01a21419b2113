"""Dependencies by dishka (extra ``dishka``): a scope for each message, or for each batch.

    container = make_async_container(ShopProvider(), MessageProvider())
    app = App(ship)
    setup_dishka(container, app)

    @subscriber("orders")
    async def ship(order: Order, stock: FromDishka[Stock]) -> None: ...

The parameters that dishka marks are filled from a REQUEST scope of the container. It is entered when the body is
decoded, below the middleware and inside the transaction, and left when the handler has ended, however it has: what its
providers opened is closed before the message is settled. A handler without such parameters has no scope, and pays
nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

try:
    from dishka import AsyncContainer, DependencyKey, FromDishka, Provider, Scope, from_context
    from dishka.integrations.base import default_parse_dependency
except ImportError as error:
    raise ImportError("dependencies by dishka need it: pip install 'streamfw[dishka]'") from error

from streamfw.handler import MessageBatch
from streamfw.message import Message

if TYPE_CHECKING:
    from dishka.registry import Registry

    from streamfw.app import App

__all__ = ["FromDishka", "MessageProvider", "setup_dishka"]


class MessageProvider(Provider):
    """Lets providers of the REQUEST scope take the `Message` that is handled, or the `MessageBatch` of a batch."""

    message = from_context(Message, scope=Scope.REQUEST)
    batch = from_context(MessageBatch, scope=Scope.REQUEST)


def setup_dishka(container: AsyncContainer, app: App) -> None:
    """Fill the parameters of `app`'s handlers that dishka marks (``FromDishka[..]``) from `container`.

    Before the app is built, which finds what the container does not provide. The container stays its maker's: close it
    where the lifespan of the app, or of the web application it is shared with, ends. Raises `TypeError` for a container
    that is not async.
    """
    given: Any = container
    if not isinstance(given, AsyncContainer):
        raise TypeError(f"handlers need a container of make_async_container(), not {given!r}")
    app.inject(_DishkaInjector(container))


class _DishkaInjector:
    """A `streamfw.injection.Injector`."""

    def __init__(self, container: AsyncContainer) -> None:
        self._container = container

    def key(self, parameter: inspect.Parameter, hint: Any) -> DependencyKey | None:
        key = default_parse_dependency(parameter, hint)
        if key is not None and not any(registry.get_factory(key) for registry in self._registries()):
            component = f" in component {key.component!r}" if key.component else ""
            raise LookupError(f"the container provides no {key.type_hint!r}{component}, up to its REQUEST scope")
        return key

    def _registries(self) -> Iterator[Registry]:
        """Those that a scope of a message can ask: of the container, those above it, and the next below."""
        above: AsyncContainer | None = self._container
        while above is not None:
            yield above.registry
            above = above.parent_container
        below = self._container.registry.child_registry
        while below is not None:
            yield below
            if not below.scope.skip:
                return
            below = below.child_registry

    async def call(
        self,
        message: Message | MessageBatch,
        keys: Sequence[DependencyKey],
        handler: Callable[[Sequence[object]], Awaitable[object]],
    ) -> object:
        kind = MessageBatch if isinstance(message, MessageBatch) else Message
        async with self._container({kind: message}) as scope:
            return await handler([await scope.get(key.type_hint, key.component) for key in keys])
