"""Llama: the default in everything."""

from megarl.models.families.base import Family

FAMILIES = (Family(name="llama", architecture="LlamaForCausalLM"),)
