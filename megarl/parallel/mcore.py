"""Opens the door to megatron-core: every module that imports `megatron` imports this one first.

Importing it decides the device (CUDA where there is one, unless MEGARL_DEVICE=cpu) and installs the
CPU backend where that is the CPU, else the part of it that a GPU needs too. Versions of
megatron-core differ here and in the backend's numbered patches, and nowhere else.
"""

from __future__ import annotations

import logging
import warnings
from functools import partial

from megarl.parallel import cpu_backend, deep_ep
from megarl.parallel.worlds import comm_backend, device, on_cuda

__all__ = ["comm_backend", "device", "on_cuda"]

deep_ep.make_importable()
if not on_cuda():
    cpu_backend.install()

# what megatron-core says about choices that are right here, once per rank and engine
for _message in (
    "full scope is deprecated. Use empty cuda_graph_scope",  # its own default
    r"`sequence_parallel` is set to `True`, but tensor model parallel size is 1",  # an expert's
    r"The \.grad attribute of a Tensor that is not a leaf Tensor",  # ZeRO-1 shards
    r"`torch\.distributed\.\w+` is deprecated. Please use `torch\.distributed\.\w+_single`",
):
    warnings.filterwarnings("ignore", message=_message)
if not on_cuda():
    warnings.filterwarnings("ignore", message=".*CUDA_DEVICE_MAX_CONNECTIONS")


def _is_other(message: str, record: logging.LogRecord) -> bool:
    return message not in record.getMessage()


# what 0.19 logs beside, at every build and load: GPTModel, the layout that the wrapper computes and
# common.pt are what both versions have
for _logger, _message in (
    ("models.gpt.gpt_model", "GPTModel IS DEPRECATED"),
    ("distributed.distributed_data_parallel", "full_param_layout not provided"),
    ("dist_checkpointing.strategies.common", "load_common is deprecated"),
):
    logging.getLogger(f"megatron.core.{_logger}").addFilter(partial(_is_other, _message))

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # "Transformer Engine / apex is not installed"
    import megatron.core
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.optimizer
    import megatron.core.transformer.moe.token_dispatcher  # noqa: F401

if on_cuda():
    cpu_backend.install_everywhere()
