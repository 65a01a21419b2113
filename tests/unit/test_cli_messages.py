"""``streamfw publish`` and ``streamfw dlq``, on a broker whose messages outlive a command."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar
from uuid import UUID

import pytest
from typer.testing import CliRunner

from streamfw import config
from streamfw.broker import Broker, Connection
from streamfw.cli.program import program
from streamfw.errors import BrokerUnavailable
from streamfw.memory import MemoryBroker
from streamfw.message import ERROR, ORIGIN, ORIGIN_ATTEMPT, ORIGIN_GROUP, Headers, Message, Outgoing

_numbers = itertools.count()


class KeptBroker(Broker):
    """A memory broker as another package might register it: its messages are kept in this process, beyond commands."""

    capabilities = MemoryBroker.capabilities
    stores: ClassVar[dict[str, MemoryBroker]] = {}

    def __init__(self, url: str, *, max_body: int = 1000) -> None:
        super().__init__(url)
        self._store = self.stores.setdefault(url, MemoryBroker(max_body=max_body))

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Connection]:
        if self.url.endswith("away"):
            raise BrokerUnavailable(f"{self.describe()} does not answer")
        async with self._store.connect() as connection:
            yield connection


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a broker of the test's own."""
    point = EntryPoint("kept", f"{__name__}:KeptBroker", "streamfw.brokers")
    schemes = {**config.schemes(), "kept": point}
    monkeypatch.setattr(config, "schemes", lambda: schemes)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("COLUMNS", "200")  # so that no cell is wrapped
    for variable in ("STREAMFW_CONFIG", "STREAMFW_BROKERS__DEFAULT__URL"):
        monkeypatch.delenv(variable, raising=False)
    name = f"kept://user:hidden@{next(_numbers)}"
    yield name
    KeptBroker.stores.pop(name, None)


@pytest.fixture
def run() -> Run:
    runner = CliRunner()

    def run(*arguments: str, stdin: bytes | str = b"") -> tuple[int, str, str]:
        result = runner.invoke(program, list(arguments), catch_exceptions=False, input=stdin)
        assert "hidden" not in result.output
        return result.exit_code, result.stdout, result.stderr

    return run


def kept(url: str, name: str) -> Sequence[Message]:
    """What waits at a name."""

    async def look() -> Sequence[Message]:
        async with KeptBroker(url).connect() as connection:
            return await (await connection.dead_letters(name)).list()

    return asyncio.run(look())


def put(url: str, *messages: Outgoing) -> None:
    async def publish() -> None:
        async with KeptBroker(url).connect() as connection:
            assert not await connection.publish(messages)

    asyncio.run(publish())


# -- publish


def test_publish_prints_the_id(run: Run, url: str) -> None:
    code, out, error = run("publish", "orders", '{"id": 1}', "--broker", url)
    assert (code, error) == (0, "")
    assert UUID(out.strip()).version == 7
    (message,) = kept(url, "orders")
    assert (message.message_id, message.body) == (out.strip(), b'{"id": 1}')
    assert (message.key, message.headers.pairs) == (None, ())


def test_publish_with_everything(run: Run, url: str) -> None:
    options = ["--key", "k", "--header", "tenant=a=b", "--header", "empty=", "--message-id", "7", "--delay", "0.001"]
    assert run("publish", "orders", "x", "--broker", url, *options) == (0, "7\n", "")
    (message,) = kept(url, "orders")
    assert (message.message_id, message.key) == ("7", "k")
    assert message.headers.pairs == (("tenant", b"a=b"), ("empty", b""))


def test_the_body_from_stdin_a_file_or_nowhere(run: Run, url: str, tmp_path: Path) -> None:
    (tmp_path / "body").write_bytes(b"\x00\xff")
    assert run("publish", "orders", "-", "--broker", url, stdin=b"\xfe\n")[0] == 0
    assert run("publish", "orders", f"@{tmp_path / 'body'}", "--broker", url)[0] == 0
    assert run("publish", "orders", "--broker", url)[0] == 0
    assert [message.body for message in kept(url, "orders")] == [b"\xfe\n", b"\x00\xff", b""]


def test_count_publishes_in_order(run: Run, url: str) -> None:
    code, out, _ = run("publish", "orders", "x", "--broker", url, "--count", "2500")
    assert code == 0
    ids = out.split()
    assert len(set(ids)) == 2500

    async def look() -> list[str]:
        async with KeptBroker(url).connect() as connection:
            return [m.message_id for m in await (await connection.dead_letters("orders")).list(3000)]

    assert asyncio.run(look()) == ids


def test_the_configured_broker(run: Run, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "streamfw.toml").write_text(f'[brokers.default]\nurl = "{url}"\nmax_body = 3\n')
    assert run("publish", "orders", "abc")[0] == 0
    assert run("publish", "orders", "abcd")[0] == 1
    monkeypatch.setenv("STREAMFW_BROKERS__DEFAULT__URL", f"{url}-other")
    assert run("publish", "orders", "abc")[0] == 0
    assert len(kept(url, "orders")) == len(kept(f"{url}-other", "orders")) == 1


def test_the_broker_of_an_app(run: Run, url: str, tmp_path: Path) -> None:
    name = f"publishing{next(_numbers)}"
    (tmp_path / f"{name}.py").write_text(f"from streamfw import App\napp = App(brokers={{'default': '{url}'}})")
    assert run("publish", "orders", "abc", "--app", f"{name}:app")[0] == 0
    assert len(kept(url, "orders")) == 1


def test_a_refusal_is_told(run: Run, url: str) -> None:
    code, out, error = run("publish", "orders", "x" * 1001, "--broker", url, "--message-id", "7")
    assert (code, out) == (1, "")
    assert error.startswith("error: not published: TooLarge: the body is too large")
    assert "1001 bytes" in error
    assert "(message 7 to 'orders')" in error


def test_many_refusals_are_counted(run: Run, url: str) -> None:
    code, out, error = run("publish", "orders", "x" * 1001, "--broker", url, "--count", "30")
    assert (code, out) == (1, "")
    assert error.startswith("error: 30 of 30 messages were not accepted, the first 10 are:\n  1. the body")
    assert "\n  10. " in error
    assert "\n  11. " not in error


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["", "x"], "NAME is empty"),
        (["orders", "x", "--header", "tenant"], "--header 'tenant': name=value is needed"),
        (["orders", "x", "--header", "=a"], "--header '=a': name=value is needed"),
        (["orders", "x", "--count", "2", "--message-id", "7"], "--message-id names one message"),
        (["orders", "x", "--app", "shop:app"], "--app and --broker both say where"),
        (["orders", "@nothing-here"], "'nothing-here' cannot be read: No such file or directory"),
    ],
)
def test_what_cannot_be_published(run: Run, url: str, arguments: list[str], said: str) -> None:
    code, out, error = run("publish", *arguments, "--broker", url)
    assert (code, out) == (1, "")
    assert said in error
    assert not kept(url, "orders")


def test_a_wrong_number_is_a_wrong_command_line(run: Run, url: str) -> None:
    assert run("publish", "orders", "x", "--broker", url, "--delay", "-1")[0] == 2
    assert run("publish", "orders", "x", "--broker", url, "--delay", "nan")[0] == 2
    assert run("publish", "orders", "x", "--broker", url, "--count", "0")[0] == 2


@pytest.mark.parametrize("command", [["publish", "orders", "x"], ["dlq", "list", "orders.dead"]])
def test_which_broker(run: Run, url: str, command: list[str]) -> None:
    code, _, error = run(*command)
    assert code == 1
    assert "no broker is configured: give --broker URL, set STREAMFW_BROKERS__DEFAULT__URL" in error
    code, _, error = run(*command, "--broker", "memory://")
    assert code == 1
    assert "memory://: its messages live in one process, and this command's ends at once" in error
    code, _, error = run(*command, "--broker", "nowhere://user:hidden@host")
    assert code == 1
    assert "'nowhere://user@host' has no known scheme; installed brokers: " in error
    assert "kept://, memory://" in error
    code, _, error = run(*command, "--broker", f"{url}-away")
    assert code == 1
    assert error == f"error: kept://user@{url.rpartition('@')[2]}-away does not answer\n"


# -- dead letters


def letter(number: int, body: bytes = b"{}", **headers: str | bytes) -> Outgoing:
    own = {
        "streamfw-error": "ValueError: no such item",
        "streamfw-error-type": "ValueError",
        "streamfw-origin": "orders",
        "streamfw-origin-group": "shop",
        "streamfw-origin-attempt": "5",
    }
    return Outgoing(name="orders.dead", body=body, message_id=str(number), key="k", headers=Headers({**own, **headers}))


def test_an_empty_name(run: Run, url: str) -> None:
    assert run("dlq", "list", "orders.dead", "--broker", url) == (0, "orders.dead is empty.\n", "")
    assert run("dlq", "show", "orders.dead", "--broker", url) == (0, "orders.dead is empty.\n", "")
    assert run("dlq", "requeue", "orders.dead", "--broker", url, "--all") == (0, "0 put back.\n", "")


def test_list(run: Run, url: str) -> None:
    put(url, *(letter(number) for number in range(3)))
    code, out, _ = run("dlq", "list", "orders.dead", "--broker", url)
    assert code == 0
    lines = [line.split() for line in out.splitlines() if "no such item" in line]
    assert [line[0] for line in lines] == ["0", "1", "2"]
    assert lines[0][3:] == ["orders", "(group", "shop)", "5", "ValueError:", "no", "such", "item"]
    code, out, _ = run("dlq", "list", "orders.dead", "--broker", url, "--limit", "2")
    assert out.count("no such item") == 2
    assert "There are more than these 2" in out


def test_show(run: Run, url: str) -> None:
    put(
        url,
        letter(0, b'{"b": [1, "\xc3\xa9"]}', tenant="a", odd=b"\xff"),
        letter(1, b"not [bold]json\x1b[2J"),
        letter(2, b"\xff\x00"),
    )
    code, out, _ = run("dlq", "show", "orders.dead", "--broker", url)
    assert code == 0
    shown = out[out.index("{") :]
    assert json.loads(shown) == {"b": [1, "é"]}
    assert shown.count("\n") > 4
    assert "header tenant   a" in out
    assert "header odd      b'\\xff'" in out
    assert "ValueError: no such item" in out
    code, out, _ = run("dlq", "show", "orders.dead", "--broker", url, "--id", "2", "--id", "1")
    assert code == 0
    assert "not [bold]json\\x1b[2J\n" in out
    assert "\x1b" not in out
    assert "b'\\xff\\x00'\n" in out


NASTY = "[bold]:warning:[/bold]\x1b[31m\nforged 2026-01-01"
SHOWN = "[bold]:warning:[/bold]\\x1b[31m\\nforged 2026-01-01"


@pytest.mark.parametrize("verb", ["list", "show"])
def test_what_somebody_else_wrote_is_shown_as_it_is_in_one_line(
    run: Run, url: str, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "500")
    headers = dict.fromkeys((ERROR, ORIGIN, ORIGIN_GROUP, ORIGIN_ATTEMPT, NASTY), NASTY)
    put(url, Outgoing(name="orders.dead", body=b"{}", message_id=NASTY, key=NASTY, headers=Headers(headers)))
    code, out, error = run("dlq", verb, "orders.dead", "--broker", url)
    assert (code, error) == (0, "")
    assert out.count(SHOWN) == {"list": 5, "show": 8}[verb]
    assert "\x1b" not in out
    assert not [line for line in out.splitlines() if line.lstrip().startswith("forged")]


def test_an_error_that_quotes_what_somebody_wrote_drives_no_terminal(run: Run, url: str) -> None:
    code, _, error = run("dlq", "show", "orders.dead", "--broker", url, "--id", "\x1b[31m9[/bold]")
    assert (code, error) == (1, "error: not in orders.dead: \\x1b[31m9[/bold]\n")


def test_show_what_is_not_there(run: Run, url: str) -> None:
    put(url, letter(0))
    code, out, error = run("dlq", "show", "orders.dead", "--broker", url, "--id", "0", "--id", "9")
    assert code == 1
    assert "{}" in out
    assert error == "error: not in orders.dead: 9\n"


def test_requeue(run: Run, url: str) -> None:
    put(url, *(letter(number, tenant="a") for number in range(4)))
    assert run("dlq", "requeue", "orders.dead", "--broker", url, "--id", "1", "--id", "1") == (0, "1 put back.\n", "")
    assert [m.message_id for m in kept(url, "orders.dead")] == ["0", "2", "3"]
    (back,) = kept(url, "orders")
    assert (back.message_id, back.headers.pairs) == ("1", (("tenant", b"a"),))
    code, out, error = run("dlq", "requeue", "orders.dead", "--broker", url, "--id", "1", "--id", "2")
    assert (code, out) == (1, "1 put back.\n")
    assert "1 of 2 ids could not be put back: not in orders.dead (any more)" in error
    assert run("dlq", "requeue", "orders.dead", "--broker", url, "--all")[1] == "2 put back.\n"
    assert len(kept(url, "orders")) == 4


def test_purge(run: Run, url: str) -> None:
    put(url, *(letter(number) for number in range(4)))
    assert run("dlq", "purge", "orders.dead", "--broker", url, "--id", "1") == (0, "1 discarded.\n", "")
    code, out, _ = run("dlq", "purge", "orders.dead", "--broker", url, "--all", stdin="n\n")
    assert code == 1
    assert "Discard every dead letter in orders.dead?" in out
    assert len(kept(url, "orders.dead")) == 3
    code, out, _ = run("dlq", "purge", "orders.dead", "--broker", url, "--all", stdin="y\n")
    assert (code, out.endswith("3 discarded.\n")) == (0, True)
    put(url, letter(9))
    assert run("dlq", "purge", "orders.dead", "--broker", url, "--all", "--yes") == (0, "1 discarded.\n", "")
    assert not kept(url, "orders.dead")


@pytest.mark.parametrize("verb", ["requeue", "purge"])
def test_which_of_them_must_be_said(run: Run, url: str, verb: str) -> None:
    put(url, letter(0))
    for options in ([], ["--all", "--id", "0"]):
        code, out, error = run("dlq", verb, "orders.dead", "--broker", url, *options)
        assert (code, out) == (1, "")
        assert f"{verb} which? Give --id ID (it may be repeated), or --all; not both" in error
    assert len(kept(url, "orders.dead")) == 1


def test_a_queue_that_is_alive_is_not_purged(run: Run, url: str) -> None:
    put(url, Outgoing(name="orders", body=b"", message_id="1"))
    code, _, error = run("dlq", "purge", "orders", "--broker", url, "--all", "--yes")
    assert code == 1
    assert "1 of the first 1 messages in orders are no dead letters; nothing was discarded" in error
    assert "Did you mean orders.dead?" in error
    assert len(kept(url, "orders")) == 1


def test_a_queue_that_is_alive_is_not_requeued(run: Run, url: str) -> None:
    put(url, Outgoing(name="orders", body=b"", message_id="1"))
    for options in (["--all"], ["--id", "1"]):
        code, out, error = run("dlq", "requeue", "orders", "--broker", url, *options)
        assert (code, out) == (1, "")
        assert "1 of the first 1 messages in orders are no dead letters; nothing was put back" in error
        assert "Did you mean orders.dead?" in error
    code, out, _ = run("dlq", "list", "orders", "--broker", url)
    assert code == 0
    assert "1 of these 1 are no dead letters. Did you mean orders.dead?" in out
    put(url, Outgoing(name="orders.dead", body=b"", message_id="2"))
    code, out, error = run("dlq", "requeue", "orders.dead", "--broker", url, "--id", "2")
    assert (code, out) == (1, "0 put back.\n")
    assert "not in orders.dead (any more), or without an origin to go back to" in error


# -- of one group


def of_groups(url: str) -> None:
    """Message 0 and 1 failed for the shop, 1 and 2 for the bank."""
    bank: dict[str, Any] = {"streamfw-origin-group": "bank"}
    put(url, letter(0), letter(1), letter(1, **bank), letter(2, **bank))


def test_the_letters_of_one_group(run: Run, url: str) -> None:
    of_groups(url)
    code, out, _ = run("dlq", "list", "orders.dead", "--broker", url, "--group", "bank")
    assert [line.split()[0] for line in out.splitlines() if "no such item" in line] == ["1", "2"]
    assert "group shop" not in out
    assert run("dlq", "list", "orders.dead", "--broker", url, "--group", "bnak")[1] == (
        "orders.dead has no dead letters of group bnak.\n"
    )
    code, out, _ = run("dlq", "show", "orders.dead", "--broker", url, "--group", "bank", "--id", "1")
    assert code == 0 and out.count("group bank") == 1 and "shop" not in out
    options = ["orders.dead", "--broker", url, "--group"]
    assert run("dlq", "requeue", *options, "bank", "--id", "2", "--id", "0") == (
        1,
        "1 put back.\n",
        "error: 1 of 2 ids could not be put back: not in orders.dead (any more)\n",
    )
    assert run("dlq", "purge", *options, "shop", "--id", "0") == (0, "1 discarded.\n", "")
    assert run("dlq", "purge", *options, "nobody", "--all", "--yes") == (0, "0 discarded.\n", "")
    assert len(kept(url, "orders.dead")) == 2


@pytest.mark.parametrize("verb", [["requeue"], ["purge", "--yes"]])
def test_one_id_of_several_groups_is_not_taken_for_one(run: Run, url: str, verb: list[str]) -> None:
    """This broker takes letters by their id."""
    of_groups(url)
    for which in (["--all"], ["--id", "1"]):
        which = [word for word in verb if word != "--yes" or which == ["--all"]] + which
        code, out, error = run("dlq", *which, "orders.dead", "--broker", url, "--group", "bank")
        assert (code, out) == (1, "")
        assert "ids are here for other groups as well" in error and "The first: 1, of bank, shop" in error
    assert len(kept(url, "orders.dead")) == 4


def test_letters_of_several_groups_are_told(run: Run, url: str) -> None:
    of_groups(url)
    said = "2 discarded, of 2 groups: bank, shop.\n"
    assert run("dlq", "purge", "orders.dead", "--broker", url, "--id", "1") == (0, said, "")
