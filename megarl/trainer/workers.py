"""Says where the parts of a run are made: in this process, or in worker processes under a single
controller.

A recipe makes its roles, checks and client by `workers.make`, and calls their methods. Under
torchrun every rank does so for itself. A single controller (trainer.mode=controller) has the same
lines make them on its workers: what `make` returns there stands for the object of every worker, and
its methods are calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


class Workers(Protocol):
    """Makes objects and runs functions in the processes of one kind: the trainers, or the one that
    drives rollouts. Arguments that stand for objects there arrive as these objects."""

    @property
    def ctx(self) -> Any:
        """Returns the ProcessContext there."""

    @property
    def tokenizer(self) -> Any:
        """Returns the tokenizer there."""

    def make(self, fn: Callable[P, T], /, *args: P.args, **kw: P.kwargs) -> T:
        """Returns what `fn(*args, **kw)` makes there, or what stands for it."""

    def run(self, fn: Callable[P, T], /, *args: P.args, **kw: P.kwargs) -> T:
        """Returns the result of `fn(*args, **kw)` there, which is plain data."""


class Here:
    """Makes and runs everything in this process, as every rank of torchrun does for itself."""

    def __init__(self, ctx: Any = None) -> None:
        self.ctx = ctx

    @property
    def tokenizer(self) -> Any:
        """Returns the context's tokenizer."""
        return self.ctx.tokenizer

    def make(self, fn: Callable[P, T], /, *args: P.args, **kw: P.kwargs) -> T:
        """Returns fn(*args, **kw)."""
        return fn(*args, **kw)

    run = make


HERE = Here()
