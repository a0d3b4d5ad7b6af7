"""Gives each process of a job its node and GPUs; nothing is asked of the nodes.

`share_out` does so for the GPUs that are visible on this machine, `place` for a cluster's nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from megarl.config.cluster import ClusterConfig
from megarl.config.errors import ConfigError

NODES, TRAINER_POOL, SERVER_POOL, REWARD_POOL = "nodes", "trainers", "servers", "rewards"


@dataclass(frozen=True, kw_only=True)
class Seat:
    """Places a process: on node `node`, with `gpus` for CUDA_VISIBLE_DEVICES; None has no GPUs."""

    node: int
    gpus: str | None


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Holds the pool of each node, the seat of each rank and those of each server, one per node
    that it spans, that of the reward worker on each node without GPUs, and those of the judge's
    servers. `shared` says that servers and trainers have GPUs in common."""

    pools: tuple[str, ...]
    trainers: tuple[Seat, ...]
    servers: tuple[tuple[Seat, ...], ...]
    rewards: tuple[Seat, ...] = ()
    judges: tuple[tuple[Seat, ...], ...] = ()
    shared: bool = False


def set_aside(
    gpus: Sequence[str], *, judges: int, judge_gpus: int
) -> tuple[Sequence[str], tuple[tuple[Seat, ...], ...]]:
    """Gives the last GPUs to the judge's servers, `judge_gpus` to each; returns the other GPUs, and
    the seats. Raises ConfigError where no others are left."""
    if not gpus or not judges:
        return gpus, ((Seat(node=0, gpus=None),),) * judges
    left = len(gpus) - judges * judge_gpus
    if left < 1:
        raise ConfigError(
            [f"judge.count={judges} of judge.tp*dp={judge_gpus}: {len(gpus)} GPUs are visible"]
        )
    own = [gpus[left + i * judge_gpus :][:judge_gpus] for i in range(judges)]
    return gpus[:left], tuple((Seat(node=0, gpus=",".join(names)),) for names in own)


def share_out(gpus: Sequence[str], *, trainers: int, servers: int, server_gpus: int) -> Placement:
    """Gives the first GPUs to the trainers and `server_gpus` further ones to each server.

    Where there are too few for both, servers go round the trainers' GPUs. Raises ConfigError where
    the trainers alone, or a server alone, need more than there are.
    """
    if not gpus:
        seat = Seat(node=0, gpus=None)
        return Placement(pools=(NODES,), trainers=(seat,) * trainers, servers=((seat,),) * servers)
    if trainers > len(gpus):
        raise ConfigError(
            [f"{trainers} trainer processes need as many GPUs and {len(gpus)} are visible"]
        )
    if server_gpus > len(gpus):
        raise ConfigError([f"server.tp*dp={server_gpus}: {len(gpus)} GPUs are visible"])
    first = [trainers + i * server_gpus for i in range(servers)]
    return Placement(
        pools=(NODES,),
        trainers=(Seat(node=0, gpus=",".join(gpus[:trainers])),) * trainers,
        servers=tuple(
            (Seat(node=0, gpus=",".join(gpus[(at + j) % len(gpus)] for j in range(server_gpus))),)
            for at in first
        ),
        shared=trainers + servers * server_gpus > len(gpus),
    )


def gpu_slots(first: int, count: int) -> str:
    """Returns the mark that a node replaces by so many of its GPUs, from its `first`."""
    return f"@{{gpus:{','.join(map(str, range(first, first + count)))}}}"


@dataclass(kw_only=True)
class _Node:
    pool: str
    size: int
    taken: int = 0


@dataclass(kw_only=True)
class _Rooms:
    """Holds the nodes that are in use so far, in their order."""

    on_gpus: bool
    nodes: list[_Node] = field(default_factory=list)

    def seat(self, node: int, first: int, count: int) -> Seat:
        return Seat(node=node, gpus=gpu_slots(first, count) if self.on_gpus else None)

    def take(self, pool: str, size: int, count: int, *, parts: int) -> tuple[Seat, ...]:
        """Takes `count` GPUs of each of `parts` nodes that follow each other, new ones where
        needed."""
        for start in range(len(self.nodes) + 1):
            run = self.nodes[start : start + parts]
            if all(n.pool == pool and n.taken + count <= n.size for n in run):
                break
        while len(self.nodes) < start + parts:
            self.nodes.append(_Node(pool=pool, size=size))
        seats = []
        for i in range(start, start + parts):
            seats.append(self.seat(i, self.nodes[i].taken, count))
            self.nodes[i].taken += count
        return tuple(seats)


def place(
    cluster: ClusterConfig,
    *,
    trainers: int,
    servers: int = 0,
    server_gpus: int = 1,
    server_nnodes: int | None = None,
    reward_nodes: int = 0,
    judges: int = 0,
    judge_gpus: int = 1,
    judge_nnodes: int | None = None,
    colocated: bool = False,
    on_gpus: bool = True,
) -> Placement:
    """Fills nodes with the trainers, then with the servers: beside the trainers where one node has
    room for both, else on further nodes; with `colocated`, on the trainers' GPUs in turn. The
    judge's servers follow, on GPUs of their own. A reward worker is alone on each of the last
    `reward_nodes` nodes.

    Raises ConfigError for processes that do not fill nodes evenly, and where cluster.n_nodes is
    another number than they need.
    """
    pool, size = cluster.server_pool, cluster.n_gpus_per_node
    if colocated and pool is not None:
        raise ConfigError(
            ["cluster.server_pool: colocated servers are on the trainers' nodes; leave it null"]
        )
    rooms = _Rooms(on_gpus=on_gpus)
    ranks = _trainer_seats(rooms, trainers, size, NODES if pool is None else TRAINER_POOL)
    below = trainers if colocated else 0
    found = _server_seats(rooms, cluster, servers, server_gpus, server_nnodes, below)
    judging = _server_seats(rooms, cluster, judges, judge_gpus, judge_nnodes, 0, key="judge")
    rewards = [rooms.take(REWARD_POOL, 1, 1, parts=1)[0].node for _ in range(reward_nodes)]
    if cluster.n_nodes not in (None, len(rooms.nodes)):
        others = f" and {servers} server(s) of {server_gpus}" if servers else ""
        others += f" and {judges} of {judge_gpus} for the judge" if judges else ""
        others += f" and {reward_nodes} reward worker(s)" if reward_nodes else ""
        raise ConfigError([_wrong_number(cluster, trainers, others, len(rooms.nodes))])
    return Placement(
        pools=tuple(n.pool for n in rooms.nodes),
        trainers=ranks,
        servers=found,
        judges=judging,
        rewards=tuple(Seat(node=node, gpus=None) for node in rewards),
        shared=colocated and on_gpus,
    )


def _trainer_seats(rooms: _Rooms, trainers: int, size: int, pool: str) -> tuple[Seat, ...]:
    if trainers > size and trainers % size:
        raise ConfigError(
            [
                f"{trainers} trainer processes do not fill nodes of cluster.n_gpus_per_node={size}:"
                f" start a multiple of {size}, or change cluster.n_gpus_per_node"
            ]
        )
    each, nodes = min(trainers, size), max(1, trainers // size)
    seats = rooms.take(pool, size, each, parts=nodes)
    return tuple(seat for seat in seats for _ in range(each))


def _server_seats(
    rooms: _Rooms,
    cluster: ClusterConfig,
    servers: int,
    gpus: int,
    nnodes: int | None,
    below: int,
    key: str = "server",
) -> tuple[tuple[Seat, ...], ...]:
    """Returns the seats of each server. below: the trainers whose GPUs servers share, 0 for GPUs of
    their own. key: the section that configures them."""
    if not servers:
        return ()
    pool = cluster.server_pool
    room = pool.n_gpus_per_node if pool else cluster.n_gpus_per_node
    parts = _server_parts(gpus, nnodes, room, key)
    each, name = gpus // parts, SERVER_POOL if pool else NODES
    if below:
        return tuple(_colocated(rooms, i, each, parts, below) for i in range(servers))
    return tuple(rooms.take(name, room, each, parts=parts) for _ in range(servers))


def _server_parts(gpus: int, nnodes: int | None, room: int, key: str) -> int:
    """Returns how many nodes one server spans."""
    parts = nnodes or -(-gpus // room)
    if gpus % parts or gpus // parts > room:
        raise ConfigError(
            [
                f"{key}.tp*dp={gpus}: does not divide evenly over {parts} node(s) of {room} GPUs; "
                f"set {key}.tp, {key}.dp or {key}.nnodes so that it does"
            ]
        )
    return parts


def _colocated(rooms: _Rooms, index: int, each: int, parts: int, trainers: int) -> tuple[Seat, ...]:
    """Returns the seats of server `index` on the trainers' GPUs, going round them."""
    per_node = rooms.nodes[0].taken
    if per_node % each or each * parts > trainers:
        raise ConfigError(
            [
                f"server.tp*dp={each * parts}: colocated servers take equal shares of the "
                f"{per_node} trainer GPUs of a node; choose a degree that divides them"
            ]
        )
    seats = []
    for part in range(parts):
        slot = (index * parts + part) * each % trainers
        seats.append(rooms.seat(slot // per_node, slot % per_node, each))
    return tuple(seats)


def _wrong_number(cluster: ClusterConfig, trainers: int, others: str, needed: int) -> str:
    return (
        f"cluster.n_nodes={cluster.n_nodes}: {trainers} trainer processes{others} take {needed} "
        f"node(s) of cluster.n_gpus_per_node={cluster.n_gpus_per_node}; correct allocation_mode, "
        "or leave cluster.n_nodes null"
    )
