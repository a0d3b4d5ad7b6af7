"""Decides who may call the server, and how.

A page in a browser on the server's machine can send requests to it, directly or under a name of its
own that resolves to this machine. Both show in headers that pages cannot choose: Origin and Host. A
caller that knows the job's token is no such page.
"""

from __future__ import annotations

import ipaddress
import secrets
import socket
from urllib.parse import urlsplit

from starlette.requests import Request

from megarl.server.errors import ServerError
from megarl.utils.env import JOB_TOKEN, is_loopback

_WILDCARDS = ("", "0.0.0.0", "::")


class Access:
    """Checks who calls. host: the address the server is bound to. token: the job's; with None every
    program may call everything, but a browser's page may not."""

    def __init__(self, host: str, token: str | None) -> None:
        self._token, self._everywhere = token, host in _WILDCARDS
        self._host, self._machine = host.strip("[]").lower(), _label(socket.gethostname().lower())

    @property
    def _local(self) -> bool:
        return is_loopback(self._host)

    def check(self, request: Request, *, control: bool) -> None:
        """Raises ServerError with 401, 403 or 415 for a call that is refused. control: the call
        changes the server, or shows its weights."""
        headers = request.headers
        known = self._knows_token(headers.get("authorization", ""))
        if not known:
            self._check_browser(headers.get("host"), headers.get("origin"))
            if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
                raise ServerError("requests of web pages are refused", status=403)
        if not control:
            return
        if self._token is not None and not known:
            raise ServerError(
                f"{request.url.path} is for this server's job alone: send its token, "
                f"`Authorization: Bearer ...` (a job takes it from the environment's {JOB_TOKEN})",
                status=401,
            )
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        if has_body and kind != "application/json":
            raise ServerError(
                f"Content-Type: {kind or '(none)'}; send the body as application/json", status=415
            )

    def _knows_token(self, authorization: str) -> bool:
        scheme, _, given = authorization.partition(" ")
        return (
            self._token is not None
            and scheme.lower() == "bearer"
            and secrets.compare_digest(given.strip().encode(), self._token.encode())
        )

    def _check_browser(self, host: str | None, origin: str | None) -> None:
        if host is not None and not self._is_own(host):
            raise ServerError(
                f"Host: {host} is not this server's; call it by its IP address, by localhost or "
                f"by its machine's name, or give it and the job one {JOB_TOKEN}",
                status=403,
            )
        if origin is not None and origin.lower().partition("://")[2] != (host or "").lower():
            raise ServerError(f"Origin: {origin}; requests of web pages are refused", status=403)

    def _is_own(self, host: str) -> bool:
        try:
            name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
        except ValueError:
            return False
        if name in ("localhost", self._host):
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:  # the machine's name; with any domain, unless the server is local
            return _label(name) == self._machine and (name == self._machine or not self._local)
        # only a page served at this address has the address for its name
        return address.is_loopback or self._everywhere


def _label(name: str) -> str:
    return name.partition(".")[0]
