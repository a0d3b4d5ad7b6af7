"""Serves pages on this machine's loopback: to a browser, or to who collects metrics."""

from __future__ import annotations

from collections.abc import Callable
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from megarl.config.errors import ConfigError

Answer = Callable[[str, Message], tuple[int, str]]


class PageServer(ThreadingHTTPServer):
    """Answers GET at 127.0.0.1:<port>, 0 for a free one. Raises ConfigError if the port is taken.

    key: names the port's setting in messages. answer: returns the status and the text for a path
    and the caller's headers."""

    request_queue_size = 128  # connections that wait, as in a burst of silent callers

    def __init__(self, port: int, media_type: str, answer: Answer, *, key: str = "port") -> None:
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except (OSError, OverflowError) as e:
            why = f"{key}={port}: cannot be listened at ({e}); take another port"
            raise ConfigError(why) from e
        self.media_type, self.answer = media_type, answer


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = 10.0  # seconds that a caller may be silent

    def do_GET(self) -> None:
        """Sends what the server's `answer` returns."""
        status, text = self.server.answer(self.path.partition("?")[0], self.headers)
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", self.server.media_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Writes no line: a page is read every few seconds."""
