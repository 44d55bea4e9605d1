"""Serve the page of runs that go on, to this machine alone.

    /            the page
    /data.json   its data; with If-None-Match, 304 while nothing is new

There is nothing else: no path leads to a file. A request that does not name this server
by a loopback address is refused, since it comes from a page of another site whose name
was pointed here (DNS rebinding).
"""

import dataclasses
import errno
import functools
import gzip
import hashlib
import http.server
import json
import re
import socketserver
import sys
import threading
import time
from collections.abc import Callable
from http import HTTPStatus

from tools.run_page.read import RunReader, page_data
from train.messages import one_line

ADDRESS = "127.0.0.1"
NAMES = ("127.0.0.1", "localhost", "[::1]")
POLL_SEC = 0.5
GZIP_LEVEL = 1
IDLE_SEC = 30
"""Seconds after which a connection without a request is closed."""
HEADERS = {
    "Cache-Control": "no-cache",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Vary": "Accept-Encoding",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


@dataclasses.dataclass(frozen=True)
class Content:
    """What a path answers with."""

    kind: str
    body: bytes
    policy: str = "default-src 'none'"

    @functools.cached_property
    def gzipped(self) -> bytes:
        """The body, compressed."""
        return gzip.compress(self.body, GZIP_LEVEL, mtime=0)


@dataclasses.dataclass(frozen=True)
class Page:
    """How data becomes a page, and what a browser lets the page do."""

    render: Callable[[dict], str]
    policy: str
    """Its Content-Security-Policy."""


class Snapshot:
    """The page and its data at a moment."""

    def __init__(self, data: dict, page: Page) -> None:
        self._data, self._how = data, page
        self._lock = threading.Lock()
        known = {name: value for name, value in data.items() if name != "made_at"}
        self.etag = f'W/"{hashlib.sha256(as_json(known)).hexdigest()[:32]}"'
        """Tag of the data. It is weak, because a body may be compressed."""

    def content(self, path: str) -> Content | None:
        """Return what is at a path; None where there is nothing."""
        if path not in ("/", "/data.json"):
            return None
        with self._lock:
            return self._page if path == "/" else self._json

    @functools.cached_property
    def _page(self) -> Content:
        policy = f"{self._how.policy}; frame-ancestors 'none'"
        body = self._how.render(self._data).encode()
        return Content("text/html; charset=utf-8", body, policy)

    @functools.cached_property
    def _json(self) -> Content:
        return Content("application/json", as_json(self._data))


class Follower(threading.Thread):
    """A thread that reads what the runs write, and keeps the latest snapshot."""

    def __init__(self, readers: list[RunReader], page: Page) -> None:
        super().__init__(name="follows runs", daemon=True)
        self._readers, self._how = readers, page
        self.latest = self._snapshot()
        self.error: BaseException | None = None
        """Why the thread has ended; None while it has not."""

    def run(self) -> None:
        """Read until the program ends. Reading takes at most half of the time."""
        try:
            while True:
                begin_sec = time.monotonic()
                have_news = [reader.poll() for reader in self._readers]
                if any(have_news):
                    self.latest = self._snapshot()
                time.sleep(max(POLL_SEC, time.monotonic() - begin_sec))
        except BaseException as error:
            self.error = error

    def _snapshot(self) -> Snapshot:
        return Snapshot(page_data(self._readers, is_live=True), self._how)


class Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """An HTTP server on the loopback address, a thread for each connection."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, port: int) -> None:
        """Begin to listen; port 0 is any that is free. Raises ValueError where another
        program listens on the port."""
        self.follower: Follower | None = None
        try:
            super().__init__((ADDRESS, port), Handler)
        except (OSError, OverflowError) as error:
            raise ValueError(f"--port={port}: {_why_no_port(error)}") from error

    @property
    def port(self) -> int:
        """The port that the server listens on."""
        return self.server_address[1]

    def service_actions(self) -> None:
        """Raise the error that has ended the follower, if there is one. The server
        calls this twice a second."""
        if self.follower is not None and self.follower.error is not None:
            raise self.follower.error

    def handle_error(self, request, client_address) -> None:
        """Print an error of a request in one line, unless the other side has left."""
        error = sys.exception()
        if not isinstance(error, ConnectionError | TimeoutError):
            print(f"a request failed: {one_line(repr(error))}", file=sys.stderr)


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers to the requests of one connection."""

    protocol_version = "HTTP/1.1"
    timeout = IDLE_SEC
    server: Server

    def do_GET(self) -> None:
        """Answer with the content of the path."""
        if not self._is_for_us():
            return self._refuse(HTTPStatus.FORBIDDEN)
        latest = self.server.follower.latest
        content = latest.content(self.requestline.split()[1].partition("?")[0])
        if content is None:
            return self._refuse(HTTPStatus.NOT_FOUND)
        if "Content-Length" in self.headers or "Transfer-Encoding" in self.headers:
            self.close_connection = True  # its body would be taken for a request
        if self._has(latest.etag):
            return self._answer(HTTPStatus.NOT_MODIFIED, {"ETag": latest.etag})
        headers = {
            "ETag": latest.etag,
            "Content-Type": content.kind,
            "Content-Security-Policy": content.policy,
        }
        body = content.body
        if self._takes_gzip():
            body, headers["Content-Encoding"] = content.gzipped, "gzip"
        return self._answer(HTTPStatus.OK, headers, body)

    do_HEAD = do_GET  # noqa: N815

    def send_error(self, code: int, message=None, explain=None) -> None:
        """Refuse a request that http.server does not understand, without its text."""
        status = HTTPStatus(code)
        if status == HTTPStatus.NOT_IMPLEMENTED:
            status = HTTPStatus.METHOD_NOT_ALLOWED
        self._refuse(status)

    def version_string(self) -> str:
        """Return the name of the server, without versions."""
        return "moejax"

    def log_message(self, format: str, *args) -> None:
        """Print nothing: a page asks each second."""

    def _is_for_us(self) -> bool:
        """Return whether the request has one Host header, and that names this server
        by a loopback address."""
        hosts = self.headers.get_all("Host", [])
        names = {f"{name}:{self.server.port}" for name in NAMES}
        return len(hosts) == 1 and hosts[0].strip().lower() in names

    def _has(self, etag: str) -> bool:
        """Return whether the browser has the content with this tag already."""
        tags = [tag.strip() for tag in self.headers.get("If-None-Match", "").split(",")]
        return etag in tags or etag.removeprefix("W/") in tags

    def _takes_gzip(self) -> bool:
        text = self.headers.get("Accept-Encoding", "").lower().replace(" ", "")
        match = re.search(r"(?:^|,)gzip(?:;q=([\d.]+))?(?:,|$)", text)
        return match is not None and match[1] not in ("0", "0.", "0.0", "0.00", "0.000")

    def _refuse(self, status: HTTPStatus) -> None:
        """Answer with a status and its name, and close the connection."""
        self.close_connection = True
        headers = {
            "Content-Type": "text/plain; charset=utf-8",
            "Content-Security-Policy": "default-src 'none'",
            "Connection": "close",
        }
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            headers["Allow"] = "GET, HEAD"
        self._answer(status, headers, f"{status.phrase}\n".encode())

    def _answer(
        self, status: HTTPStatus, headers: dict[str, str], body: bytes | None = None
    ) -> None:
        """Send an answer; after HEAD, and where there is no body, its headers alone."""
        self.send_response(status)
        for name, value in (HEADERS | headers).items():
            self.send_header(name, value)
        if body is not None:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if body is not None and self.command != "HEAD":
            self.wfile.write(body)


def _why_no_port(error: OSError | OverflowError) -> str:
    """Return why a port cannot be listened on, and what to do."""
    if isinstance(error, OverflowError):
        return "a port is a number from 0 to 65535: give another port"
    if error.errno == errno.EADDRINUSE:
        why = "end the program that listens there, or give another port"
        return f"{error.strerror}: {why}"
    return f"{error.strerror}: give another port"


def serve(server: Server, follower: Follower) -> None:
    """Answer requests until an interrupt (SIGINT)."""
    server.follower = follower
    follower.start()
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print("\nno longer served", flush=True)
    finally:
        server.server_close()


def as_json(data: dict) -> bytes:
    """Return an object as compact JSON."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    return text.encode()
