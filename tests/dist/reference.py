"""The engine's reference: Hugging Face's model, autograd and torch's AdamW, in fp32."""

from __future__ import annotations

from typing import Any

import torch
import transformers as T
from transformers.modeling_layers import GenericForSequenceClassification

from tests.dist.engine_jobs import OPTIMIZER, TEMPERATURE, Tensors
from tests.dist.losses import Loss
from tests.tiny import hf_named, tiny_hf

STEPS = 3


def hf_model(kind: str, *, tie: bool, head: str = "lm", **over: Any) -> Any:
    """Returns a tiny random model. head="value" gives HF's classifier over the same transformer,
    with scores far from zero: of tokens (with a bias) where `tie` is set and the family has such
    a class, else of sequences (without).
    """
    causal = tiny_hf(kind, tie=tie, **over)
    if head == "lm":
        return causal
    name = type(causal.model).__name__.replace("Model", "For{}Classification")
    cls = getattr(T, name.format("Token" if tie else "Sequence"), None)
    cls = cls or getattr(T, name.format("Sequence"), None)
    if cls is None:  # as transformers makes them
        bases = (GenericForSequenceClassification, type(causal).__mro__[1])
        cls = type(name.format("Sequence"), bases, {"__module__": type(causal).__module__})
    config = causal.config
    config.num_labels, config.pad_token_id = 1, 0
    model = cls(config).float().eval()
    model.model.load_state_dict(causal.model.state_dict())
    torch.manual_seed(7)
    with torch.no_grad():
        model.score.weight.normal_(std=0.2)
        if model.score.bias is not None:
            model.score.bias.fill_(0.3)
    return model


def hf_outputs(hf: Any, b: Tensors) -> Tensors:
    """Computes a language model's outputs by dense formulas; position t belongs to input t."""
    logits = hf(b["input_ids"], attention_mask=b["attention_mask"].long()).logits.float()
    logp = torch.log_softmax(logits / TEMPERATURE, -1)[:, :-1]
    ids = b["input_ids"][:, 1:]
    mask = b["attention_mask"][:, 1:]

    def shifted(x: torch.Tensor) -> torch.Tensor:
        m = mask.reshape(*mask.shape, *[1] * (x.ndim - 2))
        return torch.cat([torch.zeros_like(x[:, :1]), torch.where(m, x, 0.0)], 1)

    return {
        "logprobs": shifted(logp.gather(-1, ids[..., None])[..., 0]),
        "entropy": shifted(-(logp.exp() * logp).sum(-1)),
        "greedy_match": shifted((logp.argmax(-1) == ids).float()),
        "logits": shifted(logits[:, :-1] / TEMPERATURE),
    }


def hf_values(model: Any, b: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns values [B,S] and last_value [B] from HF's score of every token: position t of
    `values` has the score of the state before input_ids[:, t]."""
    mask = b["attention_mask"]
    hidden = model.model(b["input_ids"], attention_mask=mask.long()).last_hidden_state
    score = model.score(hidden)[..., 0]
    values = torch.nn.functional.pad(score[:, :-1], (1, 0)).where(mask, 0.0)
    return values, score.gather(1, mask.sum(1, keepdim=True) - 1)[:, 0]


def outputs_of(model: Any, b: Tensors) -> Tensors:
    if hasattr(model, "score"):
        values, last = hf_values(model, b)
        return {"values": values, "last_value": last}
    return hf_outputs(model, b)


def hf_steps(model: Any, b: Tensors, loss: Loss) -> dict[str, Any]:
    """Takes STEPS steps on one batch; returns the outputs before and the clipped gradients of the
    first step, every loss and gradient norm, and the weights before and after."""

    def named(values: dict[str, torch.Tensor]) -> Tensors:
        return hf_named(model, {n: v.detach().clone() for n, v in values.items()})

    params = dict(model.named_parameters())
    fixed = {n: x for n, x in model.named_buffers() if n.endswith("e_score_correction_bias")}
    # biases of all experts together are a matrix
    vectors = {n for n, p in params.items() if p.ndim == 1 or n.endswith("_bias")}
    adam = torch.optim.AdamW(
        [
            dict(params=[p for n, p in params.items() if n not in vectors], weight_decay=0.1),
            dict(params=[params[n] for n in params if n in vectors], weight_decay=0.0),
        ],
        lr=OPTIMIZER["lr"], betas=(0.9, 0.95), eps=OPTIMIZER["eps"],
    )  # fmt: skip
    result: dict[str, Any] = {"start": named(params | fixed), "losses": [], "grad_norms": []}
    for step in range(STEPS):
        adam.zero_grad()
        outputs = outputs_of(model, b)
        total = loss.fn(outputs, b)[0] / loss.weight(b)
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(params.values(), 1.0)
        if step == 0:
            result["outputs"] = {k: v.detach() for k, v in outputs.items()}
            # None for an expert without tokens
            grads = {
                n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in params.items()
            }
            result["grads"] = named(grads)
        result["losses"].append(float(total.detach()))
        result["grad_norms"].append(float(norm))
        adam.step()
    return {**result, "weights": named(params | fixed)}
