"""Three RabbitMQ nodes that form one cluster, with one epmd: quorum queues have a member on each."""

from __future__ import annotations

from pathlib import Path

from streamfw_postgres._embedded_steps import Steps, run

from ._homes import Service, register
from ._rabbit_control import evaluate, term
from ._rabbit_node import USER, Node
from ._rabbit_service import Rabbit

__all__ = ["OwnCluster", "RabbitCluster"]

_SIZE = 3
# As `rabbitmqctl` does it by `stop_app`, `join_cluster` and `start_app`; the module is that of RabbitMQ 3.13 and later.
_JOIN = """
ok = rabbit:stop(),
Joined = case code:ensure_loaded(rabbit_db_cluster) of
    {module, _} -> rabbit_db_cluster:join('FIRST', disc);
    _ -> rabbit_mnesia:join_cluster('FIRST', disc)
end,
true = lists:member(Joined, [ok, {ok, already_member}]),
ok = rabbit:start()
"""


class RabbitCluster(Service):
    """The cluster in `home`; several processes may hold objects for the same `home`."""

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self.nodes = [Node(home / f"node{number}") for number in range(1, _SIZE + 1)]

    def _start(self) -> Steps:
        if (self.home / "ready").exists():
            return
        yield from self._end()
        first, *others = self.nodes
        first.make({}, ())
        yield from first.starting()  # it also starts the epmd
        for node in others:
            node.make({}, (), beside=first)
            yield from node.starting()
            evaluate(node.home, _JOIN.replace("FIRST", first.name), timeout=60.0)
        (self.home / "ready").touch()

    def _end(self) -> Steps:
        for node in self.nodes:
            yield from node.ending()


class OwnCluster:
    """A cluster of one test module's own, whose nodes it may stop, kill and start, by their number from 0."""

    def __init__(self, service: RabbitCluster) -> None:
        self._nodes = service.nodes

    def __len__(self) -> int:
        return len(self._nodes)

    def url(self, first: int) -> str:
        """A URL of all nodes, that one first."""
        nodes = self._nodes[first:] + self._nodes[:first]
        hosts = ",".join(f"127.0.0.1:{node.ports.amqp}" for node in nodes)
        return f"amqp://{USER}:{nodes[0].password}@{hosts}/%2F"

    def facts(self, number: int) -> Rabbit:
        """One of the nodes alone, as administrator."""
        node = self._nodes[number]
        return Rabbit(host="127.0.0.1", port=node.ports.amqp, user=USER, password=node.password, home=node.home)

    def leader(self, queue: str, ask: int) -> int:
        """The number of the node that leads a quorum queue, as the node `ask` knows it."""
        told = evaluate(
            self._nodes[ask].home,
            f'{{ok, Q}} = rabbit_amqqueue:lookup(rabbit_misc:r(<<"/">>, queue, {term(queue)})),'
            "{Name, _} = amqqueue:get_pid(Q), {ok, _, {_, Leader}} = ra:members({Name, node()}), Leader",
        )
        return [node.name for node in self._nodes].index(told.strip("'"))

    def members(self, queue: str, ask: int) -> int:
        """How many of a quorum queue's members are up."""
        return int(
            evaluate(
                self._nodes[ask].home,
                f'{{ok, Q}} = rabbit_amqqueue:lookup(rabbit_misc:r(<<"/">>, queue, {term(queue)})),'
                "{Name, _} = amqqueue:get_pid(Q),"
                "length([up || Node <- [node() | nodes()], is_pid(rpc:call(Node, erlang, whereis, [Name], 5000))])",
            )
        )

    def stop(self, number: int) -> None:
        """Shut one down: its clients are told."""
        run(self._nodes[number].stopping())

    def kill(self, number: int) -> None:
        """End one as a power cut would (SIGKILL)."""
        run(self._nodes[number].killing())

    def start_all(self) -> None:
        """Start those that are down, and wait until clients can come."""
        for node in self._nodes:
            run(node.starting())


register("cluster-rabbit", RabbitCluster)
