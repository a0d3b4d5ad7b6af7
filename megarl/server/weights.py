"""The model's tensors under their HF checkpoint names: checked loads, checksums.

A load is all or nothing: every name, shape and dtype is checked before the first tensor changes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from megarl.ckpt.safetensors import DTYPES, SafetensorsDir
from megarl.models.shapes import Wrapper, is_beside
from megarl.server.protocol import ControlError
from megarl.weight_sync.receiver.megarl_receiver.fingerprint import hash_text, tensor_hash

Spec = tuple[tuple[int, ...], torch.dtype]
# what a broadcast may bring
_DTYPES = {
    name: getattr(torch, name)
    for name in ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn")
}


class WeightStore:
    """Holds the model's tensors by their HF names, and gives the model the `load_weights` that
    SGLang's have, which megarl_receiver records.

    tensors: the tensors, or views of them. tied: for a head that is no tensor of its own, the name
    of its embedding by that of the head; HF checkpoints may or may not hold it. torn: the names of
    tensors in which a load failed: they hold something between two versions. wrapper: what is
    around the language model in its directory.
    """

    def __init__(self, model: PreTrainedModel, wrapper: Wrapper | None = None) -> None:
        hf_name = wrapper.name if wrapper else str
        self.wrapper, self.dtype = wrapper, model.dtype
        self.tensors = {hf_name(name): tensor for name, tensor in _hf_tensors(model)}
        self.model: Any = model
        vars(model)["load_weights"] = self.load_checked
        self.torn: set[str] = set()
        self.tied: dict[str, str] = {}
        head: Any = model.get_output_embeddings()
        embedding: Any = model.get_input_embeddings()
        if head.weight.data_ptr() == embedding.weight.data_ptr():
            names = {m: hf_name(f"{n}.weight") for n, m in model.named_modules()}
            self.tied[names[head]] = names[embedding]
            self.tensors.pop(names[head], None)

    def get(self, name: str) -> torch.Tensor | None:
        """Returns the tensor of this HF name, of a tied head its embedding, or None."""
        return self.tensors.get(self.tied.get(name, name))

    def check(self, specs: Mapping[str, Spec]) -> None:
        """Raises ControlError, naming the first tensor that does not fit the model."""
        for name, (shape, _) in specs.items():
            own = self.get(name)
            if own is None:
                raise ControlError(f"{name}: the model has no such parameter")
            if tuple(shape) != tuple(own.shape):
                raise ControlError(f"{name}: shape {list(shape)}, the model has {list(own.shape)}")

    @contextmanager
    def writing(self, names: Collection[str]) -> Iterator[None]:
        """Marks the tensors of `names` as torn while the block writes them. They stay torn if the
        block fails, else they are whole, even if they were torn before."""
        own = {self.tied.get(name, name) for name in names}
        self.torn |= own
        yield
        self.torn -= own

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copies checked tensors in, cast to the server's dtype. The copy of a tied head is left
        out, as in SGLang: it follows its embedding."""
        for name, tensor in tensors:
            if name not in self.tied:
                self.tensors[name].copy_(tensor)

    def load_checked(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Loads tensors one by one. Raises ControlError at the first that does not fit."""
        for name, tensor in tensors:
            self.check({name: (tuple(tensor.shape), tensor.dtype)})
            self.load([(name, tensor)])

    def checksums(self) -> dict[str, str]:
        """Returns the tensors' hashes by HF name, without tied heads.

        Each is cast to the server's dtype first, also what transformers keeps in float32, so that
        one rule holds for every tensor.
        """
        casts = [self.dtype]
        return {n: hash_text(tensor_hash(t, casts=casts)) for n, t in self.tensors.items()}

    def load_directory(self, path: str) -> None:
        """Loads a whole HF safetensors directory; ControlError names what is missing or wrong."""
        try:
            with SafetensorsDir(path) as files:
                files.rename([*self.tensors, *self.tied])
                names = (name for name in files.names() if not is_beside(name, self.wrapper))
                stored = {name: files.stored(name) for name in names}
                for name, s in stored.items():
                    if s.dtype not in DTYPES:
                        raise ControlError(f"{name}: dtype {s.dtype} is not supported")
                self.check({name: (s.shape, DTYPES[s.dtype]) for name, s in stored.items()})
                if missing := sorted(self.tensors.keys() - stored.keys()):
                    more = f" and {len(missing) - 1} more of the model's tensors"
                    raise ControlError(f"{path} lacks {missing[0]}" + more * (len(missing) > 1))
                boxes = ((name, tuple(map(slice, s.shape))) for name, s in stored.items())
                with self.writing(stored):
                    self.load((name, files.read(name, box)) for name, box in boxes)
        except (OSError, RecursionError, ValueError) as e:
            raise ControlError(f"{path}: cannot read the weights: {e}") from e


def read_specs(body: Mapping[str, Any]) -> dict[str, Spec]:
    """Reads `names`, `dtypes` ("float32") and `shapes` of the tensors that a broadcast brings, in
    order. Raises ControlError, naming the field that is wrong."""
    lists: dict[str, Any] = {}
    for key in ("names", "dtypes", "shapes"):
        lists[key] = body.get(key)
        if not isinstance(lists[key], list):
            raise ControlError(f"{key} must be a list")
    names, dtypes, shapes = lists["names"], lists["dtypes"], lists["shapes"]
    if not len(names) == len(dtypes) == len(shapes):
        raise ControlError(
            f"names ({len(names)}), dtypes ({len(dtypes)}) and shapes ({len(shapes)}) "
            "differ in length"
        )
    specs: dict[str, Spec] = {}
    for name, dtype, shape in zip(names, dtypes, shapes):
        kind = _DTYPES.get(str(dtype).removeprefix("torch."))
        if not isinstance(name, str):
            raise ControlError(f"names holds {name!r}, which is no name")
        if kind is None:
            raise ControlError(f"{name}: dtype {dtype!r}, use one of {sorted(_DTYPES)}")
        if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
            raise ControlError(f"{name}: shape {shape!r} is not a list of sizes")
        if name in specs:
            raise ControlError(f"{name}: named twice")
        specs[name] = (tuple(shape), kind)
    return specs


def cut(flat: torch.Tensor, specs: Mapping[str, Spec]) -> dict[str, torch.Tensor]:
    """Returns the tensors whose bytes follow each other in `flat`, uint8, as views of it. Raises
    ControlError where one would not be aligned."""
    out, offset = {}, 0
    for name, (shape, dtype) in specs.items():
        size = math.prod(shape) * dtype.itemsize
        if offset % dtype.itemsize:
            raise ControlError(
                f"{name}: offset {offset} in the flattened bucket is no multiple of the itemsize "
                f"of {dtype}; sort the tensors by itemsize, largest first"
            )
        out[name] = flat[offset : offset + size].view(dtype).view(shape)
        offset += size
    return out


def _hf_tensors(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (HF checkpoint name, tensor of the model or a view of it).

    transformers holds the experts of a layer fused, [E,2I,H] and [E,H,I]; checkpoints hold each
    expert alone, those of Mixtral and MiniMax under names of their own. Experts with biases are
    fused in both.
    """
    mixtral = model.config.model_type in ("mixtral", "minimax_m2")
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    state = model.state_dict()
    for full_name, tensor in state.items():
        name = full_name.replace(".mlp.", ".block_sparse_moe.") if mixtral else full_name
        block, _, leaf = name.rpartition(".")
        alone = leaf in ("gate_up_proj", "down_proj") and f"{full_name}_bias" not in state
        if tensor.ndim != 3 or not alone:
            yield name, tensor
            continue
        for e, expert in enumerate(tensor.unbind(0)):
            if leaf == "down_proj":
                yield f"{block}.{e}.{down}.weight", expert
            else:
                for part, view in zip((gate, up), expert.chunk(2)):
                    yield f"{block}.{e}.{part}.weight", view
