"""Divergences against loops over tokens and the whole vocabulary, and what merging a tail does."""

import doctest
import math

import pytest
import torch

from megarl.algos import distillation
from megarl.algos.actor import Actor
from megarl.algos.distillation import DIVERGENCES, Distillation, divergence, with_tail
from megarl.algos.roles import Teacher
from megarl.algos.specs import advantages_of, loss_of
from megarl.config.algo import PPOActorConfig
from megarl.config.base import SeamConfig
from megarl.config.engine import TrainEngineConfig
from tests.unit.bigram import VOCAB, BigramEngine, rollout

B, S, V = 3, 5, 9
MASK = torch.tensor([[0, 1, 1, 1, 0], [0, 0, 1, 1, 1], [0, 0, 0, 1, 0]]).bool()


def logits(seed, scale=2.0):
    g = torch.Generator().manual_seed(seed)
    return scale * torch.randn(B, S, V, generator=g, dtype=torch.float64)


def loop(p, q, kind, beta):
    """The divergence of two lists of probabilities, as the papers write it."""

    def kl(a, b):
        return sum((x * math.log(x / y) for x, y in zip(a, b) if x), 0.0)

    if kind == "forward":
        return kl(q, p)
    if kind == "reverse":
        return kl(p, q)
    mixed = [beta * y + (1 - beta) * x for x, y in zip(p, q)]
    return beta * kl(q, mixed) + (1 - beta) * kl(p, mixed)


def said(student, teacher, k):
    """What the engines say of logits [b,S,V]: the student's outputs, and the teacher's fields."""
    logq, logp = teacher.log_softmax(-1), student.log_softmax(-1)
    top = logq.topk(k)

    def tail(x):
        inside = torch.zeros_like(x, dtype=torch.bool).scatter(-1, top.indices, True)
        return x.masked_fill(inside, -torch.inf).logsumexp(-1)

    outputs = {
        "logprobs": logp[..., 0],
        "given_logprobs": logp.gather(-1, top.indices),
        "given_tail": tail(logp) if k < V else torch.full(logp.shape[:-1], -torch.inf),
    }
    batch = {
        "loss_mask": MASK,
        "logprobs": torch.zeros(B, S),
        "teacher_logprobs": top.values,
        "teacher_tail": tail(logq),
    }
    return outputs, batch


def test_the_examples_of_the_docstrings():
    found = doctest.testmod(distillation)
    assert found.attempted >= 6 and not found.failed


@pytest.mark.parametrize("kind", DIVERGENCES)
@pytest.mark.parametrize("k", [1, 4, V])
def test_the_loss_equals_a_loop_over_tokens(kind, k):
    student, teacher = logits(0), logits(1)
    outputs, batch = said(student, teacher, k)
    total, stats = Distillation(kind=kind, beta=0.3)(outputs, batch)
    want = forward = 0.0
    for row, t in MASK.nonzero().tolist():
        p, q = (x[row, t].softmax(-1).tolist() for x in (student, teacher))
        order = sorted(range(V), key=lambda j: -q[j])
        merged = [[x[j] for j in order[:k]] + [sum(x[j] for j in order[k:])] for x in (p, q)]
        want += loop(*merged, kind, 0.3)
        forward += loop(*merged, "forward", 0.3)
    assert total.item() == pytest.approx(want, rel=1e-12)
    figure, count = stats["teacher_kl_forward"]
    assert figure.item() == pytest.approx(forward, rel=1e-6) and count == MASK.sum()


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_with_the_whole_vocabulary_it_is_the_exact_divergence_value_and_gradient(kind):
    student, teacher = logits(0).requires_grad_(), logits(1)
    outputs, batch = said(student, teacher, V)
    total, _ = Distillation(kind=kind, beta=0.7)(outputs, batch)
    exact = divergence(student.log_softmax(-1), teacher.log_softmax(-1), kind, 0.7)[MASK].sum()
    torch.testing.assert_close(total, exact, rtol=0, atol=1e-12)
    (found,), (want,) = (torch.autograd.grad(x, student) for x in (total, exact))
    torch.testing.assert_close(found, want, rtol=0, atol=1e-12)
    if kind == "forward":  # the gradient known in closed form: p - q
        closed = (student.softmax(-1) - teacher.softmax(-1)) * MASK[..., None]
        torch.testing.assert_close(found, closed.detach(), rtol=0, atol=1e-12)
    assert found[~MASK].abs().sum() == 0


@pytest.mark.parametrize("kind", DIVERGENCES)
@pytest.mark.parametrize("k", [2, V])
def test_gradcheck(kind, k):
    teacher = logits(1)

    def f(few):
        outputs, batch = said(torch.cat([few, logits(0)[:1, 2:]], 1), teacher[:1], k)
        batch["loss_mask"], batch["logprobs"] = MASK[:1], torch.zeros(1, S)
        return Distillation(kind=kind, beta=0.4)(outputs, batch)[0]

    assert torch.autograd.gradcheck(f, logits(0)[:1, :2].requires_grad_())


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_a_merged_tail_bounds_the_exact_divergence_from_below(kind):
    """And more tokens bound it better, up to the whole (the data processing inequality)."""
    for seed in range(30):
        student, teacher = logits(seed, scale=4.0), logits(seed + 100, scale=4.0)
        bounds = []
        for k in range(1, V + 1):
            outputs, batch = said(student, teacher, k)
            p = with_tail(outputs["given_logprobs"], outputs["given_tail"])
            q = with_tail(batch["teacher_logprobs"], batch["teacher_tail"])
            bounds.append(divergence(p, q, kind, 0.3))
        steps = torch.stack(bounds).diff(dim=0)
        assert steps.min() > -1e-12 and steps.max() > 1e-3
        exact = divergence(student.log_softmax(-1), teacher.log_softmax(-1), kind, 0.3)
        torch.testing.assert_close(bounds[-1], exact, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_the_bound_is_exact_where_both_share_out_the_tail_alike(kind):
    student, teacher = logits(0), logits(1)
    order = teacher.argsort(-1, descending=True)
    rest = order[..., 3:]
    shift = student.gather(-1, rest[..., :1]) - teacher.gather(-1, rest[..., :1])
    student = student.scatter(-1, rest, teacher.gather(-1, rest) + shift)
    outputs, batch = said(student, teacher, 3)
    total, _ = Distillation(kind=kind)(outputs, batch)
    exact = divergence(student.log_softmax(-1), teacher.log_softmax(-1), kind)[MASK].sum()
    assert total.item() == pytest.approx(exact.item(), rel=1e-12)


def test_jsd_tends_to_both_kl_divergences_and_is_symmetric_at_one_half():
    p, q = logits(0).log_softmax(-1), logits(1).log_softmax(-1)
    small = 1e-6
    for kind, beta in (("forward", small), ("reverse", 1 - small)):
        scaled = divergence(p, q, "jsd", beta) / small
        torch.testing.assert_close(scaled, divergence(p, q, kind), rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(divergence(p, q, "jsd"), divergence(q, p, "jsd"))
    assert divergence(p, q, "jsd").max() < math.log(2)


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_what_has_probability_zero_on_both_sides_has_no_value_and_no_gradient(kind):
    student = torch.tensor([0.2, -0.3, -torch.inf]).requires_grad_()
    teacher = torch.tensor([-0.4, 0.1, -torch.inf]).log_softmax(-1)
    found = divergence(student, teacher, kind)
    found.backward()
    assert found == divergence(student[:2], teacher[:2], kind)
    assert student.grad.isfinite().all() and student.grad[2] == 0


@pytest.mark.parametrize("kind", DIVERGENCES)
@pytest.mark.parametrize("k", [1, 4, 9, V + 3])
def test_what_a_teacher_of_more_rows_gives_to_them_counts_to_the_tail(kind, k):
    """With all of the student's tokens named, nothing of the teacher's is left outside of them."""
    g = torch.Generator().manual_seed(7)
    more = 2.0 * torch.randn(B, S, 3, generator=g, dtype=torch.float64)
    student, teacher = logits(0).requires_grad_(), torch.cat([logits(1), more], -1)
    logq, logp = teacher.log_softmax(-1), student.log_softmax(-1)
    ids = logq.topk(k).indices
    inside = torch.zeros(B, S, V + 3, dtype=torch.bool).scatter(-1, ids, True)
    assert (ids >= V)[MASK].any()
    beyond = torch.full((B, S, 3), -torch.inf, dtype=torch.float64)
    outputs = {
        "logprobs": logp[..., 0],
        "given_logprobs": torch.cat([logp, beyond], -1).gather(-1, ids),
        "given_tail": logp.masked_fill(inside[..., :V], -torch.inf).logsumexp(-1),
    }
    batch = {
        "loss_mask": MASK,
        "logprobs": torch.zeros(B, S),
        "teacher_logprobs": logq.gather(-1, ids),
        "teacher_tail": logq.masked_fill(inside, -torch.inf).logsumexp(-1),
    }
    total, stats = Distillation(kind=kind, beta=0.3)(outputs, batch)
    want = 0.0
    for row, t in MASK.nonzero().tolist():
        known = [j for j in ids[row, t].tolist() if j < V]
        q, p = logq[row, t].exp().tolist(), logp[row, t].exp().tolist()
        if len(known) < V:
            p, q = ([x[j] for j in known] + [1 - sum(x[j] for j in known)] for x in (p, q))
        else:
            q = [x / sum(q[:V]) for x in q[:V]]
        want += loop(p, q, kind, 0.3)
    assert total.item() == pytest.approx(want, rel=1e-9)
    assert all(math.isfinite(x) for x, _ in stats.values())
    (grad,) = torch.autograd.grad(total, student)
    assert grad.isfinite().all() and grad[MASK].abs().sum() > 0


def test_garbage_outside_of_the_mask_reaches_neither_loss_nor_gradient():
    student, teacher = logits(0).requires_grad_(), logits(1)
    outputs, batch = said(student, teacher, 3)
    clean, _ = Distillation()(outputs, batch)
    for fields in (outputs, batch):
        for name in fields.keys() - {"loss_mask"}:
            field = fields[name]
            mask = MASK.reshape(B, S, *[1] * (field.ndim - 2))
            fields[name] = torch.where(mask, field, torch.nan)
    total, stats = Distillation()(outputs, batch)
    assert total == clean and all(x.isfinite() for x, _ in stats.values())
    total.backward()
    assert student.grad.isfinite().all() and student.grad.abs().sum() > 0


@pytest.mark.parametrize("options", [{"divergence": "sideways"}, {"beta": 0.0}, {"beta": 1.5}])
def test_options_that_make_no_loss_are_refused(options):
    (name,) = options
    with pytest.raises(ValueError, match=f"actor.loss.options.{name}"):
        loss_of(PPOActorConfig(loss=SeamConfig(type="distill", options=options)))


# ---- the roles


def student_and_teacher(k=VOCAB, temperature=1.0, lr=20.0, **config):
    config = {"loss": SeamConfig(type="distill"), "recompute_logprob": False} | config
    student = Actor(PPOActorConfig(**config), BigramEngine(lr=lr), temperature=temperature)
    frozen = BigramEngine(seed=1, topk=k)
    return student, Teacher(TrainEngineConfig(), frozen, temperature=temperature)


def exact_kl(student, teacher, temperature):
    """The mean of KL(student || teacher) over the contexts that a bigram model has."""
    p, q = ((x.engine.table / temperature).log_softmax(-1) for x in (student, teacher))
    return divergence(p, q, "reverse").mean().item()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("kind", DIVERGENCES)
def test_the_student_comes_to_the_teacher(kind, temperature):
    loss = SeamConfig(type="distill", options={"divergence": kind})
    student, teacher = student_and_teacher(4, temperature, loss=loss)
    before = exact_kl(student, teacher, temperature)
    shown = []
    for _ in range(12):
        batch = rollout(student.engine, temperature)
        teacher.teach(batch)
        stats = student.ppo_update(batch)
        shown.append(stats["teacher_kl_reverse"])
    assert exact_kl(student, teacher, temperature) < 0.6 * before
    assert shown[-1] < 0.6 * shown[0] and stats["approx_kl"] < 1e-6
    assert 0 < stats["teacher_tail_mass"] < 1 and batch["given_ids"].dtype == torch.int32


def test_a_student_that_is_its_teacher_stays():
    student, teacher = student_and_teacher()
    teacher.engine.table.data.copy_(student.engine.table.data)
    batch = rollout(student.engine)
    teacher.teach(batch)
    stats = student.ppo_update(batch)
    assert stats["loss"] == pytest.approx(0, abs=1e-6) and stats["grad_norm"] < 1e-6


def test_advantages_toward_the_teacher_equal_a_loop_over_tokens():
    seam = SeamConfig(type="teacher", options={"reward_coef": 0.5, "discount": 0.9})
    student, teacher = student_and_teacher(advantages=seam)
    batch = rollout(student.engine)
    teacher.teach(batch, top=False)
    assert "given_ids" not in batch
    student.compute_advantages(batch)
    logp, logq, mask = batch["logprobs"], batch["teacher_logp"], batch["loss_mask"]
    for b in range(len(mask)):
        later = 0.0
        for t in reversed(range(mask.shape[1])):
            later = (float(logq[b, t] - logp[b, t]) if mask[b, t] else 0.0) + 0.9 * later
            want = later + 0.5 * float(batch["rewards"][b]) if mask[b, t] else 0.0
            assert batch["advantages"][b, t].item() == pytest.approx(want, abs=1e-5)


def test_what_stands_between_trained_tokens_takes_no_time():
    """With a tool's answer of two tokens between them, the same as in one piece."""
    config = PPOActorConfig(
        advantages=SeamConfig(type="teacher", options={"discount": 0.5}),
        loss=SeamConfig(type="policy"),
        recompute_logprob="false",
    )
    spec, numbers = advantages_of(config), torch.zeros(2)
    mask = torch.tensor([[0, 1, 1, 1, 0, 0, 0], [0, 1, 0, 0, 1, 0, 1]]).bool()
    logq = torch.tensor([[9.0, 0, 0, 8, 9, 9, 9], [9.0, 0, 9, 9, 0, 9, 8]])
    part = {"loss_mask": mask, "teacher_logp": logq, "logprobs": torch.zeros(2, 7)}
    made = spec.per_token(numbers, part)
    assert made.tolist() == [[0, 2, 4, 8, 0, 0, 0], [0, 2, 0, 0, 4, 0, 8]]


def test_by_policy_gradient_the_student_comes_to_the_teacher_too():
    seam = SeamConfig(type="teacher")
    student, teacher = student_and_teacher(lr=10.0, loss=SeamConfig(type="policy"), advantages=seam)
    before = exact_kl(student, teacher, 1.0)
    for _ in range(12):
        batch = rollout(student.engine)
        teacher.teach(batch, top=False)
        student.compute_advantages(batch)
        student.ppo_update(batch)
    assert exact_kl(student, teacher, 1.0) < 0.4 * before


def test_an_update_without_the_teacher_is_named():
    student, _ = student_and_teacher()
    with pytest.raises(ValueError, match=r"no 'given_ids': call teacher.teach\(batch\)"):
        student.ppo_update(rollout(student.engine))
