"""Makes the prompt below which a teacher reads the answers to a row (`teacher.context`), by a
template or a function of the user's. It imports no torch of itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, Self

from jinja2 import StrictUndefined
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megarl.config.dataset import SourceConfig
from megarl.config.recipe_engines import model_override, model_path
from megarl.config.recipes import DistillConfig
from megarl.data.rows import Row
from megarl.data.sources import DATASET, sources_of
from megarl.data.tokenizer import Template
from megarl.models.hf_config import read_hf_config
from megarl.observability.logging import get_logger
from megarl.utils.importing import is_import_path, load_object

KEY = "teacher.context"
RIGHT = 1.0  # an answer is right from this reward on

log = get_logger(__name__)


def is_function(context: str) -> bool:
    """Returns whether teacher.context names a function: a template has spaces or braces."""
    return is_import_path(context) and set(context).isdisjoint(" \n{")


class Episode(Protocol):
    """Is an episode as a context knows it: its row, and the texts of its rollouts' rewards."""

    row: Row
    notes: list[dict[str, Any]]


class TeacherContext:
    """Makes a teacher's prompts for the rows of a data set.

    context: a Jinja template of a text that replaces the row's last user message. It knows the
    row's columns, `question` (that message), `feedback` (the texts of the answer's reward) and
    `sibling` (the answer to the row with the highest reward, of at least RIGHT, among the others);
    the last two are "" where there is none. Or the import path of
    function(row, *, feedback, sibling), which returns that text, or messages. An empty text and
    None leave the prompt as it is.
    room: tokens of the longest sequence that the teacher reads; None: no bound is known.
    """

    def __init__(
        self, context: str, data: SourceConfig, tokenizer: Any, *, room: int | None = None
    ) -> None:
        """Raises ValueError for a text that is no template, or a path that cannot be loaded."""
        self._room, self._tokenizer, self._make = room, tokenizer, self._render
        self._templates = {n: Template(tokenizer, d.options) for n, d in sources_of(data).items()}
        if is_function(context):
            self._make = load_object(context, what=KEY)
            return
        try:
            environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined)
            self._template = environment.from_string(context)
        except TemplateError as e:
            raise ValueError(f"{KEY}={context!r}: no Jinja template: {e}") from e

    @classmethod
    def for_run(cls, cfg: DistillConfig, tokenizer: Any) -> Self:
        """Makes the context of a run's teacher; servers know their room themselves."""
        room = None
        if not cfg.teacher.addresses:
            path, override = model_path(cfg, "teacher"), model_override(cfg, "teacher")
            room = read_hf_config(path, override=override).max_position_embeddings
        return cls(cfg.teacher.context, cfg.train_dataset, tokenizer, room=room)

    def prompt(self, row: Row, feedback: str = "", sibling: str = "") -> list[int]:
        """Returns the tokens of the teacher's prompt for an answer to a row of tokens. Raises
        ValueError where a column is missing, or the row has no user message."""
        made = self._make(row, feedback=feedback, sibling=sibling)
        if not made or (isinstance(made, str) and not made.strip()):
            return list(row["prompt_ids"])
        messages = list(row["messages"])
        if isinstance(made, str):
            messages[_last_user(row)] = messages[_last_user(row)] | {"content": made}
        else:
            messages = made
        template = self._templates[row.get(DATASET, "")]
        return template.encode(template.render(messages, row.get("tools") or ()))

    def check(self, rows: Iterable[Row], *, max_new_tokens: int) -> None:
        """Raises ValueError for the first row whose prompt, without feedback and sibling, cannot be
        made, or leaves the teacher no room for an answer."""
        for row in rows:
            tokens = len(self.prompt(row))
            if self._room is not None and tokens + max_new_tokens > self._room:
                raise ValueError(
                    f"{KEY}: row {row['row_id']}: a prompt of {tokens} tokens and "
                    f"max_new_tokens={max_new_tokens} exceed the teacher's "
                    f"max_position_embeddings={self._room}; shorten the context, or drop long rows "
                    "by the dataset's max_length"
                )

    def of_group(
        self, episode: Episode, batch: Mapping[str, Any], prompts: Sequence[int]
    ) -> list[list[int] | None]:
        """Returns the tokens of the teacher's prompt for each of an episode's rows [n,S]; None,
        with a warning, where the teacher has no room for it and what follows. prompts: tokens of
        the rows' own. Raises ValueError where they are not the prompt of the episode's row: what
        else the policy has read, the context does not know."""
        row, ends = episode.row, batch["attention_mask"].sum(1).tolist()
        rows = [ids[:n] for ids, n in zip(batch["input_ids"].tolist(), ends, strict=True)]
        rollouts, rewards = list(range(len(rows))), batch["rewards"].tolist()
        if "rollout_ids" in batch:
            rollouts = batch["rollout_ids"].unique(return_inverse=True)[1].tolist()
        right = [i for i, reward in enumerate(rewards) if reward >= RIGHT]
        right.sort(key=lambda i: -rewards[i])
        made = list[list[int] | None]()
        for ids, n, rollout in zip(rows, prompts, rollouts, strict=True):
            if ids[:n] != row["prompt_ids"]:
                raise ValueError(
                    f"{KEY}: row {row['row_id']}: a rollout begins with {n} tokens that are not "
                    "the row's prompt, so that the teacher would not know what they say; take a "
                    "workflow that begins with the row's prompt (RLVRWorkflow, MultiTurnWorkflow), "
                    f"or leave {KEY} empty"
                )
            feedback = _feedback(episode.notes, rollout)
            others = (rows[i][prompts[i] :] for i in right if rollouts[i] != rollout)
            sibling = self._tokenizer.decode(next(others, []), skip_special_tokens=True)
            context = self.prompt(row, feedback, sibling)
            length = len(context) + len(ids) - n
            fits = self._room is None or length <= self._room
            made.append(context if fits else None)
            if not fits:
                log.warning(
                    "%s: row %s: a sample failed, whose context and answer are %d tokens, above "
                    "the teacher's max_position_embeddings=%d; shorten the context",
                    *(KEY, row["row_id"], length, self._room),
                )
        return made

    def _render(self, row: Row, *, feedback: str, sibling: str) -> str:
        question = row["messages"][_last_user(row)]["content"]
        known = {**row, "question": question, "feedback": feedback, "sibling": sibling}
        try:
            return self._template.render(known)
        except TemplateError as e:
            columns = ", ".join(sorted(known))
            raise ValueError(f"{KEY}: row {row['row_id']}: {e}; it knows {columns}") from e


def _feedback(notes: Sequence[Mapping[str, Any]], rollout: int) -> str:
    """Returns the texts of a rollout's reward, one after the other."""
    own = (note for note in notes if note["rollout"] == rollout)
    return "\n".join(str(text) for note in own for k, text in note.items() if k != "rollout")


def _last_user(row: Row) -> int:
    """Returns the place of a row's last user message. Raises ValueError where there is none."""
    places = [i for i, message in enumerate(row["messages"]) if message["role"] == "user"]
    if not places:
        raise ValueError(
            f"{KEY}: row {row['row_id']} has no user message for the text to replace; name a "
            "function that returns messages"
        )
    return places[-1]
