"""The examples in the docstrings of megarl.algos are true, and every formula has one."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import megarl.algos

MODULES = [f"megarl.algos.{found.name}" for found in pkgutil.iter_modules(megarl.algos.__path__)]
FORMULAS = {
    "advantages": "shape_rewards grpo_advantages spread_over_tokens place_rewards gae "
    "length_lambda discounted_sums trained_first",
    "estimators": "rloo_advantages opo_advantages pass_at_k_advantages max_at_k_advantages "
    "gpg_advantages asymre_advantages gdpo_advantages",
    "kl": "kl_estimate kl_term",
    "losses": "aggregate sft_loss critic_loss",
    "policy_loss": "Correction PolicyLoss",
    "preferences": "DPO SimPO BradleyTerry",
    "surrogates": "token_ratio sequence_ratio sequence_token_ratio Clip CISPO SAPO GMPO Unclipped "
    "LogLikelihood TOPR",
}


@pytest.mark.parametrize("name", MODULES)
def test_examples_are_true(name):
    assert not doctest.testmod(importlib.import_module(name)).failed


@pytest.mark.parametrize("name", FORMULAS)
def test_every_formula_has_an_example(name):
    module = importlib.import_module(f"megarl.algos.{name}")
    with_example = {t.name for t in doctest.DocTestFinder().find(module) if t.examples}
    assert {f"{module.__name__}.{fn}" for fn in FORMULAS[name].split()} <= with_example
