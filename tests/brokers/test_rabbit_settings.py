"""URL and options of the RabbitMQ broker."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamfw.config import make_broker
from streamfw.errors import ConfigError
from streamfw_rabbit import RabbitBroker
from streamfw_rabbit.settings import Settings, connection_options, parsed
from tests.services._certificates import make_certificates


def test_a_url_names_servers_login_vhost_and_options() -> None:
    settings = parsed("amqp://us%40er:p%2Fw%3A@h1:5673,h2,[::1],[fe80::1%25eth0]:5674/a%2Fb?heartbeat=30&window=10")
    assert settings == Settings(
        hosts=(("h1", 5673), ("h2", 5672), ("::1", 5672), ("fe80::1%eth0", 5674)),
        username="us@er",
        password="p/w:",
        vhost="a/b",
        heartbeat=30,
        window=10,
    )


@pytest.mark.parametrize("url", ["amqp://localhost", "amqp://localhost/", "amqp://localhost/%2F"])
def test_a_url_alone_is_the_defaults(url: str) -> None:
    assert parsed(url) == Settings(hosts=(("localhost", 5672),), vhost="/", username="guest", password="guest")


def test_tls_has_a_port_of_its_own() -> None:
    settings = parsed("amqps://h1,h2:1")
    assert (settings.tls, settings.hosts) == (True, (("h1", 5671), ("h2", 1)))
    assert connection_options(settings, "testing").tls is not None
    assert connection_options(parsed("amqp://h"), "testing").tls is None


def test_an_argument_wins_over_the_url_and_none_is_none() -> None:
    settings = parsed("amqp://u:p@h/v?window=5&priorities=3", window=6, password="other", vhost="w", priorities=None)
    assert (settings.window, settings.password, settings.vhost, settings.priorities) == (6, "other", "w", 3)


def test_how_one_connects() -> None:
    options = connection_options(parsed("amqp://u:p@h:1/v?name=shop&transport=aiormq&connect_timeout=3"), "consuming")
    assert (options.hosts, options.user, options.password, options.vhost) == ((("h", 1),), "u", "p", "v")
    assert (options.name, options.transport, options.timeout) == ("shop consuming", "aiormq", 3.0)
    assert "'p'" not in repr(options)


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    make_certificates(tmp_path)
    return tmp_path


def test_certificates(certificates: Path) -> None:
    ca, cert, key = (certificates / name for name in ("ca.crt", "server.crt", "server.key"))
    settings = parsed("amqps://h/?auth=external", ca=ca, cert=cert, key=key)
    assert settings.ca == str(ca)
    options = connection_options(settings, "testing")
    assert (options.auth, options.tls is not None) == ("external", True)
    with pytest.raises(ValueError, match="not a certificate and its key"):
        parsed("amqps://h", cert=ca, key=ca)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("amqp:/h", "url: amqp://user"),
        ("kafka://h", "url: amqp://user"),
        ("amqp://", "url: no host"),
        ("amqp://u:p@/v", "url: no host"),
        ("amqp://u@h", "url: a user name without a password"),
        ("amqp://h1,,h2", "url: malformed host"),
        ("amqp://h:port", "url: malformed host"),
        ("amqp://h:0", "url: a port is"),
        ("amqp://h:65536", "url: a port is"),
        ("amqp://::1", "IPv6 addresses stand in brackets"),
        ("amqp://h/a/b", "url: one vhost belongs between"),
        ("amqp://h/#x", "url: '#'"),
        ("amqp://u:p/w@h", "url: '@' behind '/'"),
        ("amqp://h/?hartbeat=1", "unknown option 'hartbeat'; did you mean 'heartbeat'?"),
        ("amqp://h/?zzzzzz=1", "unknown option 'zzzzzz'; known are vhost, "),
        ("amqp://h/?hosts=h2", "unknown option 'hosts'"),
        ("amqp://h/?window=1&window=2", "option 'window' stands in it twice"),
        ("amqp://h/?publish_timeout=soon", "publish_timeout='soon': Expected `float`"),
        ("amqp://h/?window=1.5", "window='1.5': Expected `int`"),
        ("amqp://h/?window=0", "window=0: a whole number from 1"),
        ("amqp://h/?transport=slow", "transport='slow': one of auto, aiormq, fast is needed"),
        ("amqp://h/?declare=maybe", "declare='maybe': one of declare, passive, off is needed"),
        ("amqp://h/?auth=gssapi", "auth='gssapi': one of plain, external is needed"),
        ("amqps://h/?auth=external", "auth='external' without cert="),
        ("amqp://h/?tls=true", "tls: write amqps://"),
        ("amqp://h/?ca=/etc/ca.pem", "ca='/etc/ca.pem' without TLS"),
        ("amqps://h/?cert=c", "cert='c' without key="),
        ("amqps://h/?key=k", "key='k' without cert="),
        ("amqps://h/?ca=/does/not/exist", "ca='/does/not/exist': cannot be read: No such file"),
        ("amqps://h/?ca=/etc/hostname", "ca='/etc/hostname': holds no certificates"),
        ("amqp://h/?delivery_limit=5", "delivery_limit=5: a whole number from 20"),
        ("amqp://h/?connect_timeout=nan", "connect_timeout=nan: a number from 0.1 to 600 is needed"),
        ("amqp://h/?priorities=256", "priorities=256: a whole number from 0 to 255"),
        (f"amqp://h/{'v' * 256}", "vhost: AMQP has at most 255 bytes"),
    ],
)
def test_what_is_wrong_is_named(url: str, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        parsed(url)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("scheme", "options", "told"),
    [
        ("amqp", "delivery_limit=5", ["delivery_limit=5: a whole number from 20 to 2147483647 is needed"]),
        ("amqp", "connect_timeout=-1", ["connect_timeout=-1.0: a number from 0.1 to 600 is needed"]),
        ("amqp", "transport=foo", ["transport='foo': one of auto, aiormq, fast is needed"]),
        (
            "amqp",
            "window=0&declare=maybe&windows=5&ca=x",
            [
                "declare='maybe': one of declare, passive, off is needed",
                "unknown option 'windows'; did you mean 'window'?",
            ],
        ),
        (
            "amqp",
            "window=0&priorities=256&max_body=0",
            [
                "max_body=0: a whole number from 1 to 536870912 is needed",
                "window=0: a whole number from 1 to 100000 is needed",
                "priorities=256: a whole number from 0 to 255 is needed",
            ],
        ),
        (
            "kafka",
            "linger=11&fetch_wait=0",
            ["fetch_wait=0.0: a number from 0.001 to 10 is needed", "linger=11.0: a number from 0 to 10 is needed"],
        ),
    ],
)
def test_an_option_of_the_url_is_shown_as_it_is(scheme: str, options: str, told: list[str]) -> None:
    with pytest.raises((ConfigError, ExceptionGroup)) as caught:
        make_broker("brokers.default", f"{scheme}://{'user:word@' if scheme == 'amqp' else ''}h?{options}")
    errors = caught.value.exceptions if isinstance(caught.value, ExceptionGroup) else [caught.value]
    assert [str(error) for error in errors] == [f"brokers.default: {one}" for one in told]


def test_options_of_a_wrong_type_and_of_a_wrong_value_come_together() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        make_broker("brokers.a", "amqp://h", {"transport": "foo", "window": 0, "delivery_limit": "5"})
    assert [str(error) for error in caught.value.exceptions] == [
        "brokers.a.transport: 'foo': one of auto, aiormq, fast is needed",
        "brokers.a: delivery_limit=5: a whole number from 20 to 2147483647 is needed",
        "brokers.a: window=0: a whole number from 1 to 100000 is needed",
    ]


@pytest.mark.parametrize(
    "url",
    [
        "amqp://u:s3cr3t@h:port",
        "amqp://u:s3/cr3t@h",
        "amqp://u:s3?cr3t@h",
        "amqp://u:s3cr3t@h/?window=0",
        "amqp://h/?password=s3cr3t&window=0",
        "amqp://u:s3cr3t@h/a/b",
        "amqp://u:s3#cr3t@h",
    ],
)
def test_no_password_in_what_is_said(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_broker("brokers.default", url)
    assert "cr3t" not in str(caught.value)
    assert "brokers.default" in str(caught.value)


def test_settings_and_broker_show_no_password() -> None:
    assert "s3cr3t" not in repr(parsed("amqp://u:s3cr3t@h"))
    assert "s3cr3t" not in repr(RabbitBroker("amqp://u:s3cr3t@h/v"))


@pytest.mark.parametrize("scheme", ["amqp", "amqps"])
def test_the_broker_is_found_by_its_scheme(scheme: str) -> None:
    broker = make_broker("brokers.default", f"{scheme}://h/v", {"window": "5", "transport": "aiormq"})
    assert isinstance(broker, RabbitBroker)
    assert broker.describe() == f"{scheme}://h/v"


def test_capabilities_follow_the_options() -> None:
    assert RabbitBroker("amqp://h").capabilities.delay == 1.0
    assert RabbitBroker("amqp://h").capabilities.priorities is False
    assert RabbitBroker("amqp://h", declare="off").capabilities.delay is None
    assert RabbitBroker("amqp://h", priorities=10).capabilities.priorities is True
    assert RabbitBroker("amqp://h", max_body=5).capabilities.max_body == 5
