"""The command line itself, finding an app, and ``streamfw check``."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from importlib.metadata import EntryPoint, version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from streamfw import config
from streamfw.broker import Broker, Capabilities, Connection
from streamfw.cli.guarantees import guarantees
from streamfw.cli.program import program

SHOP = """
from streamfw import App, Batch, subscriber

@subscriber("orders", workers=4, ordered_by="key", attempts=5)
async def ship(order: dict) -> None: ...

@subscriber("bills", dead_letter=None, group="accounts")
async def bill(order: dict) -> None: ...

class Own:
    name = "own"
    def __repr__(self):
        return "Own('own')"

@subscriber(Own())
async def own(order: dict) -> None: ...

app = App(ship, bill, name="shop")
empty = App()
audited = App(ship, name="shop", brokers={"audit": "memory://audit"})

@audited.subscriber("audit", broker="audit")
async def audit(order: dict) -> None: ...

ours = App(own)
wrong = App(ship)

@wrong.subscriber("a", workers=0)
async def first(body: int, more: int) -> None: ...

@wrong.subscriber("b", broker="nowhere")
async def second(body: int) -> None: ...

@subscriber("paid", transactional=True)
async def pay(order: dict) -> None: ...
kept = App(ship, bill, pay, name="shop", brokers={"default": "postgres://localhost/x"})

class Holder:
    app = app
"""


class PoorBroker(Broker):
    """Can be named and built on, and does nothing by itself."""

    capabilities = Capabilities(delay=1.0)

    def __init__(self, url: str) -> None:
        super().__init__(url)

    def connect(self) -> AbstractAsyncContextManager[Connection]:
        raise AssertionError("nobody connects to check")


_numbers = itertools.count()
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module with apps, where the command runs. Each test has one of its own."""
    name = f"shop{next(_numbers)}"
    (tmp_path / f"{name}.py").write_text(SHOP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("COLUMNS", "200")  # so that no cell is wrapped
    for variable in ("STREAMFW_CONFIG", "STREAMFW_BROKERS__DEFAULT__URL"):
        monkeypatch.delenv(variable, raising=False)
    yield name
    sys.modules.pop(name, None)


@pytest.fixture
def run() -> Run:
    runner = CliRunner()

    def run(*arguments: str) -> tuple[int, str, str]:
        result = runner.invoke(program, list(arguments), catch_exceptions=False)
        return result.exit_code, result.stdout, result.stderr

    return run


def rows(text: str) -> list[list[str]]:
    """The cells of each line."""
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in text.splitlines()]


# -- the command line


def test_version(run: Run) -> None:
    assert run("--version") == (0, f"streamfw {version('streamfw')}\n", "")


def test_help_names_every_command(run: Run) -> None:
    code, text, _ = run("--help")
    assert code == 0
    for command in ("run", "check", "publish", "dlq", "postgres"):
        assert f" {command} " in text


def test_importing_streamfw_imports_no_command_line() -> None:
    code = "import streamfw, streamfw.cli, sys; print([m for m in ('typer', 'rich', 'click') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_a_missing_extra_names_itself(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from streamfw.cli import main; main(['--version'])"
    ended = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=False)
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert ended.stderr == (
        f"streamfw: the command line needs {missing}; install it with: pip install 'streamfw[cli]'\n"
    )


# -- finding the app


def test_the_module_is_found_where_the_command_runs(run: Run, module: str) -> None:
    assert run("check", f"{module}:app")[0] == 0
    assert run("check", f"{module}:Holder.app")[0] == 0


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("{m}:ap", "has no 'ap'; Apps in it: app, empty, audited, ours, wrong, kept; did you mean 'app'?"),
        ("{m}:ship", "{m}:ship is a function, not an App; Apps in it: app, empty"),
        ("{m}:Own", "{m}:Own is a type, not an App"),
        ("{m}:Holder.other", "has no 'Holder.other'"),
        ("{m}", "names a module; name the app in it, too: {m}:app or {m}:empty"),
        ("{m}:", "names a module; name the app in it, too: {m}:app"),
        ("{m}x:app", "there is no module '{m}x' in "),
        ("{m}x:app", "did you mean '{m}'?"),
        ("{m}.py:app", "is a path; name the module, as an import does: {m}:app"),
        ("./src/{m}.py:app", "is a path; name the module, as an import does: src.{m}:app"),
        ("{m}.below:app", "there is no module '{m}.below'"),
        ("no such:app", "'no such:app' is not of the form module:app"),
        (":app", "':app' is not of the form module:app"),
    ],
)
@pytest.mark.parametrize("command", ["run", "check"])
def test_what_is_not_there(run: Run, module: str, command: str, target: str, said: str) -> None:
    code, out, error = run(command, target.format(m=module))
    assert (code, out) == (1, "")
    assert said.format(m=module) in error
    assert error.startswith("error: ")


def test_a_module_that_lies_elsewhere(run: Run, module: str, tmp_path: Path) -> None:
    for path in ("src/zebra.py", "parts/__init__.py", "parts/panda.py", "lib/okapi/__init__.py", "lib/gnu/data.txt"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("")
    said = {name: run("check", f"{name}:app")[2] for name in ("zebra", "panda", "okapi", "gnu")}
    assert "; it is in src/: run the command there, or set PYTHONPATH=src\n" in said["zebra"]
    assert "; did you mean 'parts.panda'?" in said["panda"]
    assert "; it is in lib/: " in said["okapi"]
    assert said["gnu"].endswith("or where Python looks\n")
    assert "did you mean 'parts.panda'?" in run("check", "parts.pand:app")[2]


def test_what_is_misspelt_gets_a_proposal(run: Run) -> None:
    assert "Did you mean 'check'?" in run("chek")[2]
    assert "Did you mean 'requeue'?" in run("dlq", "reqeue")[2]
    assert "--workers" in run("run", "a:b", "--worker", "2")[2]


def test_a_module_without_an_app(run: Run, module: str, tmp_path: Path) -> None:
    (tmp_path / f"{module}_none.py").write_text("app = 3")
    assert "is an int, not an App; there is no App in it" in run("check", f"{module}_none:app")[2]
    assert "there is no App in it" in run("check", f"{module}_none")[2]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import nothing_like_it", "failed: ModuleNotFoundError: No module named 'nothing_like_it'"),
        ("PASSWORD = 'hidden'; 1 / 0", "failed: ZeroDivisionError: division by zero"),
        ("raise SystemExit('not now')", "failed: SystemExit: not now"),
        ("if True\n    pass", "failed: SyntaxError: expected ':'"),
    ],
)
def test_a_module_that_fails(run: Run, module: str, tmp_path: Path, source: str, said: str) -> None:
    """Where it failed is said, and no line of the source, which may hold a password."""
    (tmp_path / f"{module}_bad.py").write_text(source)
    code, _, error = run("check", f"{module}_bad:app")
    assert code == 1
    assert said in error
    assert f"{module}_bad.py:1" in error
    assert "Traceback" not in error
    assert "hidden" not in error


def test_an_error_of_ours_in_a_module_is_told_as_it_is(run: Run, module: str, tmp_path: Path) -> None:
    source = "from streamfw import ConfigError; raise ConfigError('brokers.default.url', 'is wrong')"
    (tmp_path / f"{module}_bad.py").write_text(source)
    assert run("check", f"{module}_bad:app") == (1, "", "error: brokers.default.url: is wrong\n")


# -- check


def test_check_shows_the_subscribers(run: Run, module: str) -> None:
    code, text, error = run("check", f"{module}:app")
    assert (code, error) == (0, "")
    cells = rows(text)
    assert ["ship", "orders", "shop", "memory://", "4", "by key", "no", "5", "orders.dead"] in cells
    assert ["bill", "bills", "accounts", "memory://", "1", "none", "no", "no limit", "none: discarded"] in cells
    assert "bill: dead_letter=None, so what fails for good is discarded." in text


def test_check_says_what_is_guaranteed(run: Run, module: str) -> None:
    text = run("check", f"{module}:app")[1]
    assert "Guarantees on memory:// for ship, bill" in text
    assert "messages are in memory and die with it" in text
    assert "over all processes of a group, by key" in text
    assert "16,777,216 bytes" in text


def test_each_broker_has_its_guarantees(run: Run, module: str) -> None:
    text = run("check", f"{module}:audited")[1]
    assert "Guarantees on memory:// for ship" in text
    assert "Guarantees on audit: memory://audit for audit" in text


def test_an_app_without_subscribers(run: Run, module: str) -> None:
    assert run("check", f"{module}:empty") == (0, f"{module}:empty has no subscribers.\n", "")


def test_check_tells_every_mistake(run: Run, module: str) -> None:
    code, out, error = run("check", f"{module}:wrong")
    assert (code, out) == (1, "")
    lines = error.splitlines()
    assert lines[0] == f"error: {module}:wrong cannot be built; 3 mistakes:"
    assert lines[1].startswith("  1. first('a'): workers: 0 is below 1")
    assert lines[2].startswith("  2. first('a'): parameters 'body' and 'more' both look like the body")
    assert lines[3].startswith("  3. second('b'): there is no broker 'nowhere'")


def test_check_tells_a_mistake_of_the_configuration(run: Run, module: str, tmp_path: Path) -> None:
    (tmp_path / "streamfw.toml").write_text("drain_timeot = 3")
    code, _, error = run("check", f"{module}:app")
    assert code == 1
    assert "1. drain_timeot: unknown option; did you mean 'drain_timeout'?" in error


def test_who_could_move(run: Run, module: str) -> None:
    code, text, _ = run("check", f"{module}:audited", "--broker", "memory://user:hidden@there")
    assert "hidden" not in text
    assert code == 0
    cells = rows(text)
    assert ["ship", "orders", "yes"] in cells
    assert ["audit", "audit", "stays", "is on broker 'audit', not the default"] in cells
    assert "Moving to memory://user@there" in text
    assert "Guarantees on memory://user@there for ship" in text


def test_the_configured_options_stay_with_their_kind_of_broker(
    run: Run, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A URL is all that a swap takes: what only the configured kind has does not come along."""
    (tmp_path / "streamfw.toml").write_text("[brokers.default]\nurl = 'postgres://localhost/shop'\npool_size = 3\n")
    assert run("check", f"{module}:app", "--broker", "memory://")[0] == 0
    del sys.modules[module]
    (tmp_path / "streamfw.toml").write_text("[brokers.default]\nurl = 'memory://'\nmax_body = 33\n")
    assert "33 bytes" in run("check", f"{module}:app", "--broker", "memory://other")[1]


def test_a_move_says_what_would_change(run: Run, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To a broker that keeps less: neither order, nor transactions, nor counts across a crash."""
    point = EntryPoint("poor", f"{__name__}:PoorBroker", "streamfw.brokers")
    schemes = {**config.schemes(), "poor": point}
    monkeypatch.setattr(config, "schemes", lambda: schemes)
    code, text, error = run("check", f"{module}:kept", "--broker", "poor://user:hidden@there")
    assert code == 1
    assert "hidden" not in text + error
    cells = rows(text)
    assert ["ship", "orders", "no", "ordered_by='key': the broker keeps no order over a group of processes"] in cells
    assert ["pay", "paid", "no", "transactional=True: the broker has no transactions"] in cells
    assert ["bill", "bills", "yes"] in cells
    _, of_ship, of_bill, of_pay = text.split("What would change for ")
    key, where = "on postgres://localhost/x", "on poor://user@there"
    assert of_ship.startswith("ship\n") and [key, where] in rows(of_ship)
    ordered = "over all processes of a group, by key, where ordered_by= asks for it"
    assert ["order", ordered, "lost: messages of one key could overtake each other"] in rows(of_ship)
    assert "deliveries are counted by the broker, also across a crash" in of_ship
    assert "transactions" not in of_ship
    counted = "counted by the broker: a crash does not start the count again"
    assert ["attempts", counted, "counted in this process: a crash starts the count again"] in rows(of_bill)
    assert "lost: " not in of_bill
    assert "lost: a crash between the handler's commit" in of_pay


def test_a_move_that_changes_nothing(run: Run, module: str) -> None:
    text = run("check", f"{module}:app", "--broker", "memory://there")[1]
    assert "Nothing would change for ship, bill." in text


def test_attempts_of_ordered_subscribers_on_postgres(run: Run, module: str) -> None:
    code, text, error = run("check", f"{module}:kept")
    assert (code, error) == (0, "")
    assert ["pay", "paid", "shop", "postgres://localhost/x", "1", "none", "yes", "no limit", "paid.dead"] in rows(text)
    of_ship, of_others = text.split("Guarantees on postgres://localhost/x for ")[1:]
    assert of_ship.startswith("ship\n")
    assert "deliveries are counted by the broker, also across a crash" in of_ship
    assert "an ordered message waits for its retry in" in of_ship
    assert of_others.startswith("bill, pay\n")
    assert "counted by the broker: a crash does not start the count again" in of_others


def test_a_broker_that_is_not_installed(run: Run, module: str) -> None:
    code, text, error = run("check", f"{module}:app", "--broker", "nowhere://user:hidden@host")
    assert code == 1
    assert "1. brokers.default.url: 'nowhere://user@host' has no known scheme" in error
    assert "unknown" in text
    assert "hidden" not in text + error


_KINDS = [
    Capabilities(),
    Capabilities(settlement="grouped", retry=True, attempts="durable", dead_letter=True, delay=0.05, kept=False),
    Capabilities(settlement="positional", ordered_by=frozenset({"key", "partition"}), delay=1.0, max_body=1_000_000),
    Capabilities(settlement="sent", transactions=True),
    Capabilities(settlement="positional", retry=True, retry_after=300.0),
]


def test_guarantees_follow_the_capabilities() -> None:
    words = [dict(guarantees(kind)) for kind in _KINDS]
    assert [one["settlement"].partition(":")[0] for one in words] == [
        "at once", "in groups", "by position", "sent", "by position",
    ]  # fmt: skip
    assert [one["delays"] for one in words] == [
        "no delayed publishing",
        "never early, and late by about 50 ms at most while the consumers keep up",
        "never early, and late by about 1 s at most while the consumers keep up",
        "no delayed publishing",
        "no delayed publishing",
    ]
    assert "a crash starts the count again" in words[0]["attempts"]
    assert "does not start the count again" in words[1]["attempts"]
    assert "kept in this process" in words[0]["retries"]
    assert "given back" in words[1]["retries"]
    assert words[4]["retries"].startswith("from pauses of 300 s on given back to the broker: any process")
    assert "; shorter ones are kept in this process" in words[4]["retries"]
    assert "kept with a message that is given back for its pause" in words[4]["attempts"]
    assert dict(guarantees(_KINDS[4], in_memory=True))["attempts"] == words[0]["attempts"]
    assert words[0]["order"] == "none over the processes of a group"
    assert "by key or partition" in words[2]["order"]
    assert words[0]["transactions"] == "none"
    assert "transactional=True" in words[3]["transactions"]
    assert "in one step" in words[1]["dead letters"]
    assert "a crash in between leaves both" in words[0]["dead letters"]
    assert "Unroutable" in words[1]["first publish"]
    assert "1,000,000 bytes" in words[2]["largest body"]
    assert all("also after a crash" in one["delivery"] for one in words)
