"""Answers names of other systems' scripts with ours, where Python would only miss an attribute.

aliases.py knows the keys of their configurations. docs/from_others.md explains each replacement.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

_ACTOR = "MegatronActor(config.actor, temperature=config.gconfig.temperature)"
# the class, or "megarl" for a name of the package -> their name -> what to write
_NAMES: dict[str, dict[str, str]] = {
    "megarl": {
        **dict.fromkeys(("FSDPPPOActor", "MegatronPPOActor", "MegatronGRPOActor"), _ACTOR),
        **dict.fromkeys(("FSDPPPOCritic", "MegatronPPOCritic"), "MegatronCritic(config.critic)"),
        **dict.fromkeys(("FSDPEngine", "FSDPLMEngine"), "MegatronEngine(config.actor)"),
        "LLMRequest": "ModelRequest(input_ids=...)",
        "LLMResponse": "ModelResponse",
        "log_gpu_stats": "memory_in_use(), which returns GiB by name",
    },
    "Role": {"compute_logps": "compute_logp(batch)", "update": "ppo_update(batch)"},
    "Batch": {
        "to": "the batch itself: an engine moves what it computes with",
        "shape": "len(batch) for samples, batch.padded() for tensors [B, S]",
    },
    "Tokens": {
        "shape": "len(tokens.lengths) for rows, tokens.padded() for a tensor [b, S]",
        "to": "tokens.values.to(device)",
    },
    "InferenceEngine": {"update_weights_async": "update_weights(meta), which returns a Future"},
    "Saver": {"save": "maybe_save(**ft_spec.where(step))"},
}


def no_attribute(owner: str, names: Any, name: str) -> AttributeError:
    """Returns the error for the attribute `name` of `owner`, with our name for it. names: keys of
    the table to look into."""
    found = next((_NAMES[n][name] for n in names if name in _NAMES.get(n, ())), None)
    hint = f"write {found}" if found else "docs/api.md lists the public names"
    return AttributeError(f"{owner} has no attribute {name!r}; {hint}")


class AnswersForeignNames:
    """Names ours in the AttributeError of a name that scripts of other systems use."""

    if not TYPE_CHECKING:  # a type checker would take every attribute for one that exists

        def __getattr__(self, name: str) -> Any:
            raise no_attribute(type(self).__name__, (c.__name__ for c in type(self).__mro__), name)
