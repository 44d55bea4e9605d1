"""Test the server of the page: what it answers, to whom, and while a run goes on."""

import contextlib
import gzip
import http.client
import json
import random
import socket
import threading
import time

import pytest

from tests.support.run_folders import make_folder
from tools.run_page.read import RunReader
from tools.run_page.read_metrics import Limits
from tools.run_page.serve import Follower, Page, Server

SECRET = "not for the network"
LIMIT_SEC = 60
"""Longest wait for an answer, or for data, on a busy machine."""
PAGE = Page(
    lambda data: f"<html>{data['runs'][0]['step']}</html>", "default-src 'none'"
)


@contextlib.contextmanager
def served(folder, port: int = 0, make_reader=RunReader):
    """Serve the page of a run in a thread, as tools/report.py does."""
    reader = make_reader(folder, Limits())
    reader.read()
    with Server(port) as server:
        server.follower = Follower([reader], PAGE)
        server.follower.start()
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a run, with a file that is no part of the page."""
    folder = make_folder(tmp_path_factory.mktemp("served") / "run")
    (folder / "secret.txt").write_text(SECRET)
    return folder


@pytest.fixture(scope="module")
def server(folder):
    with served(folder) as server:
        yield server


def get(server, path: str = "/data.json", method: str = "GET", **headers):
    """Return status, headers and body of the answer to a request."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=LIMIT_SEC)
    with contextlib.closing(connection):
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, headers=names)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()


def test_the_page_and_its_data_are_all_there_is(server):
    status, headers, body = get(server, "/")
    assert (status, body) == (200, b"<html>40</html>")
    policy = headers["Content-Security-Policy"]
    assert policy == "default-src 'none'; frame-ancestors 'none'"
    status, headers, body = get(server)
    data = json.loads(body)
    assert (status, headers["Content-Type"]) == (200, "application/json")
    assert data["live"] is True
    assert data["runs"][0]["step"] == 40
    assert get(server, "/data.json?after=x")[0] == 200
    assert headers["Cache-Control"] == "no-cache"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"


@pytest.mark.parametrize(
    "path",
    [
        "/secret.txt", "/metrics.jsonl", "/../secret.txt", "/%2e%2e/secret.txt", "//",
        "/.", "/data.json/", "/data.json%00", "/DATA.JSON", "//data.json", "/?/../x/",
        "http://127.0.0.1/data.json", "/etc/passwd", "/config.gin", "*", "/;",
    ],
)  # fmt: skip
def test_other_paths_lead_nowhere(server, path):
    status, _, body = get(server, path, Host=f"localhost:{server.port}")
    if path.startswith("/?"):
        assert status == 200
    else:
        assert (status, body) == (404, b"Not Found\n")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "LOCALHOST"])
def test_loopback_names_are_right(server, host):
    assert get(server, Host=f"{host}:{server.port}")[0] == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example", "evil.example:{port}", "127.0.0.1", "localhost", "localhost:1",
        "localhost.evil.example:{port}", "127.0.0.1.evil.example:{port}", "",
        "evil.example@127.0.0.1:{port}", "127.0.0.2:{port}", "0.0.0.0:{port}",
        "localhost:{port}, evil.example", "[::2]:{port}", "localhost:{port}/",
    ],
)  # fmt: skip
def test_other_hosts_are_refused(server, host):
    for path in ("/", "/data.json", "/secret.txt"):
        status, _, body = get(server, path, Host=host.format(port=server.port))
        assert (status, body) == (403, b"Forbidden\n")


@pytest.mark.parametrize("number", [0, 2])
def test_a_request_names_its_host_once(server, number):
    host = f"Host: 127.0.0.1:{server.port}\r\n" * number
    answer = ask(server, f"GET /data.json HTTP/1.1\r\n{host}\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 403 ")


@pytest.mark.parametrize(
    "method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "X"]
)
def test_other_methods_are_refused(server, method):
    status, headers, body = get(server, method=method)
    assert (status, headers["Allow"]) == (405, "GET, HEAD")
    assert body == b"Method Not Allowed\n"


def test_head_has_the_headers_alone(server):
    for path in ("/", "/data.json"):
        status, headers, body = get(server, path, method="HEAD")
        assert (status, body) == (200, b"")
        assert int(headers["Content-Length"]) == len(get(server, path)[2])


def test_what_a_browser_has_is_not_sent_again(server):
    status, headers, body = get(server, Accept_Encoding="gzip, br")
    assert headers["Content-Encoding"] == "gzip"
    assert gzip.decompress(body) == get(server)[2]
    tag = headers["ETag"]
    for text in (tag, tag.removeprefix("W/"), f'"x", {tag}'):
        status, again, body = get(server, If_None_Match=text)
        assert (status, again["ETag"], body) == (304, tag, b"")
    assert get(server, If_None_Match='"x"')[0] == 200
    assert "Content-Encoding" not in get(server, Accept_Encoding="gzip;q=0")[1]


def test_a_connection_serves_many_requests(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=LIMIT_SEC)
    with contextlib.closing(connection):
        for path in ("/", "/data.json", "/"):
            connection.request("GET", path)
            assert connection.getresponse().read()
            assert connection.sock is not None


def test_a_body_is_not_taken_for_a_request(server):
    inner = f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n\r\n"
    head = f"Host: 127.0.0.1:{server.port}\r\nContent-Length: {len(inner)}\r\n\r\n"
    answer = ask(server, f"GET /data.json HTTP/1.1\r\n{head}{inner}".encode())
    assert answer.count(b"HTTP/1.1 ") == 1


def test_random_requests_get_no_more_than_the_page(server, capsys):
    """Random bytes, and requests with random changes."""
    rng = random.Random(0)
    words = [b"GET", b"HEAD", b" ", b"/", b"/data.json", b"/secret.txt", b"..", b"%2e",
             b"HTTP/1.1", b"HTTP/9", b"\r\n", b"\n", b"Host: ", b"127.0.0.1",
             f"Host: 127.0.0.1:{server.port}".encode(), b":", b"\0", b"\xff" * 9,
             b"Transfer-Encoding: chunked", b"Content-Length: -1", b"A: " * 200,
             b"x" * 70_000]  # fmt: skip
    good = f"GET /data.json HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n\r\n".encode()
    statuses = set()
    for number in range(300):
        if number % 3 == 0:
            request = rng.randbytes(rng.randrange(200)) + b"\r\n\r\n"
        elif number % 3 == 1:
            request = b"".join(rng.choices(words, k=rng.randrange(1, 12))) + b"\r\n\r\n"
        else:
            at = rng.randrange(len(good))
            request = good[:at] + rng.randbytes(1) + good[at + 1 :]
        answer = ask(server, request)
        assert SECRET.encode() not in answer
        assert b"Traceback" not in answer
        statuses.add(answer[9:12] if answer.startswith(b"HTTP/1.1 ") else b"")
    # What is not HTTP is answered without a head, as HTTP/0.9 would be.
    assert {b"", b"200", b"403", b"404", b"405"} <= statuses
    assert get(server)[0] == 200
    assert capsys.readouterr().err == ""


def ask(server, request: bytes) -> bytes:
    """Send bytes, close that side, and return all that comes back."""
    with (
        socket.create_connection(("127.0.0.1", server.port), LIMIT_SEC) as connection,
        contextlib.suppress(OSError),
    ):
        connection.sendall(request)
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(2**16), b""))
    return b""


def test_it_listens_on_loopback_alone(server):
    assert server.socket.getsockname()[0] == "127.0.0.1"


def test_a_run_that_goes_on_is_followed(tmp_path):
    """Over a restart on the same port. The machine may be busy, so the fastest of three
    steps must come within two seconds."""
    folder = make_folder(tmp_path / "run")
    secs = []
    with served(folder) as server:
        port = server.port
        for step in (41, 42):
            tag = get(server)[1]["ETag"]
            add_step(folder, step)
            secs.append(seconds_until(server, step, tag))
    with served(folder, port) as server:
        tag = get(server)[1]["ETag"]
        assert get(server, If_None_Match=tag)[0] == 304
        add_step(folder, 43)
        secs.append(seconds_until(server, 43, tag))
    assert min(secs) < 2, secs


def test_an_answer_does_not_wait_for_the_follower(folder):
    """The follower is in the middle of a read when the answer comes."""
    is_reading, may_end = threading.Event(), threading.Event()

    class Slow(RunReader):
        def poll(self) -> bool:
            is_reading.set()
            may_end.wait()
            return super().poll()

    with served(folder, make_reader=Slow) as server:
        assert is_reading.wait(LIMIT_SEC)
        assert get(server)[0] == 200
        may_end.set()


def add_step(folder, step: int) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "loss": 1.0}) + "\n")


def seconds_until(server, step: int, tag: str) -> float:
    """Ask as the page does until the data has got to a step; return the seconds."""
    begin_sec = time.monotonic()
    while True:
        status, _, body = get(server, If_None_Match=tag)
        now_sec = time.monotonic()
        if status == 200 and json.loads(body)["runs"][0]["step"] == step:
            return now_sec - begin_sec
        assert now_sec - begin_sec < LIMIT_SEC
        time.sleep(0.05)


def test_an_error_of_the_follower_ends_the_server(folder):
    class Broken(RunReader):
        def poll(self) -> bool:
            raise RuntimeError("a bug")

    with Server(0) as server:
        server.follower = Follower([Broken(folder, Limits())], PAGE)
        server.follower.start()
        with pytest.raises(RuntimeError, match="a bug"):
            server.serve_forever(0.01)


def test_a_port_in_use_is_refused(server):
    with pytest.raises(ValueError, match=f"--port={server.port}: Address already in"):
        Server(server.port)
    with pytest.raises(ValueError, match=r"--port=70000: .*give another port"):
        Server(70000)
