"""RolloutSession runs a run's generation, as every rank sees it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from megarl.algos.rows import rollouts_of
from megarl.api.batch import Batch, Padded
from megarl.api.context import add_contexts, prompt_lengths
from megarl.config.dataset import DatasetConfig
from megarl.config.earlier_run import RECOVER_DIR
from megarl.config.loader import run_dir
from megarl.config.recipe_engines import model_path
from megarl.config.recipes import DistillConfig, GRPOConfig
from megarl.config.run import EpisodesConfig, WandbConfig
from megarl.data.dataset import build_dataloader, build_dataset, go_on
from megarl.data.draws import Curriculum, Draws, pass_rate
from megarl.data.tokenizer import check_context
from megarl.models.hf_config import read_hf_config
from megarl.observability.logging import get_logger, warn_on_rank_zero
from megarl.observability.stats_tracker import record_timing
from megarl.parallel.ranks import on_rank_zero
from megarl.rollout.client import RemoteSGLangEngine
from megarl.rollout.episodes import Episode, Outcome, State
from megarl.trainer.context import HERE, Workers
from megarl.trainer.episode_recorder import EpisodeRecorder, computed_part, computed_tokens
from megarl.trainer.evaluation import HeldOut, evaluate_unless_stopped, make_pool, make_workflow
from megarl.trainer.recover import AnswersFile, data_of, same_data
from megarl.trainer.rollout_metrics import PASSES, trained_completions
from megarl.trainer.step_recorder import StepRecorder
from megarl.trainer.teacher_context import TeacherContext
from megarl.trainer.turns import Turns
from megarl.utils import stopping
from megarl.utils.stopping import StopRequested
from megarl.wire.routes import RouteShape

log = get_logger(__name__)

MOST = 16  # difficulties that have figures of their own; those that come later are "other"


class RolloutSession:
    """Runs the generation of a run: its data, workflows and rollout client. Every rank makes one;
    its methods are collective, but for `expect`, `state_dict`, `completions`, `counters` and
    `close`. Rank 0 alone reads data and talks to servers (RolloutDriver), and its errors are raised
    on every rank."""

    step_recorder: StepRecorder | None = None  # is shown every batch

    def __init__(
        self,
        cfg: GRPOConfig,
        tokenizer: Any,
        workers: Workers = HERE,
    ) -> None:
        """Reads the data; servers are not needed yet. workers: where the client and the driver are,
        and `tokenizer`."""
        self._workers = workers
        self.client = workers.make(RemoteSGLangEngine.for_run, cfg)
        self.driver: RolloutDriver | None = None  # on rank 0
        self._episodes = EpisodesConfig(**cfg.episodes)
        self.turns = Turns(self.client)

        def make() -> int:
            self.driver = workers.make(RolloutDriver, cfg, tokenizer, self.client)
            return self.driver.dataset_size()

        self.dataset_size = on_rank_zero(make)

    def start(self) -> None:
        """Waits for the servers."""
        self.client.initialize()
        self.client.on_driver(RolloutDriver.opened, self.driver)

    def expect(self, steps: int) -> None:
        """Says how many more batches there will be, so that nothing is generated beyond them."""
        if self.driver is not None:
            self.driver.expect(steps)

    def prepare_batch(self) -> Batch:
        """Returns the next training batch. Raises StopRequested where a signal came meanwhile."""
        self.turns.generate()
        batch = self.client.share(RolloutDriver.next_batch, self.driver)
        self.turns.train()
        if self.step_recorder is not None:
            self.step_recorder.handed_out(batch)
        return batch

    def drop(self, batch: Batch, failed: Tensor, kind: str) -> Batch:
        """Returns the batch without the samples under `failed` [B] bool, and the other rows of
        their rollouts; they are counted as a workflow's failed samples are. `kind` is one of
        api.inference.FAILURES. Raises ValueError where none would be left.
        """
        if not failed.any():
            return batch
        rollouts = rollouts_of(batch)
        failed = rollouts.spread(rollouts.any(failed))
        rows = failed.nonzero().flatten().tolist()
        if len(rows) == len(batch):
            fix = "where a reward model scores them, look whether its weights are sound"
            fix = "shorten teacher.context" if kind == "context" else fix
            raise ValueError(
                f"all {len(batch)} samples of the batch failed ({kind}), so there is nothing to "
                f"train on; {fix}"
            )
        warn_on_rank_zero(
            log, "%d of %d samples failed (%s) and leave the batch", len(rows), len(batch), kind
        )
        self.client.on_driver(RolloutDriver.failed, self.driver, batch, failed, kind)
        return batch.keep(~failed)

    def account(self, batch: Batch) -> dict[str, float]:
        """Books the batch as trained, which every sample must be exactly once unless its update was
        skipped. Returns the counters so far, and reward/mean_failed_as_zero: what the mean reward
        would be if the rollouts that failed meanwhile had earned nothing.
        """
        if self.step_recorder is not None:
            self.step_recorder.computed(batch)
        if self._episodes.keep != 0:
            with record_timing("episodes"):
                part = computed_part(batch, self._episodes.keep)
                of_all = batch["rewards"], batch.get("skipped")
                self._workers.run(_record, self.driver, *part, *of_all)
        done = batch["episode_ids"], batch.get("skipped")
        counters = self.client.on_driver(RolloutDriver.account, self.driver, *done)
        rewards = rollouts_of(batch).of_first(batch["rewards"]).double()
        count = len(rewards) + counters["rollout/failed_in_batch"]
        return counters | {"reward/mean_failed_as_zero": rewards.sum().item() / count}

    def evaluate(self, samples_path: Path, when: str | None = None) -> dict[str, float]:
        """Returns the `eval/...` metrics of the held-out rows; none without a validation set."""
        self.turns.generate()
        return self.client.on_driver(RolloutDriver.evaluate, self.driver, samples_path, when)

    def state_dict(self) -> dict[str, Any]:
        """Returns, between two steps, the place in the data, what is in flight and the counters.
        Rank 0 only."""
        assert self.driver is not None
        return self.driver.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from what `state_dict` returned."""
        self.client.on_driver(RolloutDriver.load_state_dict, self.driver, state)

    def completions(self) -> dict[str, list[dict[str, Any]]]:
        """Returns what the tables of completions show since the last call: records of the latest
        training batch ("train") and evaluation ("eval"). Rank 0's; none elsewhere."""
        return self.driver.take_shown() if self.driver is not None else {}

    def addresses(self) -> list[str]:
        """Returns host:port of every server that is not lost. Rank 0's; none elsewhere."""
        return self.driver.addresses() if self.driver is not None else []

    def counters(self) -> dict[str, float]:
        """Returns rank 0's counters, as `account` does; none elsewhere and before `start`."""
        return self.driver.counters() if self.driver is not None else {}

    def close(self) -> None:
        """Ends the client and the reward workers. Waits for no other rank."""
        try:
            self.client.destroy()
        finally:
            if self.driver is not None:
                self.driver.close()


def _record(
    driver: RolloutDriver | None, part: Batch, rows: Tensor, rewards: Tensor, skipped: Tensor | None
) -> None:
    """Has the driver (None: another rank's) record what the step computed (computed_part). rewards,
    skipped: [B] of all rows of the batch. Collective."""
    tokens = computed_tokens(part, rows)
    if driver is not None and driver.recorder is not None:
        driver.recorder.computed(tokens, rewards, skipped)


class RolloutDriver:
    """Does rank 0's part of a RolloutSession: reads the data and talks to the servers."""

    def __init__(self, cfg: GRPOConfig, tokenizer: Any, client: RemoteSGLangEngine) -> None:
        self.client = client
        self.model, self.override = model_path(cfg, "actor"), cfg.actor.override_config
        self.replays_rollout = cfg.actor.router_replay == "rollout"
        self.data = build_dataset(cfg.train_dataset, tokenizer, purpose="rl", seed=cfg.seed)
        check_context(self.data, cfg.gconfig, cfg.server.context_length)
        self.loader = build_dataloader(self.data, cfg.train_dataset, seed=cfg.seed)
        self.data_key = data_of(cfg, len(self.data))
        self.pool = make_pool(cfg.rollout)
        self.workflow = make_workflow(
            cfg.rollout, cfg.train_dataset, self.data, cfg.gconfig, tokenizer, self.pool
        )
        self.answers: AnswersFile | None = None
        if cfg.recover.mode != "disabled":
            path = run_dir(cfg) / RECOVER_DIR / "answers.pt"
            self.answers = AnswersFile(path, client, cfg.recover.answers_secs)
        self.recorder: EpisodeRecorder | None = None
        if (keep := EpisodesConfig(**cfg.episodes).keep) != 0:
            self.recorder = EpisodeRecorder(run_dir(cfg), tokenizer, keep)
        wandb = WandbConfig(**cfg.stats_logger.wandb)
        self.shows = wandb.completions if wandb.mode != "disabled" else 0
        self.shown: dict[str, list[dict[str, Any]]] = {}
        self._tokenizer = tokenizer
        self.held_out = HeldOut.for_run(
            cfg, tokenizer, self.pool, trained=self.data, shows=self.shows
        )
        self.results = Results(cfg.train_dataset, self.loader.sampler)
        self.context: TeacherContext | None = None
        self.taken: dict[int, Episode] = {}  # by the next batch, where a teacher has a context
        if isinstance(cfg, DistillConfig) and cfg.teacher.context:
            self.context = TeacherContext.for_run(cfg, tokenizer)
            rows = map(self.data.__getitem__, range(len(self.data)))
            self.context.check(rows, max_new_tokens=cfg.gconfig.max_new_tokens)

    def dataset_size(self) -> int:
        """Returns the number of rows of the training data."""
        return len(self.data)

    def expect(self, steps: int) -> None:
        """Says how many more batches there will be."""
        self.client.executor.expect(steps)

    def addresses(self) -> list[str]:
        """Returns host:port of every server that is not lost."""
        return self.client.addresses

    def take_shown(self) -> dict[str, list[dict[str, Any]]]:
        """Returns what the tables of completions show since the last call."""
        shown, self.shown = self.shown, {}
        return shown

    def opened(self) -> None:
        """Has answers checked against the model's vocabulary, kept for a resume and, to be
        replayed, carry routes, and episodes recorded, from now on, as the client is open."""
        executor = self.client.executor
        model = read_hf_config(self.model, override=self.override)
        executor.vocab_size = model.vocab_size
        executor.episodes.keeps_answers = self.answers is not None
        if self.replays_rollout and model.moe is not None:
            self.client.record_routes(
                RouteShape(
                    layers=model.num_layers,
                    experts=model.moe.num_experts,
                    top_k=model.moe.top_k,
                )
            )
        if self.recorder is not None:
            executor.observer = self.recorder.ended
        if self.context is not None:
            executor.observer = self._ended

    def _ended(self, episode: Episode) -> None:
        """Takes an episode that a batch takes, or that is rejected."""
        if self.recorder is not None:
            self.recorder.ended(episode)
        if episode.state is State.TAKEN:
            self.taken[episode.number] = episode

    def next_batch(self) -> list[Padded]:
        """Returns the samples of the next batch, by episode. Raises StopRequested where a signal
        asks the run to end."""
        if stopping.wish():
            raise StopRequested
        parts = self.client.executor.prepare_parts(
            self.loader,
            workflow=self.workflow,
            should_accept=self.client.should_accept,
            meanwhile=self.answers.write_if_due if self.answers else None,
        )
        if self.shows:
            self.shown["train"] = trained_completions(parts, self._tokenizer, self.shows)
        self.results.take(self.client.executor.outcomes)
        if self.recorder is not None:
            self.recorder.handed_out(self.client.get_version())
        if self.context is None:
            return parts
        episodes = [self.taken.pop(int(part["episode_ids"][0])) for part in parts]
        own = [prompt_lengths(part) for part in parts]
        groups = zip(episodes, parts, own, strict=True)
        return add_contexts(parts, own, [self.context.of_group(*group) for group in groups])

    def failed(self, batch: Batch, failed: Tensor, kind: str) -> None:
        """Books the samples under `failed` [B], which leave the batch, as failed."""
        self.client.executor.failed(batch, failed, kind)
        if self.recorder is not None:
            self.recorder.dropped(failed, kind)

    def close(self) -> None:
        """Ends the reward workers, and waits until the episodes are on disk."""
        try:
            self.pool.close()
        finally:
            if self.recorder is not None:
                self.recorder.close()

    def account(self, episode_ids: Any, skipped: Any) -> dict[str, float]:
        """Books the samples of `episode_ids` [B] as trained, but for those `skipped` [B] (None:
        none); returns the counters."""
        self.client.executor.trained(episode_ids, skipped)
        return self.counters() | self.results.figures

    def evaluate(self, samples_path: Path, when: str | None) -> dict[str, float]:
        """Returns the `eval/...` metrics of the validation sets (HeldOut.evaluate); none where a
        signal ends the evaluation."""
        figures = evaluate_unless_stopped(self.held_out, self.client, samples_path, when)
        if figures and self.shows:
            self.shown["eval"] = self.held_out.shown
        return figures

    def counters(self) -> dict[str, float]:
        """Returns rollout/submitted = running + accepted + rejected + failed + dropped, and others;
        none before the client is open.
        """
        stats = self.client.stats() if self.client.is_open else {}
        return {
            name if name.startswith("tools/") else f"rollout/{name}": value
            for name, value in stats.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """Returns the place in the data, what is in flight and the counters."""
        rollout = self.client.executor.state_dict()
        return {
            "data": self.data_key,
            "loader": self.loader.state_dict(),
            "rollout": rollout,
            "version": self.client.get_version(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from what `state_dict` returned. Where the training data has changed, its first
        epoch begins and prompts in flight are dropped."""
        rollout = state["rollout"]
        written = self.answers.read(state["version"]) if self.answers else None
        if same_data(state["data"], self.data_key):
            go_on(self.loader, state["loader"])
            if written is not None:  # since the checkpoint
                rollout = rollout | {"answers": written}
        else:
            rollout = rollout | {"rows": [], "answers": [], "outcomes": []}
        if unfinished := [a for _, answers in rollout["answers"] for a in answers]:
            tokens = sum(len(a["tokens"]) for a in unfinished)
            log.info("going on with %d answers of before, of %d tokens", len(unfinished), tokens)
        self.client.executor.load_state_dict(rollout)


class Results:
    """Tells the sampler of the training data the pass rates of every batch, and keeps its figures:
    dataset/<part>/prompts and dataset/<part>/reward, of rows with a column `difficulty`
    difficulty/<value>/prompts and difficulty/<value>/pass_rate, and what the curriculum knows.

    sampler: the loader's; one of the user's own hears nothing."""

    def __init__(self, config: DatasetConfig, sampler: object) -> None:
        self._parts, self._curriculum = list(config.parts), config.curriculum is not None
        self._draws = sampler if isinstance(sampler, Draws) else None
        bound = (
            Curriculum(**config.curriculum).passes_at if config.curriculum is not None else PASSES
        )
        self._passes_at = bound
        self._difficulties: set[str] = set()
        self.figures: dict[str, float] = {}

    def take(self, outcomes: Sequence[Outcome]) -> None:
        """Takes the outcomes that came with a batch, rejected ones among them."""
        self.figures = self._by_difficulty(outcomes)
        if self._draws is None:
            return
        self.figures |= self._by_part(outcomes)
        if self._curriculum:
            bound = self._passes_at
            self._draws.observe((o.row["row_id"], pass_rate(o.rewards, bound)) for o in outcomes)
            self.figures |= self._draws.stats()

    def _by_part(self, outcomes: Sequence[Outcome]) -> dict[str, float]:
        figures = {}
        for name in self._parts:
            rewards = [o.rewards for o in outcomes if o.row["dataset"] == name]
            figures[f"dataset/{name}/prompts"] = float(len(rewards))
            if flat := [reward for of_row in rewards for reward in of_row]:
                figures[f"dataset/{name}/reward"] = sum(flat) / len(flat)
        return figures

    def _by_difficulty(self, outcomes: Sequence[Outcome]) -> dict[str, float]:
        by_value: dict[str, list[Outcome]] = {}
        for outcome in outcomes:
            if (value := outcome.row.get("difficulty")) is not None:
                by_value.setdefault(self._named(value), []).append(outcome)
        figures = {}
        for name, alike in sorted(by_value.items()):
            figures[f"difficulty/{name}/prompts"] = float(len(alike))
            rate = pass_rate([reward for o in alike for reward in o.rewards], self._passes_at)
            if rate is not None:
                figures[f"difficulty/{name}/pass_rate"] = rate
        return figures

    def _named(self, difficulty: Any) -> str:
        """Returns a difficulty as part of a metric's name: a number with one decimal at most."""
        number = isinstance(difficulty, float)
        name = f"{difficulty:.1f}".removesuffix(".0") if number else str(difficulty)
        name = name.replace("/", "_")
        if len(self._difficulties) < MOST:
            self._difficulties.add(name)
        return name if name in self._difficulties else "other"
