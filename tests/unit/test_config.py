"""Where settings come from, who wins, and what a wrong one says."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote

import pytest

from streamfw import App, Broker, ConfigError, Connection
from streamfw import config as config_module
from streamfw.config import WrongOptions, load, make_broker, near, options_for, read
from streamfw.memory import MemoryBroker

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(text: str) -> Path:
        path = tmp_path / "streamfw.toml"
        path.write_text(text)
        return path

    return written


def wrong(path: Path | None = None, **environ: str) -> list[str]:
    """Every mistake of file and environment, as text."""
    return [str(error) for error in read(path, {f"STREAMFW_{key}": value for key, value in environ.items()})[1]]


def test_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = load(environ={})
    assert (settings.name, settings.drain_timeout, settings.wait, settings.uvloop) == ("default", 30.0, None, True)
    assert (settings.brokers, settings.subscribers) == ({}, {})


def test_the_file_where_the_process_runs(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(write('name = "shop"').parent)
    assert load(environ={}).name == "shop"


def test_another_file(write: Write) -> None:
    path = write('name = "shop"')
    assert load(environ={"STREAMFW_CONFIG": str(path)}).name == "shop"
    assert load(path, {"STREAMFW_CONFIG": "nowhere.toml"}).name == "shop", "the argument wins"


def test_precedence(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write('name = "file"\ndrain_timeout = 1\nwait = 1\n[brokers.default]\nurl = "memory://file"\nmax_body = 1')
    monkeypatch.setenv("STREAMFW_NAME", "environment")
    monkeypatch.setenv("STREAMFW_DRAIN_TIMEOUT", "2.5")
    monkeypatch.setenv("STREAMFW_BROKERS__DEFAULT__MAX_BODY", "2")
    settings = App(config=path).settings
    assert (settings.name, settings.drain_timeout, settings.wait) == ("environment", 2.5, 1.0)
    app = App(config=path, name="argument", drain_timeout=3, brokers={"default": "memory://argument"})
    assert (app.settings.name, app.settings.drain_timeout) == ("argument", 3)
    broker = app.broker()
    assert isinstance(broker, MemoryBroker)
    assert (broker.url, broker.max_body) == ("memory://argument", 2), "a URL by argument keeps the other options"


def test_a_broker_without_url_in_the_file_gets_it_by_argument(write: Write) -> None:
    path = write("[brokers.default]\nmax_body = 7")
    broker = App(config=path, brokers={"default": "memory://"}).broker()
    assert isinstance(broker, MemoryBroker)
    assert broker.max_body == 7
    with pytest.raises(ConfigError, match=r"brokers\.default\.url: the broker's URL is missing"):
        load(path, {})
    with pytest.raises(ExceptionGroup, match=r"brokers\.default\.url: the broker's URL is missing"):
        App(config=path).build()


def test_every_kind_of_value_from_the_environment() -> None:
    settings = load(
        environ={
            "STREAMFW_UVLOOP": "false",
            "STREAMFW_WAIT": "10",
            "STREAMFW_BROKERS__DEFAULT__URL": "memory://",
            "STREAMFW_BROKERS__SECOND__URL": "memory://second",
            "STREAMFW_SUBSCRIBERS__SHIP__WORKERS": "8",
            "STREAMFW_SUBSCRIBERS__SHIP__TIMEOUT": "0.5",
            "STREAMFW_SUBSCRIBERS__SHIP__ENABLED": "0",
            "STREAMFW_SUBSCRIBERS__SHIP__TRANSACTIONAL": "true",
            "OTHER": "x",
        }
    )
    assert (settings.uvloop, settings.wait) == (False, 10.0)
    assert settings.brokers == {"default": {"url": "memory://"}, "second": {"url": "memory://second"}}
    ship = settings.subscribers["ship"]
    assert (ship.workers, ship.timeout, ship.enabled, ship.transactional) == (8, 0.5, False, True)


def test_every_mistake_is_named_by_its_path(write: Write) -> None:
    path = write(
        """
        nmae = "shop"
        drain_timeout = -1
        uvloop = "perhaps"
        [brokers]
        second = "memory://"
        [brokers.third]
        url = 5
        [subscribers.ship]
        workers = "many"
        wokers = 8
        [subscribers.bill]
        timeout = [1]
        """
    )
    assert sorted(wrong(path)) == [
        "brokers.second: is a table, [brokers.second]",
        "brokers.third.url: is text, not int",
        "drain_timeout: -1.0 is no number of seconds, zero or more",
        "nmae: unknown option; did you mean 'name'?",
        "subscribers.bill.timeout: Expected `float | null`, got `array`",
        "subscribers.ship.wokers: unknown option; did you mean 'workers'?",
        "subscribers.ship.workers: Expected `int | null`, got `str`",
        "uvloop: Expected `bool`, got `str`",
    ]
    with pytest.raises(ConfigError, match="nmae"):
        load(path, {})


def test_what_is_right_is_read_all_the_same(write: Write) -> None:
    settings, errors = read(write('name = "shop"\nwait = "x"\n[subscribers.ship]\nworkers = 3\nzzz = 1'), {})
    assert len(errors) == 2
    assert (settings.name, settings.subscribers["ship"].workers) == ("shop", 3)


def test_variables_are_named() -> None:
    assert wrong(NAMEE="x") == ["namee: unknown option; did you mean 'name'? (set by STREAMFW_NAMEE)"]
    assert wrong(WAIT="long") == ["wait: Expected `float | null`, got `str` (set by STREAMFW_WAIT)"]
    assert wrong(WAIT="nan") == ["wait: nan is no number of seconds, zero or more (set by STREAMFW_WAIT)"]
    assert wrong(DRAIN_TIMEOUT="inf") == [
        "drain_timeout: inf is no number of seconds, zero or more (set by STREAMFW_DRAIN_TIMEOUT)"
    ]
    assert wrong(NAME="") == ["name: the name of an app is not empty (set by STREAMFW_NAME)"]
    assert wrong(BROKERS__="x") == ["STREAMFW_BROKERS__: an empty name between underscores"]
    assert wrong(BROKERS="x") == ["brokers: is a table of tables, [brokers.<name>] (set by STREAMFW_BROKERS)"]


def test_variables_and_the_file_disagree_on_what_is_a_table(write: Write) -> None:
    assert wrong(write('name = "shop"'), NAME__SHORT="x") == [
        "STREAMFW_NAME__SHORT: 'name' has a value already, so it is not a table"
    ]
    assert wrong(write('[brokers.default]\nurl = "memory://"'), BROKERS__DEFAULT="memory://") == [
        "STREAMFW_BROKERS__DEFAULT: brokers.default is a table; name what is in it: STREAMFW_BROKERS__DEFAULT__..."
    ]


def test_files_that_cannot_be_read(tmp_path: Path, write: Write) -> None:
    missing = tmp_path / "missing.toml"
    assert wrong(missing) == [f"{missing}: there is no such configuration file"]
    assert wrong(tmp_path) == [f"{tmp_path}: cannot be read: Is a directory"]
    broken = write("name = ")
    (found,) = wrong(broken)
    assert found.startswith(f"{broken}: is not TOML: ")
    broken.write_bytes(b'name = "\xff"')
    assert wrong(broken)[0].startswith(f"{broken}: is not TOML: ")


def test_a_file_that_cannot_be_read_stops_the_build_with_all_else(tmp_path: Path) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        App("orders", config=tmp_path / "missing.toml").build()  # type: ignore[arg-type]
    assert len(caught.value.exceptions) == 2


def test_near() -> None:
    assert near("wrkers", ["workers", "wait"]) == "; did you mean 'workers'?"
    assert near("x", ["workers", "wait"]) == "; known are workers, wait"
    assert near("x", []) == ""


# -- brokers


class Third(Broker):
    def __init__(self, url: str, *, size: int = 1, ratio: float = 0.5, on: bool = True, words: list[str] = []) -> None:  # noqa: B006
        super().__init__(url)
        self.options = (size, ratio, on, words)
        if size > 100:
            raise ValueError(f"{url}: size={size} is too large")

    def connect(self) -> AbstractAsyncContextManager[Connection]:
        raise NotImplementedError


class Quoting(Broker):
    """Quotes all that it gets: pieces of its URL, in all ways."""

    def __init__(
        self, url: str, *, size: int = 1, mode: Literal["fast", "safe"] = "safe", sasl_secret: str = ""
    ) -> None:
        pieces = re.split("[/?&@#:=]+", url)
        query = url.partition("?")[2]
        raise WrongOptions([url, f"in the query: {query}", " ".join(pieces), repr(list(map(unquote, pieces)))])

    def connect(self) -> AbstractAsyncContextManager[Connection]:
        raise NotImplementedError


class Point:
    """An entry point."""

    def __init__(self, load: Callable[[], Any]) -> None:
        self.load, self.value = load, "third:Third"


@pytest.fixture
def third(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(error: Exception) -> Callable[[], Any]:
        def load() -> Any:
            raise error

        return load

    points = {
        "third": Point(lambda: Third),
        "quoting": Point(lambda: Quoting),
        "driver": Point(raises(ModuleNotFoundError("No module named 'asyncpg'", name="asyncpg"))),
        "other": Point(raises(ModuleNotFoundError("No module named 'zzz'", name="zzz"))),
        "broken": Point(raises(AttributeError("module 'x' has no attribute 'Y'"))),
        "wrong": Point(lambda: lambda url: 5),
    }
    monkeypatch.setattr(config_module, "schemes", lambda: points)


@pytest.mark.usefixtures("third")
class TestBrokers:
    def test_options_from_text(self) -> None:
        broker = make_broker("brokers.a", "third://h", {"size": "7", "ratio": "0.25", "on": "false", "words": ["x"]})
        assert isinstance(broker, Third)
        assert broker.options == (7, 0.25, False, ["x"])

    def test_wrong_options_come_together(self) -> None:
        with pytest.raises(ExceptionGroup) as caught:
            make_broker("brokers.a", "third://h", {"size": "many", "raito": 1})
        assert [str(error) for error in caught.value.exceptions] == [
            "brokers.a.size: Expected `int`, got `str`",
            "brokers.a.raito: unknown option; did you mean 'ratio'?",
        ]
        with pytest.raises(ExceptionGroup) as caught:
            App(brokers={"a": "third://", "b": 5}, config=None).build()  # type: ignore[dict-item]
        assert len(caught.value.exceptions) == 2

    @pytest.mark.parametrize(
        ("url", "text"),
        [
            ("driver://h", "the driver broker needs asyncpg; install it with: pip install 'streamfw[postgres]'"),
            ("other://h", "the other broker needs zzz; is its package installed?"),
            ("broken://h", "brokers.a.url: the broken broker (third:Third) cannot be loaded: AttributeError"),
            ("wrong://h", "the entry point of wrong:// made a int, not a Broker"),
            ("third", "'third' has no known scheme; installed brokers: broken://, driver://"),
        ],
    )
    def test_a_broker_that_cannot_be_made(self, url: str, text: str) -> None:
        with pytest.raises(ConfigError) as caught:
            make_broker("brokers.a", url)
        assert text in str(caught.value)

    @pytest.mark.parametrize(
        "url",
        [
            "third://user:s3cr3t@host/db",
            "third://user:s3cr3t%2F@host/db",
            "third://user:s3/cr3t@host/db?x=1",
            "third://host/db?password=s3cr3t",
            "nowhere://user:s3cr3t@host",
            "user:s3cr3t@host/db",
            "third:user:s3cr3t@host",
            "third://user:s3cr3t@host:port",
        ],
    )
    def test_no_password_in_any_error(self, url: str) -> None:
        with pytest.raises((ConfigError, ExceptionGroup)) as caught:
            make_broker("brokers.a", url, {"size": 101})
        shown = f"{caught.value!r} {caught.value} {caught.value.__cause__!r} "
        for part in ("s3cr3t", "cr3t"):
            assert part not in shown
        assert "brokers.a" in shown

    @pytest.mark.parametrize(
        "url",
        [
            "quoting://user:s3cr3t@host/db?size=5",
            "quoting://user:s3%20cr3t@host/db?size=5",
            "quoting://host/db?size=5&password=s3cr3t",
            "quoting://host/db?pasword=s3cr3t&size=5",
            "quoting://host/db?size=5&sasl_secret=s3%2Fcr3t",
            "quoting://host/db?accessToken=s3cr3t&size=5",
            "quoting://user:s3cr?3t@host/db?size=5",
            "quoting://user:12?size=s3cr3t@host/db",
        ],
    )
    def test_no_secret_whatever_is_quoted(self, url: str) -> None:
        with pytest.raises(ExceptionGroup) as caught:
            make_broker("brokers.a", url, {"sasl_secret": "0ther s3cr3t"})
        shown = "".join(f"{error} {error!r} {error.__cause__!r}" for error in caught.value.exceptions)
        assert not re.search("s3.?cr|cr.?3t", shown), shown
        assert len(caught.value.exceptions) == 4

    def test_what_is_no_secret_is_shown(self) -> None:
        with pytest.raises(ExceptionGroup) as caught:
            make_broker("brokers.a", "quoting://user:p@host/db?size=5&mode=faster&password=si")
        told = [str(error) for error in caught.value.exceptions]
        assert told[1] == "brokers.a: in the query: size=5&mode=faster&password=***"
        assert told[2] == "brokers.a: quoting user *** host db size 5 mode faster password ***"

    def test_a_wrong_choice_lists_the_choices(self) -> None:
        with pytest.raises(ExceptionGroup) as caught:
            make_broker("brokers.a", "quoting://h", {"mode": "faster"})
        assert str(caught.value.exceptions[0]) == "brokers.a.mode: 'faster': one of fast, safe is needed"
        _, errors = read(environ={"STREAMFW_LOG": "xml"})
        assert str(errors[0]) == "log: 'xml': one of text, json is needed (set by STREAMFW_LOG)"

    def test_a_broker_does_not_show_its_password(self) -> None:
        broker = make_broker("brokers.a", "third://user:s3cr3t@host/db?password=s3cr3t")
        assert "s3cr3t" not in f"{broker!r} {broker.describe()}"


def test_options_stay_with_their_kind_of_broker() -> None:
    configured = {"url": "memory://", "max_body": 5}
    assert options_for("memory://other", configured) == {"max_body": 5}
    assert options_for("postgres://h", configured) == {}
    assert options_for("memory://", {"max_body": 5}) == {"max_body": 5}
