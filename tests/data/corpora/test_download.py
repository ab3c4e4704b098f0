"""Downloads from a server on this machine."""

import http.server
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lra.data.corpora import Enwik8, download
from lra.errors import UserError
from tests.data.corpora.conftest import MARKUP


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """Starts a server that answers every request with a body; returns the URL of a file there."""
    servers = []

    def start(body: bytes, *, status: int = 200, length: int | None = None) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.asked += 1
                self.send_response(status)
                self.send_header("Content-Length", str(len(body) if length is None else length))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments: object) -> None:
                pass

        server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        server.asked = 0
        servers.append(server)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        return f"http://127.0.0.1:{server.server_port}/dc/enwik8"

    start.servers = servers
    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_corpus_from_its_download(
    enwik8: Path, small: Callable[..., None], serve: Callable[..., str], prepared_root: Path
) -> None:
    small(Enwik8, MARKUP, urls={serve(MARKUP): None})
    said: list[tuple[str, int, int | None]] = []
    Enwik8().prepare_from(None, lambda *progress: said.append(progress))
    assert b"".join(b"".join(Enwik8().text(split)) for split in ("train", "valid", "test")) == MARKUP
    assert ("downloading enwik8", len(MARKUP), len(MARKUP)) in said
    assert [path.name for path in (prepared_root / "downloads" / "enwik8").iterdir()] == ["enwik8"]
    Enwik8().prepare_from(None)
    assert serve.servers[0].asked == 1


@pytest.mark.parametrize(
    ("body", "options", "message"),
    [
        (b"<html>no</html>", {"status": 404}, "cannot be downloaded .*Not Found.*by hand and give it with --source"),
        (b"<html>no</html>", {}, r"gave an HTML page of 15 bytes .* with MD5 \w+, but 0123 is needed"),
        (MARKUP[:100], {"length": len(MARKUP)}, f"broke off after 100 of {len(MARKUP):,} bytes"),
    ],
)
def test_what_goes_wrong(
    serve: Callable[..., str], prepared_root: Path, body: bytes, options: dict[str, int], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        download.fetch(serve(body, **options), download.home("enwik8"), "0123", lambda *progress: None)
    assert list((prepared_root / "downloads" / "enwik8").iterdir()) == []


def test_a_download_that_is_no_corpus_is_not_kept(
    enwik8: Path, small: Callable[..., None], serve: Callable[..., str], prepared_root: Path
) -> None:
    small(Enwik8, MARKUP, urls={serve(b"<html>Log in to this network</html>"): None})
    with pytest.raises(UserError, match=r"is not enwik8: .* it is an HTML page of 35 bytes"):
        Enwik8().prepare_from(None)
    assert list((prepared_root / "downloads" / "enwik8").iterdir()) == []
    given = enwik8.with_name("page")
    given.write_bytes(b"<html>Log in to this network</html>")
    with pytest.raises(UserError, match="is not enwik8"):
        Enwik8().prepare_from(given)
    assert given.is_file()


def test_no_server(prepared_root: Path) -> None:
    with pytest.raises(UserError, match=r"cannot be downloaded \(.*refused"):
        download.fetch("http://127.0.0.1:9/enwik8", download.home("enwik8"), None, lambda *progress: None)
