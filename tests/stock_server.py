"""What a stock SGLang server does with weights, without SGLang: its endpoints, and a process for
each tensor-parallel rank, whose made-up model cuts every HF tensor by rows.
"""

from __future__ import annotations

import base64
import io
import json
import math
import multiprocessing as mp
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection, wait
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from megarl.wire.process_group import destroy_update_group, init_update_group

Spec = dict[str, tuple[int, ...]]
MEETS: dict[str, Callable[[], Any]] = {
    "dies before its byte": partial(os._exit, 1),
    "never gets its byte": partial(time.sleep, 600.0),
}
WHOLE = {
    "/init_weights_update_group": "join",
    "/update_weights_from_distributed": "load",
    "/destroy_weights_update_group": "leave",
}


class _Names(pickle.Unpickler):
    """Reads names alone, for only a rank may map the memory of its tensor."""

    def find_class(self, module: str, name: str) -> Any:
        return lambda *args: None


class Rows(torch.nn.Module):
    """A rank's rows of every HF tensor; of those that cannot be cut, and of vectors, all."""

    def __init__(
        self, spec: Spec, rank: int, tp: int, how: str = "", dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.rank, self.tp, self.how = rank, tp, how
        self.held = torch.nn.ParameterDict()
        for name, shape in spec.items():
            rows = shape[0] // tp if self.cut(shape) else shape[0]
            value = torch.full((rows, *shape[1:]), -1.0, dtype=dtype)
            self.held[name.replace(".", "/")] = torch.nn.Parameter(value)

    def cut(self, shape: Iterable[int]) -> bool:
        rows, *others = shape
        return bool(others) and rows % self.tp == 0

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, w in weights:
            p = self.held[name.replace(".", "/")]
            part = w.narrow(0, self.rank * len(p), len(p)) if self.cut(w.shape) else w
            if self.how == "fails" and part.sum().item() > 0:
                break
            computes = self.how == "computes" or (self.how == "doubles q_norm" and "q_norm" in name)
            p.data.copy_(part * 2 if computes else part)


class Broadcasts:
    """A rank's side of whole tensors, in one group."""

    def __init__(self, model: Rows) -> None:
        self.model, self.group = model, None

    def join(self, body: dict[str, Any]) -> None:
        names = ("master_address", "master_port", "world_size", "group_name", "backend")
        given = {name: body[name] for name in names}
        rank = body["rank_offset"] + self.model.rank
        self.group = init_update_group(**given, rank=rank, timeout=60.0)

    def load(self, body: dict[str, Any]) -> None:
        dtypes = [getattr(torch, d) for d in body["dtypes"]]
        nbytes = [math.prod(s) * d.itemsize for s, d in zip(body["shapes"], dtypes)]
        flat = torch.empty(sum(nbytes), dtype=torch.uint8)
        dist.broadcast(flat, src=0, group=self.group)
        parts = zip(body["names"], body["shapes"], dtypes, flat.split(nbytes))
        with torch.no_grad():
            self.model.load_weights((n, p.view(d).view(s)) for n, s, d, p in parts)

    def leave(self, body: dict[str, Any]) -> None:
        destroy_update_group(self.group)

    def corrupt(self, where: tuple[int, str]) -> None:
        if where[0] == self.model.rank:
            self.model.held[where[1].replace(".", "/")].data.view(-1)[-1] += 1


def sglang_as(*, rank: int) -> dict[str, Any]:
    """The modules of SGLang that the receiver asks for its rank, and to end a load, by name."""
    parallel = SimpleNamespace(tp_rank=rank)
    return {
        "sglang": SimpleNamespace(),
        "sglang.srt.runtime_context": SimpleNamespace(get_parallel=lambda: parallel),
        "sglang.srt.model_loader.loader": SimpleNamespace(post_load_weights=lambda model: None),
    }


def _rank(spec: Spec, rank: int, tp: int, how: str, dtype: torch.dtype, pipe: Connection) -> None:
    torch.set_num_threads(1)
    from megarl.weight_sync.receiver.megarl_receiver import commands

    sys.modules.update(sglang_as(rank=rank))
    model = Rows(spec, rank, tp, how, dtype)
    broadcasts = Broadcasts(model)
    if how in MEETS and rank == tp - 1:
        # of the first message with slices' senders; whole tensors need none
        dist.batch_isend_irecv = lambda ops: MEETS[how]()  # type: ignore[assignment]
    while (request := pipe.recv()) is not None:
        if isinstance(request, tuple):
            pipe.send(getattr(broadcasts, request[0])(request[1]))
            continue
        if request == "params":
            params = {n.replace("/", "."): p.data.numpy() for n, p in model.held.items()}
            pipe.send(params)
            continue
        if request == "load":  # from elsewhere, as SGLang's loaders do it
            next(model.parameters()).data.fill_(-1)
            pipe.send(True)
            continue
        commands.load(model, pickle.load(io.BytesIO(base64.b64decode(request))))
        pipe.send(True)


@dataclass
class StockServer:
    """busy: so many requests to update weights are answered with 503. slow: seconds that each
    command of slices takes. loader, info: of /server_info. how: "fails", "computes" or "doubles
    q_norm" as it loads, or one of MEETS as its last rank meets the senders. whole: takes whole
    tensors, too. corrupts: (rank, HF tensor) that is altered whenever fingerprints are asked for.
    paths, commands: what it was asked, of its endpoints and its loader."""

    spec: Spec
    tp: int = 1
    loader: tuple[str, ...] = ("megarl_receiver.load",)
    info: dict[str, Any] = field(default_factory=dict)
    how: str = ""
    dtype: torch.dtype = torch.float32
    whole: bool = False
    corrupts: tuple[int, str] | None = None
    busy: int = 0
    slow: float = 0.0
    version: str = "default"
    session: bool = False
    paths: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self.restart()
        handler = type("Handler", (_Handler,), {"stock": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.address = f"127.0.0.1:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def restart(self) -> None:
        """New rank processes, as after a restart at the same address."""
        if hasattr(self, "_procs"):
            self.kill_ranks()
        ctx = mp.get_context("spawn")
        self.dead = False
        self._procs, self._pipes, self.version, self.session = [], [], "default", False
        for rank in range(self.tp):
            here, there = ctx.Pipe()
            process = ctx.Process(
                target=_rank,
                args=(self.spec, rank, self.tp, self.how, self.dtype, there),
                daemon=True,
            )
            process.start()
            there.close()
            self._procs.append(process)
            self._pipes.append(here)

    def kill_ranks(self) -> None:
        for p in self._procs:
            p.kill()
            p.join()

    def end(self) -> None:
        self.kill_ranks()
        self._http.shutdown()
        self._http.server_close()

    def __enter__(self) -> StockServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()

    @property
    def pids(self) -> list[int]:
        """Of its ranks."""
        return [p.pid for p in self._procs]

    def ask(self, what: Any) -> list[Any]:
        """Every rank's answer; a list has what each is asked. Raises EOFError where one is gone."""
        with self._lock:
            answers: dict[Any, Any] = {}
            for rank, pipe in enumerate(self._pipes):
                pipe.send(what[rank] if isinstance(what, list) else what)
            waiting = list(self._pipes)
            while waiting:  # EOFError as soon as any is gone
                for pipe in wait(waiting):
                    answers[pipe] = pipe.recv()
                    waiting.remove(pipe)
            return [answers[pipe] for pipe in self._pipes]

    def holds(self, tensors: dict[str, torch.Tensor]) -> bool:
        """Whether every rank has its rows of these."""
        for rank, params in enumerate(self.ask("params")):
            expected = Rows({n: tuple(t.shape) for n, t in tensors.items()}, rank, self.tp)
            expected.load_weights(tensors.items())
            held = {n.replace("/", "."): p.data for n, p in expected.held.items()}
            if not all(torch.equal(torch.from_numpy(params[n]), p) for n, p in held.items()):
                return False
        return True

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        self.paths.append(path)
        if self.dead and path != "/restart":
            raise EOFError
        if path == "/server_info":
            loaders = list(self.loader)
            return 200, {
                "tp_size": self.tp,
                "version": "0",
                "custom_weight_loader": loaders,
            } | self.info
        if path == "/model_info":
            return 200, {"weight_version": self.version}
        if path == "/begin_weight_update":
            if self.session:
                return 400, {"message": "a session is already open"}
            self.session = True
        elif path == "/end_weight_update":
            self.session = False
        elif path == "/update_weights_from_tensor" and self.busy:
            self.busy -= 1
            return 503, {"message": "busy"}
        elif path == "/update_weights_from_tensor":
            assert self.session
            texts = body["serialized_named_tensors"]
            assert len(texts) == self.tp and body["selector"] == "target"
            name = _Names(io.BytesIO(base64.b64decode(texts[0]))).load()[0][0]
            self.commands.append(json.loads(name)["do"])
            time.sleep(self.slow)
            if self.corrupts and self.commands[-1] == "hash":
                self.ask(("corrupt", self.corrupts))
            self.ask(texts)
            self.version = body.get("weight_version", self.version)
        elif path == "/update_weights_from_disk":
            self.ask("load")
        elif self.whole and path in WHOLE:
            self.ask((WHOLE[path], body))
            self.version = body.get("weight_version", self.version)
        elif path == "/weights_checker":
            return 200, {"ranks": [{"checksums": {"all": "1"}}] * self.tp}
        elif path == "/restart":
            self.loader = tuple(body.get("loader", self.loader))
            self.restart()
        else:
            return 404, {"message": "no such path"}
        return 200, {"success": True, "message": "ok"}


class _Handler(BaseHTTPRequestHandler):
    stock: StockServer

    def _serve(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(size) or b"null") or {}
        try:
            status, answer = self.stock.answer(self.path, body)
        except (EOFError, OSError):  # a rank is gone, and with it the server
            self.stock.dead = True
            self.close_connection = True
            self.connection.close()
            return
        raw = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    do_GET = do_POST = _serve

    def log_message(self, *args: Any) -> None:
        pass
