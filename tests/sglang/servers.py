"""Real SGLang servers on the CPU, started by megarl's own `start_server`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from megarl.config.rollout import ServerConfig
from megarl.rollout.server_process import ServerProcess, start_server
from megarl.utils.child import TERM_TIMEOUT
from megarl.utils.http import in_thread
from tests.embedded_server import Client
from tests.tiny import save_tiny
from tests.tiny_tokenizer import save_tokenizer

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("MEGARL_SGLANG_PYTHON", ROOT / ".venv-sglang/bin/python"))
# SGLang without a GPU, and without the kernels that need AMX. An idle scheduler would spin.
# docs/servers.md shows users the same command.
OPTIONS: dict[str, Any] = {
    "device": "cpu", "attention_backend": "torch_native", "max_total_tokens": 8192,
    "disable_overlap_schedule": True, "sleep_on_idle": True,
}  # fmt: skip
ENV = {
    "SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
    "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false",
}  # fmt: skip
SIZES = {"context_length": 1024, "max_running_requests": 16, "threads": 1}
SAID = [2, 40, 50, 60]  # the prompt of `RealServer.said`
START_TIMEOUT = 280.0  # twice is less than pytest's own timeout: a log is shown, not a stack


def config(**over: Any) -> ServerConfig:
    assert PYTHON.exists(), f"{PYTHON}: no such interpreter; run `make install-sglang`"
    given: dict[str, Any] = dict(
        type="sglang", python=str(PYTHON), options=OPTIONS,
    )  # fmt: skip
    return ServerConfig(**(given | SIZES | over))


def save_model(path: Path, kind: str, seed: int, **over: Any) -> Path:
    """A tiny model with a tokenizer."""
    save_tiny(path, kind, layers=2, seed=seed, max_position_embeddings=1024, **over)
    save_tokenizer(path)
    return path


class RealServer(Client):
    def __init__(self, process: ServerProcess) -> None:
        self.process, self.address = process, process.address
        super().__init__(int(process.address.rpartition(":")[2]))

    @property
    def version(self) -> str:
        return str(self.get("/model_info")[1]["weight_version"])

    def state(self) -> dict[str, Any]:
        """What the scheduler does now; SGLang's /server_info does not say."""
        return dict(self.get("/v1/loads?include=core")[1]["loads"][0])

    def checksums(self) -> list[dict[str, str]]:
        """By rank, {SGLang's parameter: its own checksum}."""
        answer = self.ok("/weights_checker", {"action": "checksum"})
        return [dict(rank["checksums"]) for rank in answer["ranks"]]

    def load(self, path: Path) -> None:
        # an answer comes before its scheduler is idle; weights are refused until it is
        self.ok("/flush_cache?timeout=10")
        self.ok("/update_weights_from_disk", {"model_path": str(path)})

    def said(self) -> list[tuple[int, float]]:
        """(token, logprob) of a greedy answer to a fixed prompt, bit for bit: without the cache,
        which would have the prompt computed in other parts.
        """
        self.ok("/flush_cache?timeout=10")
        answer = self.generate(SAID, temperature=0, max_new_tokens=8, ignore_eos=True)
        return [(t, lp) for lp, t, _ in answer["meta_info"]["output_token_logprobs"]]


def launch(
    model: Path,
    log: Path,
    *,
    tp: int = 1,
    dp: int = 1,
    dtype: str = "float32",
    options: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
) -> RealServer:
    """Returns at once; `serving` waits."""
    cores = "|".join(map(str, range(tp * dp)))  # one for each rank
    # every server would compile small functions, for ten CPU seconds
    env = {**ENV, "TORCHDYNAMO_DISABLE": "1", **(env or {})}
    if tp * dp > 1:
        env["SGLANG_CPU_OMP_THREADS_BIND"] = cores
    process = start_server(
        config(tp=tp, dp=dp, options=OPTIONS | dict(options or {})), model_path=str(model),
        dtype=dtype, log_path=log, env=env, setup_timeout=None,
    )  # fmt: skip
    return RealServer(process)


@contextmanager
def serving(*servers: RealServer) -> Iterator[None]:
    """Healthy inside, ended afterwards, all at once: each takes seconds for it."""
    try:
        deadline = time.monotonic() + START_TIMEOUT
        for server in servers:
            server.process.wait_healthy(max(5.0, deadline - time.monotonic()))
        yield
    finally:
        for end in [in_thread(server.process.stop) for server in servers]:
            end.result(2 * TERM_TIMEOUT)


def hf_logprobs(path: Path, prompt: list[int], answer: list[int], temperature: float = 1.0) -> Any:
    """[len(answer)]: what transformers gives the answer's tokens, in fp32."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ids = torch.tensor([prompt + answer])
    with torch.no_grad():
        logp = torch.log_softmax(model(ids).logits[0] / temperature, -1)
    return logp[len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None])[:, 0]


def hf_greedy(path: Path, prompt: list[int], count: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    step, past, answer = torch.tensor([prompt]), None, []
    with torch.no_grad():
        for _ in range(count):
            out = model(step, past_key_values=past, use_cache=True)
            step, past = out.logits[:, -1:].argmax(-1), out.past_key_values
            answer.append(int(step))
    return answer
