"""Vhosts for tests: each with a user that may do everything in it, and nothing elsewhere."""

from __future__ import annotations

import base64
import json
import secrets
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from pathlib import Path
from urllib.parse import quote, urlsplit

from ._rabbit_control import RabbitServerError, evaluate, term

__all__ = ["ByControl", "ByManagement", "Manager", "new_password", "permissions"]

_ACTOR = term("streamfw tests")


class Manager(ABC):
    """Makes and deletes vhosts and users of a server."""

    @abstractmethod
    def create(self, vhost: str, user: str, password: str) -> None:
        """Make a vhost, and a user with all rights to it alone."""

    @abstractmethod
    def delete(self, vhost: str, user: str) -> None:
        """Delete both, with what is connected to the vhost."""


class ByControl(Manager):
    """On a node that was started here: 15 ms to make one, 20 ms and more to delete it."""

    def __init__(self, home: Path) -> None:
        self._home = home

    def create(self, vhost: str, user: str, password: str) -> None:
        evaluate(
            self._home,
            f"ok = rabbit_vhost:add({term(vhost)}, {_ACTOR}),"
            f"ok = rabbit_auth_backend_internal:add_user({term(user)}, {term(password)}, {_ACTOR}),"
            + permissions(vhost, user, ".*", ".*", ".*"),
        )

    def delete(self, vhost: str, user: str) -> None:
        evaluate(
            self._home,
            f"rabbit_vhost:delete({term(vhost)}, {_ACTOR}),"
            f"rabbit_auth_backend_internal:delete_user({term(user)}, {_ACTOR})",
        )


def permissions(vhost: str, user: str, configure: str, write: str, read: str) -> str:
    """The expression that sets what a user may do in a vhost."""
    rights = ", ".join(term(each) for each in (configure, write, read))
    return f"ok = rabbit_auth_backend_internal:set_permissions({term(user)}, {term(vhost)}, {rights}, {_ACTOR})"


class ByManagement(Manager):
    """On any server, by the HTTP interface of its management plugin: ``http://user:password@host:15672``."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._base = f"{parts.scheme}://{parts.hostname}:{parts.port}/api"
        login = f"{parts.username or 'guest'}:{parts.password or 'guest'}"
        self._login = "Basic " + base64.b64encode(login.encode()).decode()

    def create(self, vhost: str, user: str, password: str) -> None:
        self._ask("PUT", f"vhosts/{quote(vhost, '')}", {})
        self._ask("PUT", f"users/{quote(user, '')}", {"password": password, "tags": ""})
        rights = {"configure": ".*", "write": ".*", "read": ".*"}
        self._ask("PUT", f"permissions/{quote(vhost, '')}/{quote(user, '')}", rights)

    def delete(self, vhost: str, user: str) -> None:
        self._ask("DELETE", f"vhosts/{quote(vhost, '')}", None)
        self._ask("DELETE", f"users/{quote(user, '')}", None)

    def _ask(self, method: str, path: str, body: dict[str, str] | None) -> None:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": self._login, "Content-Type": "application/json"}
        request = urllib.request.Request(f"{self._base}/{path}", data, headers, method=method)
        try:
            urllib.request.urlopen(request, timeout=30).close()
        except urllib.error.HTTPError as error:
            with error:
                raise RabbitServerError(f"{method} {self._base}/{path} was answered {error.code}") from None
        except OSError as error:
            raise RabbitServerError(f"{method} {self._base}/{path} had no answer: {error}") from None


def new_password() -> str:
    """A password that has to be quoted in a URL."""
    return f"{secrets.token_urlsafe(12)}:/@%"
