"""Remote stands on the controller for an object that lives on every worker of a group."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from megarl.controller.messages import Ref

if TYPE_CHECKING:
    from megarl.controller.group import Pending, WorkerGroup


def invoke(target: Any, verb: str, /, *args: Any, **kwargs: Any) -> Any:
    """Returns `target.verb(*args, **kwargs)`; what a method call on a Remote sends."""
    return getattr(target, verb)(*args, **kwargs)


class Remote:
    """Passes on what is done with it to the object on the workers: a method is called on all of
    them, and returns the first one's result (see WorkerGroup); an attribute is read on all of them,
    or set. `remote.later.method(...)` returns the call under way, a Pending. The object is freed
    when its last Remote is gone."""

    def __init__(self, group: WorkerGroup, id: str, kind: str, methods: Collection[str]) -> None:
        """Takes the group, the object's id there, the name of its class, and its methods."""
        self._group, self._id, self._kind, self._methods = group, id, kind, methods
        group.own(id, self)

    def ref(self, group: WorkerGroup) -> Ref:
        """Returns what names the object to the workers of `group`. Raises ValueError where they
        do not have it."""
        if not set(group.peers) <= set(self._group.peers):
            raise ValueError(
                f"this {self._kind} lives on the workers of {self._group.name}, and {group.name} "
                "has others: an object is used where it was made"
            )
        return Ref("object", self._id)

    @property
    def later(self) -> Any:
        """Returns what calls methods without waiting for them."""
        return _Later(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{name!r} of a remote {self._kind}: only public names travel")
        if name not in self._methods:
            return self._group.call(getattr, self, name)
        later = getattr(self.later, name)

        def method(*args: Any, **kwargs: Any) -> Any:
            return later(*args, **kwargs).result()

        method.__name__ = name
        return method

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            object.__setattr__(self, name, value)
        else:
            self._group.call(setattr, self, name, value)

    def __repr__(self) -> str:
        return f"<remote {self._kind} {self._id} on {self._group.name}>"


class _Later:
    """Calls the methods of a Remote without waiting for them."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote

    def __getattr__(self, name: str) -> Callable[..., Pending]:
        def method(*args: Any, **kwargs: Any) -> Pending:
            return self._remote._group.submit(invoke, (self._remote, name, *args), kwargs)

        return method
