"""Defines ChatWorkflow, which has what every workflow of turns needs, and MixedWorkflow."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypedDict

from megarl.api.batch import Padded
from megarl.api.chat_template import ChatTemplate
from megarl.api.inference import SAMPLES_MISSING, InferenceEngine, RolloutWorkflow
from megarl.api.records import ModelRequest, ModelResponse
from megarl.config.recipes import GRPOConfig, workflow_of
from megarl.config.rollout import GenerationHyperparameters
from megarl.config.script import REWARD_KEYS, note_read
from megarl.observability.logging import get_logger, warn_recurring
from megarl.rollout.episode_context import attempt_key, seed_version, stable_seed
from megarl.rollout.loop_thread import add_counts, all_of
from megarl.rollout.rewards import (
    RewardPool,
    reward_arguments,
    reward_of,
    shared_pool,
)
from megarl.rollout.rewards.results import RewardError, fails_sample
from megarl.rollout.trajectory import Trajectory
from megarl.utils.importing import option_problems

log = get_logger(__name__)

# of a row, what a reward gets as its own arguments, and what is the executor's
_NOT_FOR_REWARD = (
    *("prompt", "completion", "prompt_ids", "completion_ids"),
    *("episode_id", SAMPLES_MISSING),
)


_NO_OTHER: Mapping[int, GenerationHyperparameters] = {}


class ChatOptions(TypedDict, total=False):
    """Declares the options of every ChatWorkflow, which a subclass takes as **common and hands on.

    reward_pool: where rewards are computed; by default one that all workflows of the process share.
    chat_template_kwargs: what the chat template gets (enable_thinking, ...).
    """

    reward_pool: RewardPool | None
    chat_template_kwargs: Mapping[str, Any] | None


class ChatWorkflow(RolloutWorkflow):
    """Gives a workflow of one or more turns its parts: `begin`, `generate`, `tell`, `score`. A
    subclass writes `arun_episode` with them, and ends with `return to_batch(samples, rewards)`.

    reward_fn: reward_fn(prompt, completion, prompt_ids, completion_ids, **row) -> float, or one
    with named parameters of its own, see rewards.reward_arguments. Rows hold `prompt_ids` (and
    `prompt`), or `messages` for the chat template. The others: see ChatOptions.
    """

    def __init__(
        self,
        reward_fn: Callable[..., float],
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        *,
        reward_pool: RewardPool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if gconfig.n_samples < 1:
            raise ValueError(f"gconfig.n_samples={gconfig.n_samples}: use at least 1")
        self.reward_fn, self.reward_pool = reward_fn, reward_pool or shared_pool()
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        self.gconfig, self.tokenizer = gconfig, tokenizer
        self._chat = ChatTemplate(tokenizer, self.chat_template_kwargs)

    @classmethod
    def for_run(
        cls,
        cfg: GRPOConfig,
        tokenizer: Any,
        *,
        reward_fn: Callable[..., float] | None = None,
        gconfig: GenerationHyperparameters | None = None,
    ) -> Self:
        """Makes a script's workflow, with rollout.workflow.options, and a reward pool as
        rollout.reward_workers, reward_timeout, reward_addresses and on_reward_error say. reward_fn:
        None is that of train_dataset; gconfig: None is the configuration's. Raises ValueError for
        an option that the class does not take."""
        note_read(cfg, *REWARD_KEYS, "rollout.workflow", "gconfig", "train_dataset.reward.options")
        options = taken_options(cls, workflow_of(cfg.rollout.workflow, cfg.train_dataset).options)
        taken = ("reward_pool",)
        key = "rollout.workflow.options"
        if problems := list(option_problems(cls, options, key=key, positional=3, by_name=taken)):
            raise ValueError("; ".join(problems))
        return cls(
            reward_fn or reward_of(cfg.train_dataset),
            gconfig or cfg.gconfig,
            tokenizer,
            reward_pool=shared_pool(cfg.rollout),
            **options,
        )

    def count(self, data: dict[str, Any]) -> int:
        """Returns how many samples `begin` makes of a row."""
        n: int = data.get(SAMPLES_MISSING, self.gconfig.n_samples)
        return n

    def begin(self, data: dict[str, Any]) -> list[Trajectory]:
        """Returns gconfig.n_samples trajectories that have read the prompt, or as many as are to
        be made anew because they failed."""
        ids, messages = self._prompt(data)[1], data.get("messages", ())
        n = self.count(data)
        samples = [Trajectory(index=i, messages=messages) for i in range(n)]
        for sample in samples:
            sample.read(ids)
        return samples

    async def generate(
        self,
        engine: InferenceEngine,
        samples: Sequence[Trajectory],
        data: dict[str, Any],
        other: Mapping[int, GenerationHyperparameters] = _NO_OTHER,
    ) -> list[str]:
        """Has the policy write one more turn of each sample, and returns their texts. other: how
        some samples, by index, are drawn, in place of the workflow's gconfig.

        With gconfig.seed, the key of a turn is (seed, version at the episode's admission, row,
        episode, sample, turn), and in later runs of the episode their number; the server adds the
        position. A row may come again under the same weights, so its id alone does not do.
        """
        if not samples:
            return []
        key = (
            self.gconfig.seed,
            seed_version(engine.get_version()),
            data.get("row_id", tuple(samples[0].tokens)),
            data.get("episode_id", 0),
            *attempt_key(),
        )
        requests = [
            ModelRequest(
                rid=uuid.uuid4().hex,
                input_ids=sample.tokens,
                gconfig=other.get(sample.index, self.gconfig),
                seed=None if key[0] is None else stable_seed(*key, sample.index, *_turn(sample)),
                routes_from=sample.head.routed(),
            )
            for sample in samples
        ]
        answers = await engine.agenerate_many(requests)
        for sample, answer in zip(samples, answers, strict=True):
            sample.wrote(answer)
        return [self.text(answer) for answer in answers]

    def tell(self, sample: Trajectory, content: str, *, role: str = "user") -> None:
        """Has the sample read the next message, by the chat template: all text between the policy's
        last answer and its next one."""
        self.tell_all(sample, [{"role": role, "content": content}])

    def tell_all(
        self,
        sample: Trajectory,
        news: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] = (),
    ) -> None:
        """Has the sample read several messages in a row, such as the results of its tool calls.
        tools: those that the chat template was given at the beginning, as begin's rows hold them.
        Raises ValueError where the template does not show the policy's answer as it was given."""
        self.hear(sample, *self.told(sample, news, tools))

    def told(
        self,
        sample: Trajectory,
        news: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] = (),
    ) -> tuple[list[int], list[dict[str, Any]]]:
        """Returns the tokens that `tell_all` has the sample read, and the messages that its chat
        then has more: its last answer, and `news`."""
        answer = self.text(sample.answers[-1]) if sample.answers else ""
        answered = {"role": "assistant", "content": answer}
        end = sample.tokens[-1] if sample.tokens else None
        tokens = self._chat.after([*sample.messages, answered], news, tools, last_token=end)
        return tokens, [answered, *news]

    def hear(
        self, sample: Trajectory, tokens: Sequence[int], messages: Sequence[dict[str, Any]]
    ) -> None:
        """Has the sample read what `told` returned."""
        add_counts({"special_in_content": self._chat.special_in(messages)})
        sample.read(tokens)
        sample.messages += messages

    async def score(self, samples: Sequence[Trajectory], data: dict[str, Any]) -> list[float]:
        """Returns the rewards of the samples' last answers. Where a reward fails and the run goes
        on (rollout.on_reward_error=reject, or no verdict of a judge), it is NaN and the sample has
        failed ("reward")."""
        prompt, prompt_ids = self._prompt(data)
        row = {k: v for k, v in data.items() if k not in _NOT_FOR_REWARD}
        row_id = data.get("row_id", "?")

        async def reward(sample: Trajectory) -> float:
            answer = sample.answers[-1]
            own = prompt, self.text(answer), prompt_ids, answer.output_tokens
            arguments = reward_arguments(self.reward_fn, own, row)
            try:
                return await self.reward_pool.score(self.reward_fn, (), arguments, row_id=row_id)
            except RewardError as e:
                if not fails_sample(e, self.reward_pool.on_error):
                    raise
                warn_recurring(log, f"sample {sample.index} failed (reward)", e)
                sample.fail("reward")
                return math.nan

        return await all_of(reward(s) for s in samples)

    def text(self, answer: ModelResponse) -> str:
        """Returns an answer's text, without special tokens."""
        text: str = self.tokenizer.decode(answer.output_tokens, skip_special_tokens=True)
        return text

    def _prompt(self, data: dict[str, Any]) -> tuple[str, list[int]]:
        prompt, ids = data.get("prompt"), data.get("prompt_ids")
        if prompt is None:
            prompt = self._chat.text(data["messages"], data.get("tools") or ())
        return prompt, list(self._chat.encode(prompt) if ids is None else ids)


def taken_options(workflow: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options without chat_template_kwargs if `workflow` renders no chat itself: it is
    no ChatWorkflow, and does not name them. Raises ValueError for a ChatWorkflow of the user's that
    does not take them."""
    given = {k: v for k, v in options.items() if k == "chat_template_kwargs"}
    how: Any = {"positional": 3, "by_name": ["reward_pool", *(options.keys() - given.keys())]}
    problems = list(option_problems(workflow, given, key="options", **how)) if given else []
    if problems and isinstance(workflow, type) and issubclass(workflow, ChatWorkflow):
        raise ValueError(f"{workflow.__name__}: {'; '.join(problems)}")
    return {k: v for k, v in options.items() if k not in given} if problems else options


class MixedWorkflow(RolloutWorkflow):
    """Runs an episode by the workflow of the row's part, each of which has its own reward.

    workflows: by the part's name, which the row has in `dataset`. gconfig: that of all of them.
    """

    def __init__(
        self, workflows: Mapping[str, RolloutWorkflow], gconfig: GenerationHyperparameters
    ) -> None:
        self.gconfig, self.workflows = gconfig, workflows

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Padded | None:
        """Returns what the part's workflow does."""
        return await self.workflows[data["dataset"]].arun_episode(engine, data)


def _turn(sample: Trajectory) -> tuple[int, ...]:
    """Returns the part of a seed's key that tells later turns from the first."""
    return (sample.written,) if sample.written else ()
