"""What aiokafka, the socket and the server raise, as errors of streamfw.

Codes: Apache Kafka, protocol guide, "Error Codes" (aiokafka has a class for most of them).
"""

from __future__ import annotations

import ssl
from typing import Final

from aiokafka import errors as kafka

from streamfw.errors import BrokerError, BrokerRefused, BrokerUnavailable

__all__ = ["DRIVER_ERRORS", "concerns_message", "response_error", "translated"]

# What a call of aiokafka raises when the server, the network or the request is at fault. NotImplementedError: a server
# that is too new or too old for every version of a request that aiokafka knows. ValueError: an answer that makes no
# sense (SCRAM: who does not know the password either).
DRIVER_ERRORS = (kafka.KafkaError, OSError, TimeoutError, EOFError, NotImplementedError, ValueError)

_LOGIN: Final = "check user, password and sasl= in the URL"
_RIGHT: Final = "the user lacks a right: grant it (kafka-acls.sh)"
_VERSION: Final = "server and aiokafka have no version of this request in common: update one of them"

# What will not change by itself, and what to do about it.
_REFUSED: Final[dict[type[Exception], str]] = {
    kafka.SaslAuthenticationFailed: _LOGIN,
    kafka.AuthenticationFailedError: _LOGIN,
    kafka.UnsupportedSaslMechanismError: "set sasl= to a mechanism that the listener has",
    kafka.AuthenticationMethodNotSupported: "set sasl= to a mechanism that the listener has",
    kafka.IllegalSaslStateError: "this listener wants no login: leave user and password out of the URL",
    kafka.SecurityDisabled: "the server has no authorizer configured",
    kafka.TopicAuthorizationFailedError: _RIGHT,
    kafka.GroupAuthorizationFailedError: _RIGHT,
    kafka.ClusterAuthorizationFailedError: _RIGHT,
    kafka.TransactionalIdAuthorizationFailed: _RIGHT,
    kafka.UnsupportedVersionError: _VERSION,
    kafka.IncompatibleBrokerVersion: _VERSION,
    kafka.UnrecognizedBrokerVersion: _VERSION,
    NotImplementedError: _VERSION,
    kafka.UnsupportedCodecError: "pip install cramjam",
    kafka.InconsistentGroupProtocolError: "members of this group use another assignor or protocol: use another group=",
    kafka.InvalidSessionTimeoutError: "set session_timeout= between the server's group.min.session.timeout.ms and "
    "group.max.session.timeout.ms",
    kafka.InvalidGroupIdError: "choose another group=",
    kafka.InvalidTopicError: "a topic's name is 1 to 249 letters, digits, '.', '_' and '-', and not the server's own",
    kafka.InvalidPartitionsError: "set partitions=",
    kafka.InvalidReplicationFactorError: "set replication= to at most the number of servers",
    kafka.InvalidReplicationAssignmentError: "set replication= to at most the number of servers",
    kafka.InvalidConfigurationError: "check the topic's configuration",
    kafka.PolicyViolationError: "the server's policy forbids it: ask who runs it",
    kafka.InvalidTransactionTimeout: "it is longer than the server's transaction.max.timeout.ms",
}
_OF_CONNECTION: Final = (
    kafka.SaslAuthenticationFailed,
    kafka.UnsupportedSaslMechanismError,
    kafka.IllegalSaslStateError,
    kafka.UnsupportedVersionError,
)
_SPEAKS_NO_TLS: Final = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNKNOWN_PROTOCOL", "RECORD_LAYER_FAILURE")


def translated(error: BaseException, what: str) -> BrokerError:
    """The error of streamfw that says what happened while doing `what`; raise it ``from error``."""
    if isinstance(error, BrokerError):
        return error
    # A connection that ends tells those who wait on it only that it ended; why is in the cause.
    told: BaseException | None = error
    while told is not None:
        hint = _hint(told)
        if hint is not None:
            return BrokerRefused(f"Kafka: {what}: {_said(told)}; {hint}")
        told = told.__cause__
    return BrokerUnavailable(f"Kafka: {what}: {_said(error)}")


def _hint(error: BaseException) -> str | None:
    """What to do about an error that will not change by itself; None for another."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return "check ca= (whom we trust) and that the server's certificate has the name in the URL"
    if isinstance(error, ssl.SSLError):
        reason = error.reason or ""
        if reason in _SPEAKS_NO_TLS:
            return "does the server speak TLS at this port? (kafka:// is without)"
        # An alert is the server's answer to what we are: for example that it wants a certificate of ours.
        return "check cert= and key=" if "ALERT" in reason else None
    for kind, hint in _REFUSED.items():
        if isinstance(error, kind):
            return hint
    return None


def _said(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, kafka.BrokerResponseError):
        said = ", ".join(str(argument) for argument in error.args if argument)
        # The name is what one searches for; the server's own words say more, where it has any.
        return f"{said or error.description.rstrip('.')} ({error.message}, error {error.errno})"
    said = " ".join(map(str, error.args)) if isinstance(error, kafka.KafkaError) else str(error)
    return said.split("\n")[0][:300] or type(error).__name__


# Those that aiokafka has no class for, in words.
_WORDS: Final = {
    76: "UNSUPPORTED_COMPRESSION_TYPE, the server does not know this compression",
    82: "FENCED_INSTANCE_ID, somebody else joined as the same static member",
    87: "INVALID_RECORD, the topic does not take this record: is it compacted, and the record without a key?",
    88: "UNSTABLE_OFFSET_COMMIT, a transaction is about to commit offsets",
    89: "THROTTLING_QUOTA_EXCEEDED, the server's quota is used up",
    90: "PRODUCER_FENCED, a newer producer took our place",
}


def response_error(code: int, said: str | None = None) -> kafka.KafkaError:
    """The error of a code in a response, with what the server said about it."""
    kind = kafka.kafka_errors.get(code)
    if kind is not None:
        return kind(said) if said else kind()
    return kafka.KafkaError(f"{said or 'refused'} ({_WORDS.get(code, 'unknown to aiokafka')}, error {code})")


def concerns_message(error: BrokerError) -> bool:
    """Whether the server answered, and refused what was asked for, rather than us: another message may pass."""
    cause = error.__cause__
    return (
        not error.transient and isinstance(cause, kafka.BrokerResponseError) and not isinstance(cause, _OF_CONNECTION)
    )
