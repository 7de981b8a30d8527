"""A small Google Cloud Storage on the loopback: the part of its JSON API that TensorStore, gcsfs
and Orbax use, with preconditions.

Objects are kept in memory. A write with ifGenerationMatch is refused with 412 unless the object has
that generation (0: unless it does not exist), which the emulators on PyPI lack and leases need.
"""

import datetime
import itertools
import json
import re
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PAGE = 1000  # objects per page of a listing


class Store:
    """The objects of all buckets, by bucket and name: their contents and generations."""

    def __init__(self):
        self.objects: dict[tuple[str, str], tuple[bytes, int]] = {}
        self.generations = itertools.count(1)
        self.updated = {}
        self.uploads: dict[str, tuple[str, str, dict, bytearray]] = {}
        self.lock = threading.RLock()
        self.refused = lambda method, path: None  # an HTTP status with which to answer a request
        self.conditions = True  # whether preconditions are checked

    def names(self, bucket="bucket"):
        return sorted(name for owner, name in self.objects if owner == bucket)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    store: Store

    def log_message(self, *_):
        pass

    def answer(self, status, body=b"", headers=()):
        if not isinstance(body, bytes):
            body = json.dumps(body).encode()
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def fail(self, status, message="refused"):
        self.answer(status, {"error": {"code": status, "message": message}})

    def metadata(self, bucket, name):
        content, generation = self.store.objects[bucket, name]
        updated = self.store.updated.get((bucket, name), "2026-01-01T00:00:00.000Z")
        return {
            "kind": "storage#object",
            "name": name,
            "bucket": bucket,
            "generation": str(generation),
            "metageneration": "1",
            "size": str(len(content)),
            "timeCreated": updated,
            "updated": updated,
        }

    def body(self):
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def handle_one(self):
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
        content = self.body()
        if status := self.store.refused(self.command, url.path):
            return self.fail(status)
        with self.store.lock:
            if match := re.fullmatch(r"/(?:resumable/)?upload/storage/v1/b/([^/]+)/o", url.path):
                return self.upload(match[1], query, content)
            if match := re.fullmatch(r"/(?:download/)?storage/v1/b/([^/]+)/o/([^/]+)", url.path):
                return self.one(match[1], urllib.parse.unquote(match[2]), query)
            if match := re.fullmatch(r"/storage/v1/b/([^/]+)/o", url.path):
                return self.list(match[1], query)
            if match := re.fullmatch(r"/storage/v1/b/([^/]+)", url.path):
                return self.answer(200, {"name": match[1], "kind": "storage#bucket"})
        return self.fail(404, f"no such path: {url.path}")

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = handle_one

    def met(self, bucket, name, query):
        """Whether the request's precondition holds."""
        generation = self.store.objects.get((bucket, name), (b"", 0))[1]
        return not self.store.conditions or query.get("ifGenerationMatch") in (
            None,
            str(generation),
        )

    def write(self, bucket, name, query, content):
        if not self.met(bucket, name, query):
            return self.fail(412, "conditionNotMet")
        self.store.objects[bucket, name] = content, next(self.store.generations)
        now = datetime.datetime.now(datetime.UTC)
        self.store.updated[bucket, name] = now.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        return self.answer(200, self.metadata(bucket, name))

    def upload(self, bucket, query, content):
        kind = query.get("uploadType")
        if kind == "media":
            return self.write(bucket, query["name"], query, content)
        if kind == "multipart":
            boundary = re.search(r'boundary="?([^";]+)', self.headers["Content-Type"])[1].encode()
            _, head, part = content.split(b"--" + boundary, 2)
            metadata = json.loads(re.split(rb"\r?\n\r?\n", head, maxsplit=1)[1])
            part = re.split(rb"\r?\n\r?\n", part, maxsplit=1)[1]
            part = re.sub(rb"\r?\n--" + re.escape(boundary) + rb"--\s*\Z", b"", part)
            return self.write(bucket, metadata["name"], query, part)
        if kind == "resumable" and "upload_id" not in query:
            name = query.get("name") or json.loads(content)["name"]
            key = str(next(self.store.generations))
            self.store.uploads[key] = bucket, name, query, bytearray()
            host = self.headers["Host"]
            place = (
                f"http://{host}/upload/storage/v1/b/{bucket}/o?uploadType=resumable&upload_id={key}"
            )
            return self.answer(200, b"", [("Location", place)])
        if kind == "resumable":
            bucket, name, first, collected = self.store.uploads[query["upload_id"]]
            collected += content
            total = self.headers.get("Content-Range", "bytes 0-0/*").rpartition("/")[2]
            if total != "*" and len(collected) >= int(total):
                return self.write(bucket, name, first, bytes(collected))
            return self.answer(308, b"", [("Range", f"bytes=0-{len(collected) - 1}")])
        return self.fail(400, f"uploadType {kind}")

    def one(self, bucket, name, query):
        if (bucket, name) not in self.store.objects:
            return self.fail(404, "Not Found")
        if self.command == "DELETE":
            if not self.met(bucket, name, query):
                return self.fail(412, "conditionNotMet")
            del self.store.objects[bucket, name]
            return self.answer(204)
        if query.get("alt") != "media":
            return self.answer(200, self.metadata(bucket, name))
        content, generation = self.store.objects[bucket, name]
        if query.get("ifGenerationNotMatch") == str(generation):
            return self.answer(304)
        if not self.met(bucket, name, query):
            return self.fail(412, "conditionNotMet")
        headers = [("x-goog-generation", str(generation)), ("ETag", str(generation))]
        byte_range = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if not byte_range:
            return self.answer(200, content, headers)
        if not byte_range[1]:
            start, end = max(0, len(content) - int(byte_range[2])), len(content)
        else:
            start, end = int(byte_range[1]), min(len(content), int(byte_range[2] or 1 << 60) + 1)
        if start >= len(content):
            return self.fail(416)
        headers.append(("Content-Range", f"bytes {start}-{end - 1}/{len(content)}"))
        return self.answer(206, content[start:end], headers)

    def list(self, bucket, query):
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
        names, folders = [], []
        for name in self.store.names(bucket):
            if not name.startswith(prefix) or name < query.get("startOffset", ""):
                continue
            if "endOffset" in query and name >= query["endOffset"]:
                continue
            if delimiter and delimiter in (rest := name[len(prefix) :]):
                folder = prefix + rest[: rest.index(delimiter) + 1]
                folders += [folder] if folder not in folders else []
            else:
                names.append(name)
        start = int(query.get("pageToken") or 0)
        size = min(PAGE, int(query.get("maxResults") or PAGE))
        answer = {"items": [self.metadata(bucket, name) for name in names[start : start + size]]}
        if start + size < len(names):
            answer["nextPageToken"] = str(start + size)
        if folders and not start:
            answer["prefixes"] = folders
        self.answer(200, answer)


class QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_):
        """A client that has everything it wants closes the connection."""


class Server:
    """The server, running while the context is entered."""

    handler = Handler

    def __init__(self):
        self.store = Store()
        handler = type("BoundHandler", (self.handler,), {"store": self.store})
        self.http = QuietServer(("127.0.0.1", 0), handler)
        self.address = f"http://127.0.0.1:{self.http.server_address[1]}"

    @property
    def environment(self):
        """The environment variables through which clients find it."""
        return {
            "STORAGE_EMULATOR_HOST": self.address,
            "TENSORSTORE_GCS_HTTP_URL": self.address,
            # which would look for Google's own servers
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        }

    def __enter__(self):
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.http.shutdown()
        self.http.server_close()
