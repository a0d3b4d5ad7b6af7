"""Links two processes of a job: calls go both ways over one connection (frames.py).

Whoever dials and whoever listens have the same Link. Its calls arrive in the order in which they
were made, any number of them at once; `handle` at the other end answers them.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import pickle
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import Any, Protocol

import cloudpickle

from megarl.rpc.errors import Refused, RemoteError, RpcError
from megarl.rpc.frames import Part, Wire, greet, introduce, new_instance, own_token
from megarl.utils.http import settle, split_address
from megarl.utils.user_errors import RemoteTrace, text_of

# (verb, payload, the link that it came over) -> the answer, or a Future of it
Handle = Callable[[str, Any, "Link"], Any]

CALL, ANSWER, ERROR = range(3)  # kinds of frames
CONNECT_TIMEOUT = 30.0
APART = 1 << 12  # bytes from which on a buffer is sent beside the body
NEWCOMERS = 64  # that may prove at the same time who they are
FULL = 0.1  # seconds after which a listener looks again whether the process may open a file


class Handler(Protocol):
    """Is what a worker serves."""

    def handle(self, verb: str, payload: Any) -> Any:
        """Returns the answer to a call, or a Future of it. It is called in the order of the calls
        of one caller, in a thread that must not be kept: `on_main_thread` (worker.py) returns the
        Future of what the main thread makes. What it raises, the caller sees as RemoteError."""
        ...

    def close(self) -> None:
        """Frees what it holds, on the main thread, when the worker ends in an orderly way."""
        ...


@dataclass(frozen=True)
class Packed:
    """Holds a payload that is ready to be sent, over one link or several."""

    parts: tuple[Part, ...]


class Pickler(cloudpickle.Pickler):
    """Pickles a script's own functions and classes by their code, and tensors by their values
    alone, which it brings to host memory."""

    def reducer_override(self, obj: Any) -> Any:
        """Says how an object is pickled."""
        # without torch, and while another thread imports it, there are no tensors
        torch = sys.modules.get("torch")
        if torch is None or type(obj) is not getattr(torch, "Tensor", None):
            return super().reducer_override(obj)
        if obj.layout != torch.strided or obj.is_quantized:
            return obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        raw = obj.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return tensor, (pickle.PickleBuffer(raw), obj.dtype, tuple(obj.shape))


def tensor(raw: bytearray, dtype: Any, shape: tuple[int, ...]) -> Any:
    """Returns the tensor whose values are these bytes, without a copy."""
    import torch  # here: not all that is sent has tensors

    flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return flat.view(shape)


def pack(payload: Any) -> Packed:
    """Returns `payload` pickled. Large buffers that are pickled as such (PickleBuffer, arrays,
    tensors) are sent as they lie in memory."""
    raw: list[memoryview] = []

    def stays_inside(buffer: pickle.PickleBuffer) -> bool:
        if small := (view := buffer.raw()).nbytes < APART:
            return small
        raw.append(view)
        return False

    body = io.BytesIO()
    Pickler(body, protocol=5, buffer_callback=stays_inside).dump(payload)
    return Packed((body.getbuffer(), *raw))


class Link:
    """Calls the process at the other end, `name` in errors, and answers its calls by `handle`.

    A call has no limit of its own: it ends with its answer, or with the link, which every call
    under way and each later one raises: RpcError "link to ... lost", or what `fail` was given.
    """

    def __init__(
        self, wire: Wire, name: str, handle: Handle, lost: Callable[[], None] = lambda: None
    ) -> None:
        """lost: is called, in the link's own thread, when the connection has ended, before calls
        learn of it; it may `fail` the link with a better reason."""
        self.name, self.lost = name, lost
        self._wire, self._handle = wire, handle
        self._lock, self._numbers = threading.Lock(), count()
        self._waiting: dict[int, Future[Any]] = {}
        self._ending = threading.Lock()  # never held for long, as the other is by who sends
        self._why: RpcError | None = None
        self._answers: SimpleQueue[tuple[int, Future[Any]] | None] = SimpleQueue()
        threading.Thread(target=self._answer, name="link answers", daemon=True).start()
        self.thread = threading.Thread(target=self._listen, name=f"link to {name}", daemon=True)
        self.thread.start()

    def call(self, verb: str, payload: Any = None, timeout: float | None = None) -> Any:
        """Returns what the other end's `handle` makes of `payload`, which may be Packed already.

        Raises RemoteError where that raised, WorkerDied where it is known to have ended, RpcError
        where the link was lost, TimeoutError after `timeout` seconds: the call then goes on there.
        """
        future = self.call_async(verb, payload)
        try:
            return future.result(timeout)
        except TimeoutError as e:
            if future.done():  # the worker's own
                raise
            why = f"call {verb} has no answer after {timeout:g} s"
            raise TimeoutError(f"worker {self.name}: {why}") from e

    def call_async(self, verb: str, payload: Any = None) -> Future[Any]:
        """Sends a call and returns its future. Waits where the other end does not read."""
        packed = payload if isinstance(payload, Packed) else pack(payload)
        future: Future[Any] = Future()
        with self._lock:
            if self._why is not None:
                future.set_exception(_anew(self._why))
                return future
            number = next(self._numbers)
            self._waiting[number] = future
            try:
                self._wire.send(number, CALL, (verb.encode(), *packed.parts))
            except OSError:  # whoever listens to the end tells the future
                pass
            except BaseException:
                del self._waiting[number]
                raise
        return future

    async def acall(self, verb: str, payload: Any = None) -> Any:
        """Makes a call from a coroutine. A coroutine that is cancelled does not cancel the call."""
        future = await asyncio.to_thread(self.call_async, verb, payload)
        return await asyncio.shield(asyncio.wrap_future(future))

    def fail(self, why: RpcError) -> None:
        """Ends the link: calls under way and later ones raise `why`. The first reason counts."""
        with self._ending:
            if self._why is not None:
                return
            self._why = why
        self._wire.close()  # whoever sends lets go of the lock
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if future.set_running_or_notify_cancel():
                future.set_exception(_anew(why))

    def close(self) -> None:
        """Ends the link; calls under way raise RpcError."""
        self.fail(RpcError(f"worker {self.name}: the link is closed"))

    # -- the thread that listens

    def _listen(self) -> None:
        why = ""
        try:
            while True:
                number, kind, parts = self._wire.receive()
                if kind == CALL:
                    self._called(number, parts)
                else:
                    self._answered(number, kind, parts)
        except (EOFError, OSError) as e:
            why = "" if isinstance(e, EOFError) else f" ({e})"
        except Refused as e:
            why = f" ({e})"
        finally:
            self._wire.close()
            if self._why is None:
                self.lost()
            self.fail(RpcError(f"link to {self.name} lost{why}"))
            self._answers.put(None)
            self._wire.free()

    def _answered(self, number: int, kind: int, parts: list[Part]) -> None:
        future = self._waiting.pop(number, None) or Future()
        if future.set_running_or_notify_cancel():  # else whoever waited for it has gone
            settle(future, self._answer_of, kind, parts)

    def _answer_of(self, kind: int, parts: list[Part]) -> Any:
        value = pickle.loads(parts[1], buffers=parts[2:])
        if kind == ERROR:
            raise RemoteError(self.name, *value)
        return value

    def _called(self, number: int, parts: list[Part]) -> None:
        answer: Future[Any] = Future()
        try:
            payload = pickle.loads(parts[1], buffers=parts[2:])
            value = self._handle(bytes(parts[0]).decode(), payload, self)
            if isinstance(value, Future):
                value.add_done_callback(partial(self._send_answer, number))
                return
            answer.set_result(value)
        except BaseException as e:
            answer.set_exception(e)
        self._answers.put((number, answer))

    def _answer(self) -> None:
        """Sends the answers that were made by the thread that listens. Where this sent them itself,
        two ends with large answers for each other would both listen no more."""
        while (one := self._answers.get()) is not None:
            self._send_answer(*one)

    def _send_answer(self, number: int, future: Future[Any]) -> None:
        try:
            answer = future.result()
            self._send(number, ANSWER, answer if isinstance(answer, Packed) else pack(answer))
        except BaseException as e:
            self._send(number, ERROR, pack((type(e).__name__, text_of(e), RemoteTrace.of(e))))

    def _send(self, number: int, kind: int, packed: Packed) -> None:
        with self._lock, contextlib.suppress(OSError):  # nobody waits for it any more
            self._wire.send(number, kind, (b"", *packed.parts))


def _anew(why: RpcError) -> RpcError:
    """Returns an error of its own for each call, with that call's traceback."""
    return type(why)(*why.args)


def _no_calls(verb: str, payload: Any, link: Link) -> Any:
    raise LookupError(f"{link.name} answers no calls")


def connect(address: str, name: str = "", handle: Handle = _no_calls) -> Link:
    """Returns a link to the listener at `address`, host:port or [host]:port of IPv6.

    Raises RpcError where nobody answers, Refused for one of another job, ValueError without the
    job's token.
    """
    token, name = own_token(), name or address
    try:
        sock = socket.create_connection(split_address(address), timeout=CONNECT_TIMEOUT)
    except OSError as e:
        raise RpcError(f"link to {name}: nobody listens at {address}: {e}") from e
    try:
        return Link(introduce(sock, token), name, handle)
    except Refused as e:
        sock.close()
        raise Refused(f"link to {name}: {e}") from None
    except (OSError, EOFError) as e:
        sock.close()
        raise RpcError(f"link to {name} lost: {e}") from e


class Listener:
    """Listens from its construction until `close`, at `address`, and makes a Link to each process
    of the job that dials; `handle` answers its calls. `close` leaves the links as they are."""

    def __init__(self, handle: Handle, *, host: str = "127.0.0.1", port: int = 0) -> None:
        """Raises OSError where nobody can listen at `host` and `port` (0: a free one), ValueError
        without the job's token."""
        self._token = own_token()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._sock = socket.create_server((host, port), family=family, backlog=1024)
        self._handle, self._instance, self._closed = handle, new_instance(), False
        self._newcomers = threading.BoundedSemaphore(NEWCOMERS)
        port = self._sock.getsockname()[1]
        self.address = f"[{host}]:{port}" if family == socket.AF_INET6 else f"{host}:{port}"
        threading.Thread(target=self._accept, name="link listener", daemon=True).start()

    def close(self) -> None:
        """Listens no more. May be called twice."""
        if not self._closed:
            self._closed = True
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)  # which wakes the thread
            self._sock.close()

    def _accept(self) -> None:
        while not self._closed:
            self._newcomers.acquire()
            try:
                sock, where = self._sock.accept()
            except OSError:  # it is closed, or this process has too many files open
                self._newcomers.release()
                time.sleep(0 if self._closed else FULL)
                continue
            threading.Thread(target=self._welcome, args=(sock, where), daemon=True).start()

    def _welcome(self, sock: socket.socket, where: Any) -> None:
        try:
            wire = greet(sock, self._instance, self._token)
        except (OSError, EOFError, Refused):
            sock.close()
            return
        finally:
            self._newcomers.release()
        Link(wire, f"the process at {where[0]}:{where[1]}", self._handle)
