"""GraphTrainer runs an RL recipe's step as its dataflow graph, on the meshes that it is given.

trainer:
  mode: controller
  workers: 4
  type: megarl.graph_trainer:GraphTrainer
  options: {where: {train_actor: g0-g1 dp2, train_critic: g2-g3 tp2}}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import networkx as nx

from megarl.algos import Role
from megarl.config.errors import ConfigError, raise_if_any
from megarl.config.recipe_engines import engines, ref_is_below_adapters, saved_engines, takes_turns
from megarl.config.recipes import GRPOConfig, PPOConfig
from megarl.controlled import ControllerContext, RemoteWorkers
from megarl.controller.graph import CallFailed, GraphExecution, GraphPlan, StepState
from megarl.controller.worker import RAISED
from megarl.dataflow.graph import GENERATE, calls_of
from megarl.dataflow.graphs import recipe_graph
from megarl.dataflow.mesh import Devices, Mesh
from megarl.observability.stats_tracker import record_timing
from megarl.trainer.context import RunContext
from megarl.trainer.rl import RLTrainer, gae_settings
from megarl.trainer.roles import MegatronRewardModel, make_actor, make_critic, make_frozen
from megarl.trainer.rollout_metrics import rollout_metrics, trained_metrics, update_speed
from megarl.trainer.self_check import SelfCheck


class GraphTrainer(RLTrainer):
    """Trains by the graph of a GRPO, ReMax or PPO recipe. Its steps give the weights of the
    recipe's own trainer, to the bit where each model is in the same layout with one data-parallel
    rank. With more of them rows are on other ranks, so that sums are rounded otherwise.

    What watches the run is on the actor's mesh; a model that is trained on another has a self check
    of its own there, and no fingerprints.
    """

    ctx: ControllerContext

    def __init__(
        self,
        cfg: GRPOConfig,
        ctx: ControllerContext,
        *,
        where: Mapping[str, str] | None = None,
        devices: str | None = None,
    ) -> None:
        """Takes where calls run, by call ("g0-g1 dp2"), and the trainers' nodes and devices
        ("2x8"), by default one node. Raises ConfigError for what has no graph, and meshes that
        do not fit."""
        raise_if_any(_problems(cfg, ctx))
        try:
            size = Devices.parse(devices) if devices else Devices(1, ctx.world_size)
            self.graph = self.make_graph(cfg, size, where or {})
            self.plan = GraphPlan(self.graph)
        except ConfigError:
            raise
        except ValueError as e:
            raise ConfigError(f"trainer.options: {e}") from e
        for model, home in self.plan.homes.items():  # what logs and checkpoints say
            engines(cfg)[model].parallel = home.where.parallel
        self._parts: dict[Mesh, RemoteWorkers] = {}
        super().__init__(cfg, ctx)

    def make_graph(self, cfg: GRPOConfig, devices: Devices, where: Mapping[str, str]) -> nx.DiGraph:
        """Returns the graph of a step, with the places of its calls. Raises ConfigError if `where`
        names a call that generates."""
        graph = recipe_graph(cfg, devices, where)
        if named := [c.name for c in calls_of(graph) if c.kind == GENERATE and c.name in where]:
            why = "servers generate; leave it out, and set server.count and server.tp"
            raise ConfigError(f"trainer.options.where.{named[0]}={where[named[0]]}: {why}")
        name, args = "advantages", {"kl_ctl": cfg.kl_ctl}
        if isinstance(cfg, PPOConfig):
            name, args = "gae", gae_settings(cfg)
        graph.nodes[name]["call"] = replace(graph.nodes[name]["call"], args=args)
        return graph

    @property
    def trainers(self) -> RemoteWorkers:
        """Returns the workers of the actor's mesh."""
        return self._at_home("actor")

    def _at_home(self, model: str) -> RemoteWorkers:
        mesh = self.plan.homes[model].where.mesh
        if mesh not in self._parts:
            self._parts[mesh] = self.ctx.part(mesh.devices)
        return self._parts[mesh]

    def set_up_models(self) -> None:
        """Makes every model of the graph on its mesh."""
        cfg, roles = self.cfg, dict[str, Role]()
        roles["actor"] = make_actor(cfg, self.ctx.tokenizer)
        if isinstance(cfg, PPOConfig):
            roles["critic"] = make_critic(cfg)
        if cfg.ref is not None:
            roles["ref"] = make_frozen(cfg, cfg.gconfig.temperature)
        if cfg.reward_model is not None:
            roles["reward_model"] = MegatronRewardModel(cfg.reward_model, seed=cfg.seed)
        self.execution = GraphExecution(
            self.graph,
            self.ctx.trainers.group,
            roles,
            batches=self._batch,
            publish=self._publish,
            spec=self.spec,
        )
        self.actor = self.execution.role("actor")
        self.ref = self.reward_model = None  # they are the graph's

    def set_up_others(self) -> dict[str, Role]:
        """Returns the trained models beside the actor, each under a self check on its mesh."""
        others = {n: self.execution.role(n) for n in self.plan.trained if n != "actor"}
        self._checks = {self.trainers.group: self.check}
        for name, role in others.items():
            there = self._at_home(name)
            if there.group not in self._checks:
                self._checks[there.group] = there.make(SelfCheck, self.cfg, there.ctx)
            self._checks[there.group].watch(role)
        return others

    def record_updates(self, trained: dict[str, Role]) -> None:
        """Has the updates of the roles on the actor's mesh recorded."""
        near = {n: r for n, r in trained.items() if self._at_home(n) is self.trainers}
        super().record_updates(near)

    # -- steps

    def step(self, step: int) -> dict[str, float]:
        """Makes step `step` (from 0) of the graph; returns its metrics."""
        for check in self._checks.values():
            check.begin_step(step + 1)
        try:
            return self._metrics(self.execution.step(step), step)
        except CallFailed as e:
            if isinstance(e.__cause__, RAISED):  # which the loop catches
                raise e.__cause__ from None
            raise

    def _batch(self, step: int) -> Any:
        """Returns the step's batch, which the servers generate."""
        with record_timing("rollout"):
            batch = self.session.prepare_batch()
        self.check.has_trained_tokens(batch)
        if "logp" not in self.graph:
            self.actor.place(batch)
            self.check.look_before_update(batch, self.actor)
        return batch

    def _publish(self, actor: Any, version: int) -> dict[str, float]:
        with record_timing("update_weights"):
            return self.publisher.publish(version)

    def _metrics(self, state: StepState, step: int) -> dict[str, float]:
        batch, limits = state.batch, self.cfg.actor.reward_limits
        stats = rollout_metrics(batch, version=step, limits=limits)
        self.check.rewards_differ(stats)
        calls = [call for call in self.plan.calls if call.name in state.worked]
        for call in calls:
            prefix = "" if call.model == "actor" else f"{call.model}/"
            stats |= {f"{prefix}{name}": v for name, v in state.stats[call.name].items()}
        stats |= trained_metrics(batch, version=step)
        stats |= state.stats[f"{self.plan.trained['actor'].name}: publish"]
        stats |= self.session.account(batch)
        for call in calls:
            begun, ended = state.worked[call.name]
            stats[f"timing/{call.name}_s"] = ended - begun
        return stats | self._speed(state)

    def _speed(self, state: StepState) -> dict[str, float]:
        begun, ended = state.worked[self.plan.trained["actor"].name]
        peak = self.cfg.profiler.get("peak_tflops")
        return self.trainers.run(
            update_speed, self.actor, state.batch, seconds=ended - begun, peak_tflops=peak
        )

    def destroy(self) -> None:
        """Destroys the roles. Collective."""
        self.execution.destroy()


def _problems(cfg: GRPOConfig, ctx: RunContext) -> Iterator[str]:
    """Yields what a graph's run cannot do."""
    if not isinstance(ctx, ControllerContext):
        yield "GraphTrainer needs trainer.mode=controller, which runs calls on a part of the ranks"
    if ref_is_below_adapters(cfg):
        yield "GraphTrainer: a reference below the actor's adapters has no mesh; set ref.path"
    if "ref" in saved_engines(cfg):
        yield "GraphTrainer: a reference that follows the policy is not one of the graph's models"
    if takes_turns(cfg):
        yield "server.release_memory=true: servers take no turns with a graph's calls; set it false"
