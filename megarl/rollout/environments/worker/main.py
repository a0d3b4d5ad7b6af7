"""Runs episodes of one verifiers environment on request: JSON lines on stdin and stdout.

The first line is {"env": {...}, "harness": id, "concurrent": n}, answered by {"id": 0, "ready":
id}. Then, answered in the order of completion, with {"id": ..., "error": ...} for what failed:

    {"id": 1, "op": "tasks", "count": 8}                        -> {"id": 1, "tasks": [{...}, ...]}
    {"id": 2, "op": "run", "task": {...}, "model": m, "client": {...}, "sampling": {...}, "key": k}
                                                                -> {"id": 2, "episode": {...}}
    {"id": 3, "op": "cancel", "target": 2}                      -> {"id": 3, "cancelled": true}

When its stdin closes, as it does when the trainer ends in whatever way, the process ends.
"""

import asyncio
import json
import os
import signal
import sys
import threading
import time

GRACE = 15.0  # seconds to put an environment away once stdin has closed
KEY_VARIABLE = "MEGARL_GATEWAY_API_KEY"


class Worker:
    """Answers requests with one environment."""

    def __init__(self, out, settings):
        from episodes import Environment  # not before fd 1 is moved: imports may print

        self._out, self._running = out, {}
        self.env = Environment(settings)

    def say(self, message):
        """Writes one line of the protocol."""
        self._out.write(json.dumps(message) + "\n")
        self._out.flush()

    def take(self, line):
        """Begins to answer a line."""
        message = json.loads(line)
        task = asyncio.get_running_loop().create_task(self._handle(message))
        self._running[message["id"]] = task
        task.add_done_callback(lambda _: self._running.pop(message["id"], None))

    async def _handle(self, message):
        try:
            answer = await self._answer(message)
        except asyncio.CancelledError:
            answer = {"error": "cancelled"}
        except Exception as e:
            answer = {"error": f"{type(e).__name__}: {e}"}
        self.say({"id": message["id"]} | answer)

    async def _answer(self, message):
        op = message["op"]
        if op == "tasks":
            return {"tasks": self.env.tasks(message["count"])}
        if op == "run":
            os.environ[KEY_VARIABLE] = message["key"]
            client = {"type": "train", "api_key_var": KEY_VARIABLE, **message["client"]}
            return {"episode": await self.env.run(message, client)}
        if op == "cancel":
            task = self._running.get(message["target"])
            return {"cancelled": bool(task and task.cancel())}
        return {"error": f"unknown op {op!r}"}

    async def close(self):
        """Cancels what runs."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def read_lines(loop, take, ended):
    """Hands lines of stdin to the loop, in a thread: that sees the end even where an environment
    blocks the loop."""
    for line in sys.stdin.buffer:
        loop.call_soon_threadsafe(take, line)
    loop.call_soon_threadsafe(ended.set)
    time.sleep(GRACE)
    if os.getpgrp() == os.getpid():  # with all that it started
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


async def main():
    """Serves until stdin closes."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an environment prints goes to stderr, never into the protocol
    worker, ended = Worker(out, json.loads(sys.stdin.buffer.readline())), asyncio.Event()
    arguments = (asyncio.get_running_loop(), worker.take, ended)
    async with worker.env.serving():
        worker.say({"id": 0, "ready": worker.env.id})
        threading.Thread(target=read_lines, args=arguments, daemon=True).start()
        await ended.wait()
        await worker.close()


if __name__ == "__main__":
    asyncio.run(main())
