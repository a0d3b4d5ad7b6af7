"""Gives each process of a job its node and GPUs, as a pure function: nothing is asked of the nodes.

With nodes of 4 GPUs, 4 trainers and 3 servers of 2 GPUs:

    node 0  | trainers 0 to 3     |        where servers share    | trainers 0 to 3       |
    node 1  | server 0 | server 1 |        the trainers' GPUs:    | servers 0, 2 | server 1 |
    node 2  | server 2 |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from megarl.config.errors import ConfigError
from megarl.config.run import ClusterConfig

NODES, TRAINER_POOL, SERVER_POOL, REWARD_POOL = "nodes", "trainers", "servers", "rewards"


@dataclass(frozen=True, kw_only=True)
class Seat:
    """Places a process: on node `node`, with `gpus` for CUDA_VISIBLE_DEVICES, a mark that the node
    replaces by the names of its GPUs; None has no GPUs."""

    node: int
    gpus: str | None


@dataclass(frozen=True, kw_only=True)
class Servers:
    """Asks for the servers of section `key` of the configuration: `count` servers of `gpus` GPUs,
    each on `nnodes` nodes (None: on as few as have so many). around: they go round this many GPUs,
    the trainers' first; 0 for GPUs of their own."""

    key: str
    count: int
    gpus: int = 1
    nnodes: int | None = None
    around: int = 0


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Holds the pool of each node and its GPUs, 0 where nothing uses them; the seat of each rank;
    for each server of a section a seat on every node that it spans; and the seats of the reward
    workers. `shared` says that servers and trainers have GPUs in common."""

    pools: tuple[str, ...] = ()
    gpus_per_node: tuple[int, ...] = ()
    trainers: tuple[Seat, ...] = ()
    servers: Mapping[str, tuple[tuple[Seat, ...], ...]] = field(default_factory=dict)
    rewards: tuple[Seat, ...] = ()
    shared: bool = False


def place_here(gpus: int, *, trainers: int, servers: Sequence[Servers]) -> Placement:
    """Fills this machine, which has `gpus` GPUs, as one node of a cluster. Where it has too few for
    all, the first section's servers go round the GPUs that the other sections leave. With 0 GPUs
    there is room for every process.

    Raises ConfigError where the trainers and the other sections need more GPUs than there are.
    """
    if not gpus:
        cluster = ClusterConfig(n_gpus_per_node=trainers + sum(s.count * s.gpus for s in servers))
        servers = [replace(s, around=0) for s in servers]
        return place(cluster, trainers=trainers, servers=servers, on_gpus=False)
    room = gpus - sum(s.count * s.gpus for s in servers[1:])
    if trainers > room:
        others = (f" and {s.key}.count={s.count} of {s.key}.tp*dp={s.gpus}" for s in servers[1:])
        raise ConfigError(
            f"{trainers} trainer processes{''.join(others)} need {trainers + gpus - room} GPUs "
            f"and {gpus} are visible"
        )
    policy = servers[0].count * servers[0].gpus if servers else 0
    if policy and not servers[0].around and trainers + policy > room:
        servers = [replace(servers[0], around=room), *servers[1:]]
    return place(ClusterConfig(n_gpus_per_node=gpus), trainers=trainers, servers=servers)


def place(
    cluster: ClusterConfig,
    *,
    trainers: int,
    servers: Sequence[Servers] = (),
    reward_nodes: int = 0,
    on_gpus: bool = True,
) -> Placement:
    """Fills nodes with the trainers, then with each section's servers: beside the trainers where
    one node has room for both, else on further nodes. A reward worker is alone on each of the last
    `reward_nodes` nodes.

    Raises ConfigError for processes that do not fill nodes evenly, and where cluster.n_nodes is
    another number than they need.
    """
    pool, size = cluster.server_pool, cluster.n_gpus_per_node
    if trainers > size and trainers % size:
        why = f"{trainers} trainer processes do not fill nodes of cluster.n_gpus_per_node={size}"
        raise ConfigError(f"{why}: start a multiple of {size}, or change that key")
    nodes = _Nodes(size=size, on_gpus=on_gpus)
    each, trainer_node = min(trainers, size), _Node(pool=TRAINER_POOL if pool else NODES, size=size)
    ranks = [seat for seat in nodes.take(trainer_node, each, trainers // each) for _ in range(each)]
    server_node = trainer_node
    if pool:
        server_node = _Node(pool=SERVER_POOL, size=pool.n_gpus_per_node)
    seats: dict[str, tuple[tuple[Seat, ...], ...]] = {}
    for s in servers:
        parts = _parts(s, server_node.size, pooled=pool is not None) if s.count else 1
        seats[s.key] = tuple(
            nodes.go_round(s, trainers + i * s.gpus, s.gpus // parts)
            if s.around
            else nodes.take(server_node, s.gpus // parts, parts)
            for i in range(s.count)
        )
    rewards = nodes.take(_Node(pool=REWARD_POOL, size=0), 0, reward_nodes)
    if cluster.n_nodes not in (None, len(nodes.nodes)):
        why = f"the job takes {len(nodes.nodes)} node(s) of cluster.n_gpus_per_node={size}"
        fix = "correct allocation_mode, or leave cluster.n_nodes null"
        raise ConfigError(f"cluster.n_nodes={cluster.n_nodes}: {why}; {fix}")
    return Placement(
        pools=tuple(n.pool for n in nodes.nodes),
        gpus_per_node=tuple(n.size if on_gpus else 0 for n in nodes.nodes),
        trainers=tuple(ranks),
        servers=seats,
        rewards=tuple(replace(seat, gpus=None) for seat in rewards),
        shared=on_gpus and any(s.around and s.count for s in servers),
    )


@dataclass(kw_only=True)
class _Node:
    pool: str
    size: int
    taken: int = 0


@dataclass(kw_only=True)
class _Nodes:
    """Holds the nodes in use so far, in their order. size: GPUs of a trainers' node."""

    size: int
    on_gpus: bool
    nodes: list[_Node] = field(default_factory=list)

    def take(self, kind: _Node, count: int, parts: int) -> tuple[Seat, ...]:
        """Takes `count` GPUs of each of `parts` nodes in a row, new ones where needed."""
        for first in range(len(self.nodes) + 1):
            row = self.nodes[first : first + parts]
            if all(n.pool == kind.pool and n.taken + count <= n.size for n in row):
                break
        while len(self.nodes) < first + parts:
            self.nodes.append(replace(kind))
        seats = []
        for i, node in enumerate(self.nodes[first : first + parts], first):
            seats.append(self._seat(i, range(node.taken, node.taken + count)))
            node.taken += count
        return tuple(seats)

    def go_round(self, servers: Servers, first: int, count: int) -> tuple[Seat, ...]:
        """Returns the seats of a server that has GPUs `first` and following ones of the first
        `around`, `count` on each node."""
        seats = []
        for at in range(first, first + servers.gpus, count):
            slots = [(at + i) % servers.around for i in range(count)]
            seats.append(self._seat(slots[0] // self.size, (slot % self.size for slot in slots)))
        self.nodes[0].taken = max(self.nodes[0].taken, min(servers.around, self.size))
        return tuple(seats)

    def _seat(self, node: int, slots: Iterable[int]) -> Seat:
        gpus = f"@{{gpus:{','.join(map(str, slots))}}}" if self.on_gpus else None
        return Seat(node=node, gpus=gpus)


def _parts(servers: Servers, size: int, *, pooled: bool) -> int:
    """Returns how many nodes of `size` GPUs one server spans. Raises ConfigError where its GPUs do
    not divide evenly. pooled: servers have nodes of another kind."""
    key, gpus, around = servers.key, servers.gpus, servers.around
    if around and pooled:
        raise ConfigError("cluster.server_pool: colocated servers have no own nodes; leave it null")
    parts = servers.nnodes or -(-gpus // size)
    if gpus % parts or gpus // parts > size:
        why = f"does not divide evenly over {parts} node(s) of {size} GPUs"
        raise ConfigError(f"{key}.tp*dp={gpus}: {why}; correct {key}.tp, {key}.dp or {key}.nnodes")
    if around and (gpus > around or (around > size and size % (gpus // parts))):
        why = f"servers take equal shares of {around} trainer GPUs, {min(around, size)} a node"
        raise ConfigError(f"{key}.tp*dp={gpus}: {why}; choose a degree that divides them")
    return parts
