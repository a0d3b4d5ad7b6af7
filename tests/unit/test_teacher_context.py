"""A teacher with a prompt of its own: what it reads, and how its words come to the student's
tokens. That the words are those of transformers' model is for tests/dist/test_teacher.py."""

import asyncio
import math
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from examples.tiny_model import make_tokenizer
from megarl.algos.actor import Actor
from megarl.algos.roles import Teacher
from megarl.api.batch import Batch, Tokens
from megarl.api.context import add_contexts, in_context, out_of_context, prompt_lengths
from megarl.api.inference import FAILURES
from megarl.api.records import ModelResponse
from megarl.config.algo import PPOActorConfig
from megarl.config.base import SeamConfig
from megarl.config.dataset import DatasetConfig
from megarl.config.engine import TrainEngineConfig
from megarl.config.rollout import GenerationHyperparameters, RolloutConfig
from megarl.data.tokenizer import encode_rows
from megarl.rollout.episode import run_episode
from megarl.rollout.episodes import Episode
from megarl.rollout.rewards.results import Scored
from megarl.rollout.teacher import ServerTeacher
from megarl.rollout.trajectory import Trajectory, to_batch
from megarl.trainer.rl import DistillTrainer
from megarl.trainer.session import RolloutSession
from megarl.trainer.teacher_context import TeacherContext
from tests.unit.bigram import VOCAB, BigramEngine, rollout
from tests.unit.rollout_fakes import FakeEngine
from tests.unit.test_teacher_servers import V, said_of, serving

DATA = DatasetConfig(type="chat", options={"system": "Sum."})


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer(1)


def row_of(tokenizer, question="3+4", **columns):
    source = {"row_id": 5, "messages": [{"role": "user", "content": question}], **columns}
    return next(iter(encode_rows([(0, source)], DATA, tokenizer, "rl")))


@dataclass
class Ended:
    row: dict
    notes: list = field(default_factory=list)


def group(prompt, answers, rewards, rollouts=None):
    """Rows of answers to one prompt, as an episode has them, and the lengths of their prompts."""
    rows = [[*prompt, *answer] for answer in answers]
    width = max(map(len, rows)) + 1
    lengths = torch.tensor([len(row) for row in rows])
    mask = torch.arange(width) < lengths[:, None]
    batch = {
        "input_ids": torch.tensor([row + [0] * (width - len(row)) for row in rows]),
        "attention_mask": mask,
        "loss_mask": mask & (torch.arange(width) >= len(prompt)),
        "versions": torch.where(mask & (torch.arange(width) >= len(prompt)), 0, -1).int(),
        "rewards": torch.tensor(rewards),
    }
    if rollouts is not None:
        batch["rollout_ids"] = torch.tensor(rollouts)
    return batch, prompt_lengths(batch)


# what it reads


def test_a_template_replaces_the_last_user_message_below_the_system_message(tokenizer):
    row = row_of(tokenizer, answer="7")
    context = TeacherContext("{{ question }}={{ answer }}", DATA, tokenizer)
    text = tokenizer.decode(context.prompt(row))
    assert text == "<|system|>Sum.<|user|>3+4=7<|assistant|>"
    for same in ("{{ question }}", "{% if feedback %}{{ feedback }}{% endif %}"):
        assert TeacherContext(same, DATA, tokenizer).prompt(row) == row["prompt_ids"]


def with_solution(row, *, feedback, sibling):
    if not sibling:
        return None
    return [{"role": "user", "content": f"{row['answer']}|{feedback}|{sibling}"}]


def test_a_function_gives_messages_or_leaves_the_prompt(tokenizer):
    row = row_of(tokenizer, answer="7")
    context = TeacherContext(f"{__file__}:with_solution", DATA, tokenizer)
    assert context.prompt(row) == row["prompt_ids"]
    assert tokenizer.decode(context.prompt(row, "late", "6")) == "<|user|>7|late|6<|assistant|>"


def test_feedback_is_the_rollouts_own_and_the_sibling_the_best_right_one_of_the_others(tokenizer):
    row = row_of(tokenizer)
    answers = [tokenizer(text)["input_ids"] for text in ("1", "2", "3", "4")]
    # two rows of the second rollout, which is the best; numbered through other episodes
    batch, prompts = group(row["prompt_ids"], answers, [1.0, 2.0, 2.0, 0.5], [7, 8, 8, 9])
    notes = [{"rollout": 0, "judge": "low"}, {"rollout": 1, "a": "x", "b": "y"}]
    notes.append({"rollout": -1, "judge": "of one that failed"})
    context = TeacherContext("{{ feedback }}|{{ sibling }}", DATA, tokenizer)
    made = context.of_group(Ended(row, notes), batch, prompts)
    texts = [tokenizer.decode(ids).split("<|user|>")[1] for ids in made]
    assert texts == [f"{t}<|assistant|>" for t in ("low|2", "x\ny|1", "x\ny|1", "|2")]
    alone, prompts = group(row["prompt_ids"], answers, [1.0, 0.0, 0.9, 0.0])
    made = context.of_group(Ended(row), alone, prompts)
    texts = [tokenizer.decode(ids).split("<|user|>")[1] for ids in made]
    assert texts == [f"|{t}<|assistant|>" for t in ("", "1", "1", "1")]


def test_a_rollout_below_another_prompt_is_refused(tokenizer):
    row = row_of(tokenizer)
    batch, prompts = group([*row["prompt_ids"][:-1], 9], [[4], [5]], [1.0, 0.0])
    context = TeacherContext("{{ question }}", DATA, tokenizer)
    with pytest.raises(ValueError, match=r"teacher\.context: row 5: a rollout begins with"):
        context.of_group(Ended(row), batch, prompts)


def test_what_the_teacher_has_no_room_for_is_refused_or_fails(tokenizer):
    row = row_of(tokenizer)
    n = len(row["prompt_ids"])
    context = TeacherContext("{{ question }}{{ feedback }}", DATA, tokenizer, room=n + 2)
    context.check([row], max_new_tokens=2)
    with pytest.raises(ValueError, match=rf"row 5: a prompt of {n} .*max_position_embeddings"):
        context.check([row], max_new_tokens=3)
    batch, prompts = group(row["prompt_ids"], [[4, 5], [4, 5]], [0.0, 0.0])
    ended = Ended(row, [{"rollout": 1, "judge": "7"}])
    assert context.of_group(ended, batch, prompts) == [row["prompt_ids"], None]


@pytest.mark.parametrize(
    ("context", "problem"),
    [
        ("{{ solution }}", "'solution' is undefined; it knows"),
        ("{% if %}", "no Jinja template"),
        ("nowhere:fn", "nowhere"),
    ],
)
def test_a_context_that_cannot_be_made_is_named(context, problem, tokenizer):
    with pytest.raises(ValueError, match=rf"teacher\.context.*{problem}"):
        TeacherContext(context, DATA, tokenizer).prompt(row_of(tokenizer))
    with pytest.raises(ValueError, match=r"teacher\.context: row 5 has no user message"):
        source = row_of(tokenizer) | {"messages": [{"role": "system", "content": "s"}]}
        TeacherContext("{{ question }}", DATA, tokenizer).prompt(source)


class Notes:
    """Writes two answers; the first one's reward fails in the first run."""

    gconfig = GenerationHyperparameters(n_samples=2)

    def __init__(self):
        self.runs = 0

    async def arun_episode(self, engine, data):
        samples = [Trajectory(index=i) for i in range(data.get("samples_missing", 2))]
        self.runs += 1
        for sample in samples:
            sample.read([1])
            sample.wrote(
                ModelResponse(
                    input_tokens=[1],
                    output_tokens=[2],
                    output_logprobs=[-1.0],
                    output_versions=[0],
                    stop_reason="stop",
                )
            )
        if self.runs == 1:
            samples[0].fail("reward")
            samples[0].score(math.nan)
        notes = [{"words": f"run {self.runs}, sample {s.index}"} for s in samples]
        rewards = [Scored(1.0, notes=n) for n in notes]
        return to_batch(samples, rewards)


def test_the_words_about_an_answer_are_numbered_as_the_batch_is():
    """Where rollouts were made anew, too."""
    engine = FakeEngine()
    episode = Episode(number=0, row={"row_id": 1}, workflow=Notes())
    asyncio.run(run_episode(episode, engine, RolloutConfig(failure_retries=1)))
    assert episode.error is None and len(episode.batch["rewards"]) == 2
    by_number = {n["rollout"]: n["words"] for n in episode.notes}
    assert by_number == {-1: "run 1, sample 0", 0: "run 1, sample 1", 1: "run 2, sample 0"}


# how it comes to the student's tokens


def test_tokens_are_read_below_contexts_and_their_values_come_back():
    """A long context and a short one, an answer without a token, and an episode of other width."""
    one, own = group([1, 2, 3], [[4, 5], [], [6]], [0.0, 0.0, 0.0])
    other, others = group([7], [[8, 9, 10, 11]], [0.0])
    contexts = [[[20] * 9, [21], None], [[22, 23]]]
    parts = add_contexts([one, other], [own, others], contexts)
    batch = Batch.from_local(parts)
    read = in_context(batch)
    rows = [read["input_ids"].row(i).tolist() for i in range(4)]
    assert rows == [[20] * 9 + [4, 5], [21], [1, 2, 3, 6], [22, 23, 8, 9, 10, 11]]
    assert batch["context_failed"].tolist() == [False, False, True, False]
    values = Tokens(torch.arange(len(read["input_ids"].values)), read.lengths)
    back = out_of_context(batch, "given_ids", values)
    assert [back.row(i).tolist() for i in range(4)] == [
        [-1, -1, -1, 9, 10], [-1, -1, -1], [-1, -1, -1, 15], [-1, 18, 19, 20, 21]
    ]  # fmt: skip
    assert out_of_context(batch, "teacher_logp", values).row(3)[0] == 0
    assert in_context(parted := batch.select([0], ["input_ids"])) is parted


def taught(contexts):
    """The loss of a student that differs from its teacher, whose prompts are the contexts."""
    loss = SeamConfig(type="distill", options={"divergence": "jsd"})
    config = PPOActorConfig(loss=loss, recompute_logprob="false")
    student = Actor(config, BigramEngine(), temperature=0.7)
    teacher = Teacher(TrainEngineConfig(), BigramEngine(seed=1, topk=4), temperature=0.7)
    batch = rollout(student.engine, 0.7)
    if contexts is not None:
        (batch,) = add_contexts([batch], [prompt_lengths(batch)], [contexts(batch)])
    failed = teacher.teach(batch)
    return student.ppo_update(batch), batch, failed


@pytest.mark.parametrize("kind", ["context", "server"])
def test_a_context_that_is_too_long_is_a_failure_of_its_own_kind(kind):
    booked = []
    client = SimpleNamespace(on_driver=lambda call, *args: booked.append(args[2:]))
    trainer = SimpleNamespace(
        cfg=SimpleNamespace(teacher=SimpleNamespace(addresses=[""] if kind == "server" else [])),
        actor=SimpleNamespace(place=lambda batch: None),
        teacher=SimpleNamespace(teach=lambda batch, *, top: failed),
        session=SimpleNamespace(client=client, driver=None),
        wants_top=True,
    )
    trainer.session.drop = partial(RolloutSession.drop, trainer.session)
    batch = Batch.from_padded(rollout(BigramEngine()))
    failed = torch.arange(len(batch)) == 3
    assert len(DistillTrainer.ask_teacher(trainer, batch)) == len(batch) - 1
    ((mask, said),) = booked
    assert said == kind and said in FAILURES and mask.tolist() == failed.tolist()
    failed = torch.ones(len(batch), dtype=torch.bool)
    with pytest.raises(ValueError, match=rf"failed \({kind}\)") as caught:
        DistillTrainer.ask_teacher(trainer, batch)
    assert ("shorten teacher.context" in str(caught.value)) == (kind == "context")


def test_the_students_own_prompt_gives_the_same_loss_to_the_bit():
    plain, _, none = taught(None)
    own, batch, failed = taught(lambda b: [row[:2].tolist() for row in b["input_ids"]])
    assert plain == own and not none.any() and not failed.any()
    # the first token of an answer is read below the context's last one
    other, batch, failed = taught(lambda b: [[5, 3], None, *[[1, 9, 9, 3]] * 14])
    assert other["loss"] != plain["loss"] and failed.tolist() == [False, True] + [False] * 14
    table = BigramEngine(seed=1).table.detach() / 0.7
    want = table[3].log_softmax(-1)[batch["input_ids"][:, 2]]
    torch.testing.assert_close(batch["teacher_logp"][[0, 2], 2], want[[0, 2]])


HINT = 10


class Reader(BigramEngine):
    """Says again what it has read behind a HINT, and else answers by its table."""

    def logits(self, ids):
        said = torch.zeros(len(ids), VOCAB)
        for row, hint in (ids[:, :-1] == HINT).nonzero().tolist():
            said[row, ids[row, hint + 1]] = 8.0
        return super().logits(ids) + said[:, None]


def test_with_the_answer_in_its_teachers_view_a_student_learns_it_without_a_reward():
    """Its teacher is its own earlier self: only the context tells the two apart."""
    loss = SeamConfig(type="distill", options={"divergence": "reverse"})
    config = PPOActorConfig(loss=loss, recompute_logprob="false")
    student = Actor(config, Reader(lr=10.0), temperature=1.0)
    teacher = Teacher(TrainEngineConfig(), Reader(), temperature=1.0)
    questions = torch.arange(5).repeat_interleave(8)

    def step(in_view):
        answers = torch.multinomial(student.engine.table.detach()[questions].softmax(-1), 1)
        batch, _ = group([], torch.cat([questions[:, None], answers], 1).tolist(), [0.0] * 40)
        written = torch.tensor([False, True, False])
        batch |= {"loss_mask": written.expand(40, 3), "logprobs": torch.zeros(40, 3)}
        batch["versions"] = torch.where(batch["loss_mask"], 0, -1).int()
        hints = [[HINT, q + 5, q] if in_view else [q] for q in questions.tolist()]
        (batch,) = add_contexts([batch], [prompt_lengths(batch)], [hints])
        teacher.teach(batch)
        student.ppo_update(batch)
        return student.engine.table.detach()[:5].softmax(-1).diagonal(5).mean().item()

    before = step(in_view=False)  # a teacher that knows no more teaches nothing
    assert before == step(in_view=False) and before < 0.2
    with torch.random.fork_rng():
        torch.manual_seed(0)
        assert [step(in_view=True) for _ in range(30)][-1] > 0.9


def test_servers_read_contexts_too():
    batch, own = group([1, 2], [[4, 5], [6], [7]], [0.0] * 3)
    (batch,) = add_contexts([batch], [own], [[[9, 9, 8], [3], None]])
    batch = Batch.from_padded(batch)
    asked = []
    with serving(lambda ids: bool(asked.append(ids))) as address:
        failed = ServerTeacher([address], top=3, vocab_size=V).teach(batch)
    assert failed.tolist() == [False, False, True]
    assert sorted(asked) == [[1, 2, 7], [3, 6], [9, 9, 8, 4, 5]]
    for row, ids in ((0, [9, 9, 8, 4, 5]), (1, [3, 6])):
        meta = said_of(ids, 3)["meta_info"]
        n = int(batch.lengths[row]) - 2
        said = batch.padded([row])
        logps = [entry[0] for entry in meta["input_token_logprobs"][-n:]]
        assert said["teacher_logp"][0, 2:].tolist() == pytest.approx(logps, abs=1e-6)
        which = [[e[1] for e in at] for at in meta["input_top_logprobs"][-n:]]
        assert said["given_ids"][0, 2:].tolist() == which
        assert (said["given_ids"][0, :2] == -1).all()
