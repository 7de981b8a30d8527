"""A local server that sends one file like servers on the internet do, with failures on demand."""

import contextlib
import http.server
import re
import threading
from collections.abc import Mapping


class FileServer:
    """A server's answers, and the requests it received.

    Attributes:
      content: the file's bytes; etag: its version, or None if the server has none.
      has_ranges: whether the server sends parts of the file; has_length: whether it sends the length.
      claimed_size: the size that the server claims instead of the true one.
      breaks: number of bytes after which each of the next responses breaks off; later responses are
        complete.
      stalls: number of bytes after which each of the next responses waits for `stalled` to be set.
      statuses: statuses of the next responses, instead of the file.
      requests: (path, Range) of every request, in order.
    """

    def __init__(self, content: bytes) -> None:
        self.content, self.etag = content, '"1"'
        self.has_ranges = self.has_length = True
        self.claimed_size: str | None = None
        self.breaks: list[int] = []
        self.stalls: list[int] = []
        self.stalled = threading.Event()
        self.statuses: list[int] = []
        self.requests: list[tuple[str, str | None]] = []
        self.address = ""

    @property
    def ranges(self) -> list[str | None]:
        """The Range header of every request."""
        return [header for _, header in self.requests]

    def respond(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        """Answers a GET."""
        requested = handler.headers.get("Range")
        self.requests.append((handler.path, requested))
        if self.statuses:
            handler.send_error(self.statuses.pop(0))
            return
        start = 0
        if requested and self.has_ranges and handler.headers.get("If-Range") in (None, self.etag):
            start = int(re.fullmatch(r"bytes=(\d+)-", requested).group(1))
            if start >= len(self.content):
                handler.send_response(416)
                handler.send_header("Content-Range", f"bytes */{len(self.content)}")
                handler.end_headers()
                return
            handler.send_response(206)
            handler.send_header(
                "Content-Range",
                f"bytes {start}-{len(self.content) - 1}/{self.claimed_size or len(self.content)}",
            )
        else:
            handler.send_response(200)
        if self.has_length:
            length = str(len(self.content) - start)
            handler.send_header("Content-Length", length if start else self.claimed_size or length)
        if self.etag is not None:
            handler.send_header("ETag", self.etag)
        handler.end_headers()
        stop = start + self.breaks.pop(0) if self.breaks else len(self.content)
        if self.stalls:
            handler.wfile.write(self.content[start : start + self.stalls.pop(0)])
            self.stalled.wait(60)
            return
        handler.wfile.write(self.content[start:stop])


@contextlib.contextmanager
def serving(content: bytes):
    """Yields a `FileServer` that runs until the context ends."""
    server = FileServer(content)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            server.respond(self)

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listener:
        server.address = f"http://127.0.0.1:{listener.server_address[1]}"
        threading.Thread(target=listener.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        listener.shutdown()


class HubHandler(http.server.BaseHTTPRequestHandler):
    """Base of a local hub's responses; each test's hub decides what to answer."""

    def answer(self, status: int, content: bytes, headers: Mapping[str, str], body: bool) -> None:
        """Sends a response, JSON unless the headers say otherwise; the content only if `body` is
        true (not for HEAD)."""
        self.send_response(status)
        for key, value in {
            "Content-Type": "application/json",
            "Content-Length": str(len(content)),
            **headers,
        }.items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *_):
        pass
