"""Receives weight updates: sessions, process groups, and the tensors that arrive through them.

Everything here runs in the scheduler's thread except joining a broadcast's group, which waits for
its other members and must not stop generation meanwhile.

Trainers that send slices find here what they find in a stock SGLang server: megarl_receiver obeys
their commands. A load that fails half way leaves torn parameters, and the server generates nothing
until they are loaded again. A refused broadcast is received all the same where possible: a tensor
left in the pipe would be taken for the next one.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from megarl.server.adapters import Adapters
from megarl.server.protocol import MAX_GROUP_SIZE, MAX_JOINS, ControlError
from megarl.server.weights import Spec, WeightStore, cut, read_specs
from megarl.weight_sync.receiver import LOADER, megarl_receiver
from megarl.wire import block_fp8, handles
from megarl.wire.process_group import abort_collectives, destroy_update_group, init_update_group

logger = logging.getLogger(__name__)
DEFAULT_GROUP = "weight_update_group"


class WeightUpdates:
    """Receives weights and loads them."""

    def __init__(self, store: WeightStore, device: torch.device, *, timeout: float) -> None:
        self.store, self.device, self._timeout = store, device, timeout
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._receiving: dist.ProcessGroup | None = None
        self._leaving: set[dist.ProcessGroup] = set()
        self._session = False
        self.adapters = Adapters(store)
        self._room: torch.Tensor | None = None
        self._released = False  # and not updated since
        self._lock = threading.Lock()
        self.joins = set[str]()  # groups whose other members are waited for

    def begin(self, check: Callable[[], None]) -> None:
        """Opens a session, unless `check` refuses. Opening one that a dead trainer left open is no
        error."""
        check()
        self.adapters.forget()
        self._session = True

    def end(self) -> None:
        """Closes a session. Raises ControlError where none is open."""
        if not self._session:
            raise ControlError("end_weight_update() without begin_weight_update()")
        self._session = False
        if self.device.type == "cuda":
            self._room = None  # generation needs the memory

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
        specs = read_specs(body)
        if body.get("load_format") != "flattened_bucket":
            raise ControlError(f"load_format={body.get('load_format')!r}: use 'flattened_bucket'")
        refusal = self._refusal(specs, check)
        flat = self._bucket(
            sum(math.prod(shape) * dtype.itemsize for shape, dtype in specs.values())
        )
        with self._failures(specs, group):
            dist.broadcast(flat, src=0, group=group)
        if refusal is not None:
            raise refusal
        tensors = cut(flat, specs)
        with self.store.writing(block_fp8.plain_specs(specs)):
            self.store.load(block_fp8.dequantized(tensors.items()))

    def from_tensor(self, body: dict[str, Any], check: Callable[[], None]) -> None:
        """Obeys the command of slices in `body`, which needs no session. Raises ControlError where
        that fails or `check` refuses. Weights are torn where only some have been written."""
        texts, load_format = body.get("serialized_named_tensors"), body.get("load_format")
        if not isinstance(texts, list) or len(texts) != 1 or not isinstance(texts[0], str):
            raise ControlError("serialized_named_tensors must be a list of one base64 string")
        if load_format != LOADER:
            raise ControlError(f"load_format={load_format!r}: use {LOADER!r}")
        check()
        try:
            tensors = handles.unpack(texts[0])
        except Exception as e:  # a text that is no such pickle may raise anything
            raise ControlError(f"serialized_named_tensors: {e}") from e
        if self.adapters.merged is not None:
            raise ControlError(f"adapter {self.adapters.merged!r} is merged: begin_weight_update")
        reply = megarl_receiver.load(self.store.model, tensors)
        if reply["wrote"]:
            whole = reply["ok"] and reply.get("whole", True)
            self.store.torn = set() if whole else {*self.store.tensors}
        if not reply["ok"]:
            raise ControlError(reply["error"])

    def from_disk(self, path: str, check: Callable[[], None]) -> None:
        """Loads an HF directory, or nothing where `check` refuses or a tensor does not fit."""
        check()
        self.adapters.forget()
        self.store.load_directory(path)

    def load_adapter(self, name: str, path: str, check: Callable[[], None]) -> None:
        """Merges the adapter in directory `path`, or does nothing where `check` refuses."""
        check()
        self.adapters.load(name, path)

    def unload_adapter(self, name: str, check: Callable[[], None]) -> None:
        """Unloads an adapter; where it is the merged one, `check` may refuse."""
        if name == self.adapters.merged:
            check()
        self.adapters.unload(name)

    def _refusal(self, specs: Mapping[str, Spec], check: Callable[[], None]) -> ControlError | None:
        try:
            check()
            self.store.check(block_fp8.plain_specs(specs))
        except ControlError as e:
            return e
        except ValueError as e:
            return ControlError(str(e))
        return None

    def _bucket(self, nbytes: int) -> torch.Tensor:
        """Returns room for a flattened bucket; it is the same memory throughout a session."""
        if self._room is None or self._room.numel() < nbytes:
            self._room = None  # freed before its successor is allocated
            self._room = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return self._room[:nbytes]

    @contextlib.contextmanager
    def _failures(self, specs: Mapping[str, Spec], group: dist.ProcessGroup) -> Iterator[None]:
        """Turns the loss of a sender into a ControlError, so that the server goes on."""
        self._receiving = group
        try:
            if group in self._leaving:  # looked at after `interrupt` could see who receives
                raise RuntimeError("the group is being left")
            yield
        except (RuntimeError, ValueError) as e:
            first = next(iter(specs), "(no tensors)")
            raise ControlError(
                f"Failed to receive {first} and {max(0, len(specs) - 1)} more: {e}"
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
