"""Receives weight updates: sessions, process groups, and the tensors that arrive through them.

Everything here runs in the scheduler's thread except joining a group, which waits for its other
members and must not stop generation meanwhile.

A refused broadcast is received all the same where possible: a tensor left in the pipe would be
taken for the next one. An accepted broadcast is received straight into the parameters where their
layout allows it, which saves a copy and fresh memory (a host takes longer to provide that than to
fill it). If its sender is lost half way, those parameters are torn, and the server generates
nothing until they are loaded again.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from megarl.server.adapters import Adapters
from megarl.server.protocol import MAX_GROUP_SIZE, MAX_JOINS, ControlError
from megarl.server.tensor_lists import Changes, TensorList
from megarl.server.weights import WeightStore
from megarl.wire import block_fp8, delta, handles
from megarl.wire.process_group import (
    abort_collectives,
    destroy_update_group,
    init_update_group,
)

logger = logging.getLogger(__name__)
DEFAULT_GROUP = "weight_update_group"


class WeightUpdates:
    """Receives weights and loads them.

    `weights_id` is the sender's id of the update whose weights these are; None where they came
    another way, or are torn. `_base` is its value when the session began.
    """

    def __init__(self, store: WeightStore, device: torch.device, *, timeout: float) -> None:
        self.store, self.device, self._timeout = store, device, timeout
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._receiving: dist.ProcessGroup | None = None
        self._leaving: set[dist.ProcessGroup] = set()
        self._session = False
        self.adapters = Adapters(store)
        self.weights_id: str | None = None
        self._base: str | None = None
        self._room: torch.Tensor | None = None
        self._released = False  # and not updated since
        self._lock = threading.Lock()
        self.joins = set[str]()  # groups whose other members are waited for

    def begin(self) -> None:
        """Opens a session. Opening one that a dead trainer left open is no error."""
        self.adapters.forget()
        self._session, self._room, self._base = True, None, self.weights_id

    def end(self) -> None:
        """Closes a session. Raises ControlError where none is open."""
        if not self._session:
            raise ControlError("end_weight_update() without begin_weight_update()")
        self._session, self._room = False, None

    def init_group(self, body: dict[str, Any]) -> None:
        """Joins the group as rank `rank_offset`; waits for the others (not the model's thread)."""
        name = group_name(body)
        backend = body.get("backend") or "nccl"
        if backend == "nccl" and self.device.type != "cuda":
            raise ControlError(f"backend 'nccl' needs a GPU, this server is on {self.device}")
        if backend not in ("nccl", "gloo"):
            raise ControlError(f"backend={backend!r}: use 'nccl' or 'gloo'")
        if not isinstance(address := body.get("master_address"), str) or not address:
            raise ControlError(f"master_address={address!r}: must be a string")
        port = _number(body, "master_port", 1, 65535)
        world = _number(body, "world_size", 2, MAX_GROUP_SIZE)
        rank = _number(body, "rank_offset", 1, world - 1)  # rank 0 is the sender's
        where: dict[str, Any] = dict(master_address=address, master_port=port, group_name=name)
        with self._joining(name):
            try:
                self._groups[name] = init_update_group(
                    **where, rank=rank, world_size=world, backend=backend, timeout=self._timeout
                )
            except (RuntimeError, ValueError, TypeError) as e:
                raise ControlError(f"Failed to initialize custom process group: {e}.") from e

    @contextlib.contextmanager
    def _joining(self, name: str) -> Iterator[None]:
        with self._lock:
            if name in self._groups:
                raise ControlError(f"group {name!r} exists; destroy_weights_update_group first")
            if name in self.joins:
                raise ControlError(
                    f"group {name!r} is being joined by an earlier call; wait for its answer"
                )
            if len(self.joins) >= MAX_JOINS:
                raise ControlError(
                    f"group {name!r}: {MAX_JOINS} groups wait for their other members already, "
                    f"each for up to {self._timeout:g} s (--dist-timeout); try again later",
                    status=503,
                )
            self.joins.add(name)
        try:
            yield
        finally:
            with self._lock:
                self.joins.remove(name)

    def emptied(self) -> None:
        """Notes that the numbers of all weights are lost: their memory is given back."""
        self.adapters.forget()
        self.weights_id = self._base = None
        self.store.torn |= self.store.tensors.keys()
        self._released = True

    def unfit(self) -> str:
        """Says why nothing may be generated with these weights, "" where they are whole."""
        if not self.store.torn:
            self._released = False
            return ""
        if self._released:
            return (
                f"the memory of the weights was released, and {len(self.store.torn)} of them have "
                f"not come since, {min(self.store.torn)} among them; update the weights"
            )
        return (
            f"a weight update failed while it wrote {min(self.store.torn)}"
            f"{f' and {n} more' if (n := len(self.store.torn) - 1) else ''}, which now hold "
            "neither the old nor the new version; update the weights again"
        )

    def interrupt(self, name: str) -> None:
        """Ends the wait for tensors of this group, which may never come, as another of its members
        is gone, and keeps waits for more of them from beginning. Call it in any thread, before
        `destroy_group`."""
        group = self._groups.get(name)
        if group is None:
            return
        self._leaving.add(group)
        if group is self._receiving:
            abort_collectives(group)

    def destroy_group(self, name: str) -> None:
        """Leaves a group. Raises ControlError where there is none of this name."""
        group = self._groups.pop(name, None)
        if group is None:
            raise ControlError(f"there is no group {name!r}")
        self._leaving.discard(group)
        try:
            destroy_update_group(group)
        except RuntimeError as e:  # its other members may be gone already; it is out of use anyway
            logger.warning("group %r did not close cleanly: %s", name, e)

    def from_distributed(self, body: dict[str, Any], check: Callable[[], None]) -> None:
        """Receives the tensors of `body` and loads them all. Raises ControlError, having loaded
        none, where they do not fit or `check` refuses."""
        if not self._session:
            raise ControlError(
                "update_weights_from_distributed must run between begin_weight_update() and "
                "end_weight_update()"
            )
        name = group_name(body)
        group = self._groups.get(name)
        if group is None:
            raise ControlError(f"there is no group {name!r}: init_weights_update_group first")
        tensors = TensorList.parse(body)
        load_format = body.get("load_format")
        if load_format not in ("flattened_bucket", "delta"):
            raise ControlError(f"load_format={load_format!r}: use 'flattened_bucket' or 'delta'")
        changes = Changes.parse(body.get("delta"), tensors) if load_format == "delta" else None
        refusal = self._refusal(tensors, changes, check)
        if refusal is None:
            self.weights_id = None  # the weights have no version until the last bucket is in
        with self._failures(tensors, group):
            if changes is not None:
                self._patch(tensors, changes, group, accepted=refusal is None)
            else:
                received = self._flattened(tensors, group, accepted=refusal is None)
        if refusal is not None:
            raise refusal
        if changes is None:
            with self.store.writing(block_fp8.plain_specs(tensors.specs)):
                self.store.load(block_fp8.dequantized(received.items()))
        self.weights_id = body.get("weights_id")

    def from_tensor(self, body: dict[str, Any], check: Callable[[], None]) -> None:
        """Loads tensors out of the sender's memory, by the handles in `body`. Raises ControlError,
        having loaded none, where they do not fit or `check` refuses."""
        if not self._session:
            raise ControlError(
                "update_weights_from_tensor must run between begin_weight_update() and "
                "end_weight_update()"
            )
        texts, load_format = body.get("serialized_named_tensors"), body.get("load_format")
        if not isinstance(texts, list) or len(texts) != 1 or not isinstance(texts[0], str):
            raise ControlError("serialized_named_tensors must be a list of one base64 string")
        if load_format != "flattened_bucket":
            raise ControlError(f"load_format={load_format!r}: use 'flattened_bucket'")
        check()
        try:
            tensors = handles.unpack(texts[0])
            self.store.check({name: (tuple(t.shape), t.dtype) for name, t in tensors})
        except ControlError:
            raise
        except Exception as e:  # a text that is no such pickle may raise anything
            raise ControlError(f"serialized_named_tensors: {e}") from e
        self.weights_id = None
        with self.store.writing([name for name, _ in tensors]):
            self.store.load(tensors)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # once answered, the sender writes there again

    def from_disk(self, path: str, check: Callable[[], None]) -> None:
        """Loads an HF directory, or nothing where `check` refuses or a tensor does not fit."""
        check()
        self.weights_id = None
        self.adapters.forget()
        self.store.load_directory(path)

    def load_adapter(self, name: str, path: str, check: Callable[[], None]) -> None:
        """Merges the adapter in directory `path`, or does nothing where `check` refuses."""
        check()
        self.weights_id = None
        self.adapters.load(name, path)

    def unload_adapter(self, name: str, check: Callable[[], None]) -> None:
        """Unloads an adapter; where it is the merged one, `check` may refuse."""
        if name == self.adapters.merged:
            check()
            self.weights_id = None
        self.adapters.unload(name)

    def _refusal(
        self, tensors: TensorList, changes: Changes | None, check: Callable[[], None]
    ) -> ControlError | None:
        try:
            check()
            plain = block_fp8.plain_specs(tensors.specs)
            self.store.check(plain)
            if changes is not None and len(plain) < len(tensors.specs):
                raise ControlError(
                    "changes of FP8 weights: this server keeps none, send them whole"
                )
            if changes is not None and changes.base != self._base:
                raise ControlError(
                    f"changes since update {changes.base!r}, but this server holds "
                    + (f"update {self._base!r}" if self._base else "weights of another origin")
                )
        except ControlError as e:
            return e
        except ValueError as e:
            return ControlError(str(e))
        return None

    def _patch(
        self, tensors: TensorList, changes: Changes, group: dist.ProcessGroup, *, accepted: bool
    ) -> None:
        payload = self._bucket(delta.payload_bytes(changes.chunks))
        dist.broadcast(payload, src=0, group=group)
        specs = list(tensors.specs.items())
        patches = delta.patches(changes.chunks, payload, tensors.sizes) if accepted else ()
        with self.store.writing(tensors.specs if accepted else ()):
            for i, positions, bits in patches:
                name, (_, dtype) = specs[i]
                self.store.patch(name, dtype, positions, bits)

    def _flattened(
        self, tensors: TensorList, group: dist.ProcessGroup, *, accepted: bool
    ) -> dict[str, torch.Tensor]:
        """Receives a flattened bucket into the parameters, into memory that becomes theirs, or into
        room from which their values can be copied."""
        nbytes, store = sum(tensors.sizes), self.store
        if not accepted:
            return tensors.receive_flat(group, self._bucket(nbytes))
        span = store.span(tensors.specs)
        if span is None and store.can_adopt(tensors.specs):
            received = tensors.receive_flat(
                group, torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            )
            store.adopt(received)
            return received
        if span is None:
            return tensors.receive_flat(group, self._bucket(nbytes))
        with store.writing(tensors.specs):
            return tensors.receive_flat(group, span)

    def _bucket(self, nbytes: int) -> torch.Tensor:
        """Returns room for a flattened bucket; it is the same memory throughout a session."""
        if self._room is None or self._room.numel() < nbytes:
            self._room = None  # freed before its successor is allocated
            self._room = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return self._room[:nbytes]

    @contextlib.contextmanager
    def _failures(self, tensors: TensorList, group: dist.ProcessGroup) -> Iterator[None]:
        """Turns the loss of a sender into a ControlError, so that the server goes on."""
        self._receiving = group
        try:
            if group in self._leaving:  # looked at after `interrupt` could see who receives
                raise RuntimeError("the group is being left")
            yield
        except (RuntimeError, ValueError) as e:
            first = next(iter(tensors.specs), "(no tensors)")
            raise ControlError(
                f"Failed to receive {first} and {max(0, len(tensors.specs) - 1)} more: {e}"
            ) from e
        finally:
            self._receiving = None


def group_name(body: dict[str, Any]) -> str:
    """Returns the name of the group that a body means. Raises ControlError if it is no text."""
    name = body.get("group_name") or DEFAULT_GROUP
    if not isinstance(name, str):
        raise ControlError(f"group_name={name!r}: must be a string")
    return name


def _number(body: dict[str, Any], key: str, low: int, high: int) -> int:
    value = body.get(key)
    if type(value) is not int or not low <= value <= high:
        raise ControlError(f"{key}={value!r}: must be an integer from {low} to {high}")
    return value
