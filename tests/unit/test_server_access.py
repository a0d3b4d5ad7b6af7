"""Who may call the embedded server."""

from __future__ import annotations

import socket

import pytest
from starlette.requests import Request

from megarl.server.app import Access
from megarl.server.protocol import ServerError

MACHINE = socket.gethostname().partition(".")[0]
TOKEN = "the-secret"
JSON = {"content-type": "application/json", "content-length": "2"}


def status(bound="127.0.0.1", *, token=None, control=True, **headers):
    """What a POST with these headers is answered, 200 where it may go on. `_` stands for `-`."""
    headers = {"host": "127.0.0.1:30000"} | JSON | headers
    raw = [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items() if v is not None]
    request = Request({"type": "http", "method": "POST", "path": "/x", "headers": raw})
    try:
        Access(bound, token).check(request, control=control)
    except ServerError as e:
        return e.status
    return 200


@pytest.mark.parametrize(
    ("bound", "host", "answer"),
    [
        ("127.0.0.1", "127.0.0.1:30000", 200),
        ("127.0.0.1", "localhost:8080", 200),  # forwarded
        ("127.0.0.1", "[::1]:30000", 200),
        ("127.0.0.1", None, 200),  # HTTP/1.0, no browser
        ("127.0.0.1", "evil.example:30000", 403),
        ("127.0.0.1", "10.0.0.1:30000", 403),
        ("127.0.0.1", "127.0.0.1.evil.example", 403),
        ("127.0.0.1", "[x", 403),
        ("10.0.0.1", "10.0.0.1:30000", 200),
        ("node3", "NODE3:30000", 200),
        ("0.0.0.0", "10.0.0.1:30000", 200),
        ("0.0.0.0", "evil.example", 403),
        ("0.0.0.0", f"{MACHINE}.cluster:30000", 200),
        ("127.0.0.1", f"{MACHINE}:30000", 200),
        ("127.0.0.1", f"{MACHINE}.evil.example", 403),
    ],
)
def test_the_host_must_be_the_servers(bound, host, answer):
    assert status(bound, host=host) == status(bound, host=host, control=False) == answer
    assert status(bound, host=host, token=TOKEN, authorization=f"Bearer {TOKEN}") == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:8888"},
        {"sec_fetch_site": "cross-site"},
    ],
)
def test_pages_are_refused(headers):
    assert status(**headers) == status(**headers, control=False) == 403
    assert status(origin="http://127.0.0.1:30000", sec_fetch_site="same-origin") == 200


@pytest.mark.parametrize("given", [None, "", "Bearer", "Bearer x", f"Basic {TOKEN}", "Bearer ä"])
def test_control_calls_need_the_token_where_there_is_one(given):
    assert status(token=TOKEN, authorization=given) == 401
    assert status(token=TOKEN, authorization=given, control=False) == 200
    assert status(authorization=given) == 200
    assert status(token=TOKEN, authorization=f"bearer {TOKEN}") == 200


def test_bodies_of_control_calls_are_json():
    form = {"content_type": "application/x-www-form-urlencoded"}
    plain = {"content-type": None, "content-length": None}
    assert status(**{"content-type": None}, **form) == 415
    assert status(**{"content-type": None}) == 415
    assert status(**plain, transfer_encoding="chunked") == 415
    assert status(**plain) == status(**{"content-type": "application/json; charset=utf-8"}) == 200
    assert status(**{"content-type": None}, control=False) == 200
