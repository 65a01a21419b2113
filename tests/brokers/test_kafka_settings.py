"""URL and options of the Kafka broker, and what servers and their refusals look like to us."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import ssl
import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from aiokafka import AIOKafkaProducer, codec
from aiokafka import errors as kafka_errors

from streamfw.config import make_broker
from streamfw.errors import BrokerError, BrokerRefused, BrokerUnavailable, ConfigError, redact
from streamfw_kafka import KafkaBroker
from streamfw_kafka.errors import translated
from streamfw_kafka.nodes import Nodes, diagnosed
from streamfw_kafka.settings import Settings, client_arguments, parsed
from tests.brokers.kafka_kit import desk, login_url, new_name
from tests.services._certificates import make_certificates
from tests.services._homes import free_port
from tests.services.kafka import Kafka

MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")


# ---------------------------------------------------------------------- the URL


def test_the_docstring_names_every_option_and_its_default() -> None:
    text = inspect.getdoc(KafkaBroker) or ""
    said = dict(re.findall(r"^- `(\w+)` \((.+?)\): ", text, re.M))
    names = [field.name for field in msgspec.structs.fields(Settings) if field.name not in ("bootstrap", "tls")]
    assert {*said} == {*names} == {*inspect.signature(KafkaBroker).parameters} - {"url"}
    defaults = {field.name: field.default for field in msgspec.structs.fields(Settings)}
    assert {name: "none" if value == "none" else json.loads(value) for name, value in said.items()} == {
        name: "none" if defaults[name] is None else defaults[name] for name in names
    }


def test_a_url_names_servers_login_and_options() -> None:
    settings = parsed(
        "kafka://us%40er:p%2Fw%3A@h1:9094,h2,[::1],[fe80::1%25eth0]:9095/?heartbeat=1&create_topics=true&sasl=SCRAM-SHA-256"
    )
    assert settings == Settings(
        bootstrap=("h1:9094", "h2:9092", "[::1]:9092", "[fe80::1%25eth0]:9095"),
        username="us@er",
        password="p/w:",
        sasl="SCRAM-SHA-256",
        heartbeat=1.0,
        create_topics=True,
    )


def test_a_url_alone_is_the_defaults() -> None:
    assert parsed("kafka://localhost") == Settings(bootstrap=("localhost:9092",))
    assert parsed("kafka+tls://localhost:1") == Settings(bootstrap=("localhost:1",), tls=True)


def test_a_user_without_a_mechanism_is_plain() -> None:
    assert parsed("kafka://u:p@h").sasl == "PLAIN"
    assert parsed("kafka://h", username="u", password="p").sasl == "PLAIN"
    assert parsed("kafka://h").sasl is None


def test_an_argument_wins_over_the_url_and_none_is_none() -> None:
    settings = parsed("kafka://u:p@h/?linger=0.5&partitions=3", linger=0.25, password="other", partitions=None)
    assert (settings.linger, settings.password, settings.partitions) == (0.25, "other", 3)


def test_values_of_the_query_are_percent_decoded_and_a_plus_is_a_plus() -> None:
    assert parsed("kafka://h/?client_id=a%26b+c").client_id == "a&b+c"


def test_paths_may_be_paths(certificates: Path) -> None:
    assert parsed("kafka+tls://h", ca=certificates / "ca.crt").ca == str(certificates / "ca.crt")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("kafka:/h", "url: kafka://user"),
        ("postgres://h", "url: kafka://user"),
        ("kafka://", "url: no host"),
        ("kafka://u:p@", "url: no host"),
        ("kafka://h1,,h2", "url: malformed host"),
        ("kafka://h:port", "url: malformed host"),
        ("kafka://h:0", "url: a port is"),
        ("kafka://h:65536", "url: a port is"),
        ("kafka://::1", "IPv6 addresses stand in brackets"),
        ("kafka://h/topic", "url: nothing belongs between"),
        ("kafka://h/#x", "url: '#'"),
        ("kafka://h/?isolatoin=read_committed", "unknown option 'isolatoin'; did you mean 'isolation'?"),
        ("kafka://h/?zzzzzz=1", "unknown option 'zzzzzz'; known are client_id, "),
        ("kafka://h/?bootstrap=h2", "unknown option 'bootstrap'"),
        ("kafka://h/?linger=1&linger=2", "option 'linger' stands in it twice"),
        ("kafka://h/?linger=soon", "linger='soon': Expected `float`"),
        ("kafka://h/?partitions=1.5", "partitions='1.5': Expected `int`"),
        ("kafka://h/?create_topics=maybe", "create_topics='maybe': Expected `bool`"),
        ("kafka://h/?isolation=none", "isolation='none': one of read_committed, read_uncommitted is needed"),
        ("kafka://h/?compression=brotli", "compression='brotli': one of none, gzip, snappy, lz4, zstd is needed"),
        ("kafka://u:p@h/?sasl=GSSAPI", "sasl='GSSAPI': one of PLAIN, SCRAM-SHA-256, SCRAM-SHA-512 is needed"),
        ("kafka://h/?sasl=PLAIN", "sasl='PLAIN' without a user name"),
        ("kafka://h/?password=p", "password: there is no user name"),
        ("kafka://u@h", "username='u' without a password"),
        ("kafka://h/?tls=true", "tls: write kafka+tls://"),
        ("kafka://h/?ca=/etc/ca.pem", "ca='/etc/ca.pem' without TLS"),
        ("kafka://h/?cert=c&key=k", "cert='c' without TLS"),
        ("kafka+tls://h/?cert=c", "cert='c' without key="),
        ("kafka+tls://h/?key=k", "key='k' without cert="),
        ("kafka+tls://h/?ca=/does/not/exist", "ca='/does/not/exist': cannot be read: No such file"),
        ("kafka+tls://h/?ca=/etc/hostname", "ca='/etc/hostname': holds no certificates"),
        ("kafka+tls://h/?cert=/etc/hostname&key=/etc/hostname", "not a certificate and its key"),
        ("kafka://h/?heartbeat=20", "heartbeat=20 is more than a third of session_timeout=45"),
        ("kafka://h/?rebalance_timeout=1", "rebalance_drain=1 is not below rebalance_timeout=1"),
        ("kafka://h/?window_limit=10", "window_limit=10 is below open_limit=10000"),
        ("kafka://h/?linger=9&publish_timeout=8", "linger=9 is not below publish_timeout=8"),
        ("kafka://h/?partitions=0", "partitions=0: at least one"),
        ("kafka://h/?replication=0", "replication=0: at least one"),
        ("kafka://h/?session_timeout=nan", "session_timeout=nan: a number from 0.5 to 3600 is needed"),
        ("kafka://h/?max_body=0", "max_body=0: a whole number from 1"),
        ("kafka://h/?static_member=a%20b", "static_member='a b': 1 to 249 letters"),
        ("kafka://h/?static_member=..", "static_member='..': 1 to 249 letters"),
    ],
)
def test_what_is_wrong_is_named(url: str, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        parsed(url)
    assert said in str(caught.value)


@pytest.mark.parametrize("option", [{"max_body": True}, {"linger": "1"}, {"client_id": 3}, {"create_topics": 1}])
def test_an_argument_has_its_type(option: dict[str, object]) -> None:
    ((name, value),) = option.items()
    with pytest.raises(ValueError, match=f"{name}={value!r}: Expected"):
        parsed("kafka://h", **option)


def test_a_codec_that_is_not_installed_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "cramjam", None)
    for name in ("snappy", "lz4", "zstd"):
        with pytest.raises(ValueError, match=f"compression='{name}': .* pip install cramjam"):
            parsed("kafka://h", compression=name)
    assert parsed("kafka://h", compression="gzip").compression == "gzip"


# ---------------------------------------------------------------------- passwords


URLS = [
    "kafka://u:s3cr3t@h1:9092,h2:9092/",
    "kafka://u:s3cr3t/@h1,h2",
    "kafka://u:s3cr3t?x=1@h1,h2",
    "kafka://u:12?s3cr3t=1@h1,h2",
    "kafka://u:s3cr3t#@h1",
    "kafka://u:a,s3cr3t@[::1]:1,h2:port/?x",
    "kafka://h1,h2:s3cr3t",
    "kafka://u:s3cr3t,h",
    "kafka://h/?username=u&password=s3cr3t&linger=x",
    "kafka://h/?password=s3cr3t",
]


@pytest.mark.parametrize("url", URLS)
def test_no_error_and_no_description_shows_a_password(url: str) -> None:
    try:
        shown = repr(parsed(url)) + str(parsed(url))
    except ValueError as error:
        shown = str(error)
    assert "s3cr3t" not in shown
    assert "s3cr3t" not in redact(url)


def test_settings_do_not_show_the_password_to_rich_either() -> None:
    settings = parsed("kafka://u:s3cr3t@h1,h2")
    assert "s3cr3t" not in repr(settings)
    assert "password='***'" in repr(settings)
    assert "s3cr3t" not in repr(settings.__rich_repr__())
    assert settings.password == "s3cr3t"


@pytest.mark.parametrize(
    ("options", "path", "said"),
    [
        ({"url": "kafka://u:s3cr3t@h/?unknown=1"}, "brokers.default", "unknown option 'unknown'"),
        ({"url": "kafka://u:s3cr3t@h/", "unknown": 1}, "brokers.default.unknown", "unknown option"),
        ({"url": "kafka://u:s3cr3t@h/", "linger": "soon"}, "brokers.default.linger", "Expected `float"),
        ({"url": "kafka://u:s3cr3t@h/", "ca": "/etc/ca.pem"}, "brokers.default", "without TLS"),
    ],
)
def test_a_wrong_option_in_the_configuration_has_its_path(options: dict[str, object], path: str, said: str) -> None:
    url = str(options.pop("url"))
    with pytest.raises(ConfigError) as caught:
        make_broker("brokers.default", url, options)
    assert caught.value.path == path
    assert said in str(caught.value)
    assert "s3cr3t" not in str(caught.value)


# ---------------------------------------------------------------------- what aiokafka is given


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CA and a certificate, and the same key with a passphrase."""
    where = tmp_path_factory.mktemp("certificates")
    make_certificates(where)
    command = ["openssl", "pkey", "-aes256", "-in", "server.key", "-out", "locked.key", "-passout", "pass:x"]
    subprocess.run(command, cwd=where, check=True, capture_output=True)
    return where


def test_client_arguments_of_each_way_in(certificates: Path) -> None:
    plain = client_arguments(parsed("kafka://h1,h2:1", client_id="me", request_timeout=2.5, metadata_age=0.5))
    assert plain == {
        "bootstrap_servers": ["h1:9092", "h2:1"],
        "client_id": "me",
        "security_protocol": "PLAINTEXT",
        "request_timeout_ms": 2500,
        "metadata_max_age_ms": 500,
        "retry_backoff_ms": 100,
    }
    sasl = client_arguments(parsed("kafka://u:p@h/?sasl=SCRAM-SHA-512"))
    assert sasl["security_protocol"] == "SASL_PLAINTEXT"
    assert (sasl["sasl_mechanism"], sasl["sasl_plain_username"], sasl["sasl_plain_password"]) == (
        "SCRAM-SHA-512",
        "u",
        "p",
    )
    settings = parsed("kafka+tls://u:p@h", ca=str(certificates / "ca.crt"))
    tls = client_arguments(settings)
    assert tls["security_protocol"] == "SASL_SSL"
    assert tls["ssl_context"].verify_mode is ssl.CERT_REQUIRED
    assert tls["ssl_context"].check_hostname
    assert client_arguments(settings)["ssl_context"] is tls["ssl_context"]  # made once


def test_a_key_with_a_passphrase_is_refused_and_nobody_is_asked(certificates: Path) -> None:
    files = {"cert": str(certificates / "server.crt"), "key": str(certificates / "locked.key")}
    with pytest.raises(ValueError, match="without a passphrase"):
        parsed("kafka+tls://h", **files)
    files["key"] = str(certificates / "server.key")
    assert client_arguments(parsed("kafka+tls://h", **files))["security_protocol"] == "SSL"


def test_a_renewed_certificate_is_read_again(tmp_path: Path, certificates: Path) -> None:
    ca = tmp_path / "ca.crt"
    ca.write_bytes((certificates / "ca.crt").read_bytes())
    settings = parsed("kafka+tls://h", ca=str(ca))
    before = client_arguments(settings)["ssl_context"]
    ca.write_bytes(ca.read_bytes() + b"\n")
    assert client_arguments(settings)["ssl_context"] is not before


# ---------------------------------------------------------------------- ways in, and refusals


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("tls", [False, True])
async def test_every_login_works_with_and_without_tls(kafka: Kafka, mechanism: str, tls: bool) -> None:
    url = login_url(kafka.sasl_tls if tls else kafka.sasl, kafka.logins[mechanism], tls=tls)
    topic = await kafka.create_topic(new_name())
    async with desk(url, ca=kafka.ca if tls else None) as it:
        assert topic in await it.topics.names()
        assert await it.publish(topic, b"1") == ()


async def test_tls_without_a_login(kafka: Kafka) -> None:
    for host in (kafka.tls, kafka.tls.replace("127.0.0.1", "localhost")):
        async with desk(f"kafka+tls://{host}", ca=kafka.ca) as it:
            assert await it.topics.partitions(new_name()) == range(0)


async def refusal(url: str, **options: object) -> BrokerError:
    """What connecting raises, and what it says of a client of aiokafka that could not start."""
    settings = parsed(url, **options)
    nodes = Nodes(settings)
    with pytest.raises(BrokerError) as caught:
        await nodes.learn()
    await nodes.close()
    producer = AIOKafkaProducer(**client_arguments(settings))
    with pytest.raises(kafka_errors.KafkaConnectionError) as started:
        await producer.start()
    await producer.stop()
    assert type(translated(started.value, "starting")) is BrokerUnavailable  # aiokafka says no more than that
    found = await diagnosed(started.value, "starting", settings)
    assert type(found) is type(caught.value)
    return caught.value


@pytest.mark.parametrize("mechanism", MECHANISMS)
async def test_a_wrong_password_is_refused_for_good(kafka: Kafka, mechanism: str) -> None:
    login = kafka.logins[mechanism]
    error = await refusal(login_url(kafka.sasl, login, password="n0t-this"))
    assert type(error) is BrokerRefused
    assert "check user, password and sasl=" in str(error)
    assert "n0t-this" not in f"{error}{error.__cause__}"
    assert login.password not in f"{error}{error.__cause__}"


async def test_a_refusal_counts_more_than_a_server_that_is_away(kafka: Kafka) -> None:
    login = kafka.logins["PLAIN"]
    away = f"127.0.0.1:{free_port()}"
    for hosts in (f"{away},{kafka.sasl}", f"{kafka.sasl},{away}"):
        error = await refusal(login_url(hosts, login, password="n0t-this"))
        assert type(error) is BrokerRefused


async def test_a_mechanism_that_the_listener_lacks_is_refused(kafka: Kafka, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = parsed(login_url(kafka.sasl, kafka.logins["PLAIN"]))
    nodes = Nodes(settings)
    nodes._arguments["sasl_mechanism"] = "SCRAM-SHA-1"
    with pytest.raises(BrokerRefused, match="set sasl= to a mechanism that the listener has"):
        await nodes.learn()
    await nodes.close()


async def test_a_certificate_that_is_not_trusted_is_refused(kafka: Kafka) -> None:
    error = await refusal(f"kafka+tls://{kafka.tls}")
    assert type(error) is BrokerRefused
    assert "check ca=" in str(error)


async def test_a_certificate_for_another_name_is_refused(kafka: Kafka) -> None:
    error = await refusal(f"kafka+tls://{kafka.tls.replace('127.0.0.1', '127.1')}", ca=kafka.ca)  # the same address
    assert type(error) is BrokerRefused
    assert "the name in the URL" in str(error)


@pytest.mark.parametrize(
    ("listener", "scheme", "said"),
    [
        ("bootstrap", "kafka+tls", "does it speak TLS at this port?"),
        ("sasl", "kafka", "does it want a login, or TLS?"),
        ("tls", "kafka", "does it want a login, or TLS?"),
    ],
)
async def test_a_listener_that_speaks_otherwise_is_guessed_at(
    kafka: Kafka, listener: str, scheme: str, said: str
) -> None:
    error = await refusal(f"{scheme}://{getattr(kafka, listener)}", request_timeout=2)
    assert error.transient  # a server that stops hangs up in the same way
    assert said in str(error)


async def test_tls_at_a_port_that_answers_in_plain_text_is_refused() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        error = await refusal(f"kafka+tls://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        assert type(error) is BrokerRefused
        assert "does the server speak TLS at this port?" in str(error)


async def test_a_server_that_is_away_is_unavailable() -> None:
    error = await refusal(f"kafka://127.0.0.1:{free_port()},127.0.0.1:{free_port()}")
    assert type(error) is BrokerUnavailable
    assert "connecting to 127.0.0.1:" in str(error)


async def test_a_server_that_says_nothing_ends_with_the_time_out() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        nodes = Nodes(parsed(f"kafka://127.0.0.1:{port}", connect_timeout=0.2, request_timeout=5))
        with pytest.raises(BrokerUnavailable, match="no answer in time"):
            await nodes.learn()
        await nodes.close()


# ---------------------------------------------------------------------- what errors become


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (kafka_errors.SaslAuthenticationFailed("no"), "check user, password and sasl="),
        (kafka_errors.UnsupportedSaslMechanismError("no"), "set sasl="),
        (kafka_errors.IllegalSaslStateError(), "leave user and password out"),
        (
            kafka_errors.TopicAuthorizationFailedError("orders"),
            "orders (TOPIC_AUTHORIZATION_FAILED, error 29); the user",
        ),
        (kafka_errors.GroupAuthorizationFailedError("shop"), "the user lacks a right"),
        (kafka_errors.ClusterAuthorizationFailedError(), "the user lacks a right"),
        (kafka_errors.UnsupportedVersionError(), "update one of them"),
        (kafka_errors.IncompatibleBrokerVersion("x"), "update one of them"),
        (NotImplementedError("Support for FetchRequest v20 has not yet been added"), "update one of them"),
        (kafka_errors.InconsistentGroupProtocolError(), "use another group="),
        (kafka_errors.InvalidSessionTimeoutError(), "set session_timeout="),
        (kafka_errors.InvalidReplicationFactorError(), "set replication="),
        (kafka_errors.InvalidTopicError("a b"), "a topic's name is"),
        (ssl.SSLCertVerificationError("self-signed"), "check ca="),
    ],
)
def test_what_does_not_change_by_itself_is_refused_with_what_to_do(error: Exception, hint: str) -> None:
    found = translated(error, "doing")
    assert type(found) is BrokerRefused
    assert str(found).startswith("Kafka: doing: ")
    assert hint in str(found)
    # Who waits on a connection hears only that it was closed; the reason is the cause.
    closed = kafka_errors.KafkaConnectionError("Connection at h:1 closed")
    closed.__cause__ = error
    assert type(translated(closed, "doing")) is BrokerRefused


TRANSIENT: Sequence[Exception] = [
    kafka_errors.KafkaConnectionError("closed"),
    kafka_errors.NodeNotReadyError(),
    kafka_errors.RequestTimedOutError(),
    kafka_errors.NotLeaderForPartitionError(),
    kafka_errors.UnknownMemberIdError(),
    kafka_errors.RebalanceInProgressError(),
    kafka_errors.UnknownError(),
    kafka_errors.CorrelationIdError(),
    ConnectionRefusedError(111, "Connection refused"),
    TimeoutError(),
    EOFError(),
]


@pytest.mark.parametrize("error", TRANSIENT, ids=lambda error: type(error).__name__)
def test_everything_else_may_work_later(error: Exception) -> None:
    found = translated(error, "doing")
    assert type(found) is BrokerUnavailable
    assert str(found).startswith("Kafka: doing: ")
    assert translated(found, "doing more") is found
