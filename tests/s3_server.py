"""A small S3 on the loopback for TensorStore's requests, with preconditions.

A write with If-Match is refused with 412 unless the object has that ETag, and one with
If-None-Match if the object exists. ETags are digests of contents, as in S3.
"""

import hashlib
import re
import urllib.parse
from xml.sax.saxutils import escape

from tests import gcs_server


class Handler(gcs_server.Handler):
    def handle_one(self):
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
        content = self.body()
        if status := self.store.refused(self.command, url.path):
            return self.fail(status)
        bucket, _, name = urllib.parse.unquote(url.path[1:]).partition("/")
        with self.store.lock:
            if not name:
                return self.list(bucket, query)
            return self.object((bucket, name), content)

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = handle_one

    def fail(self, status, message="refused"):
        code = {404: "NoSuchKey", 412: "PreconditionFailed", 403: "AccessDenied"}.get(status, "x")
        self.answer(
            status, f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
        )

    def object(self, key, content):
        stored = self.store.objects.get(key, (None, 0))[0]
        etag = None if stored is None else f'"{hashlib.md5(stored).hexdigest()}"'
        match, none_match = self.headers.get("If-Match"), self.headers.get("If-None-Match")
        if self.store.conditions and match not in (None, etag):
            return self.fail(412)
        if self.store.conditions and none_match is not None and none_match in ("*", etag) and etag:
            return self.fail(412) if self.command == "PUT" else self.answer(304)
        if self.command == "PUT":
            self.store.objects[key] = content, 0
            return self.answer(200, headers=[("ETag", f'"{hashlib.md5(content).hexdigest()}"')])
        if self.command == "DELETE":
            self.store.objects.pop(key, None)
            return self.answer(204)
        if stored is None:
            return self.fail(404)
        part = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if not part:
            return self.answer(200, stored, [("ETag", etag)])
        if part[1]:
            start, end = int(part[1]), min(len(stored), int(part[2] or len(stored)) + 1)
        else:
            start, end = max(0, len(stored) - int(part[2])), len(stored)
        content_range = ("Content-Range", f"bytes {start}-{end - 1}/{len(stored)}")
        return self.answer(206, stored[start:end], [("ETag", etag), content_range])

    def list(self, bucket, query):
        prefix, after = query.get("prefix", ""), query.get("continuation-token", "")
        after = max(after, query.get("start-after", ""))
        names = [name for name in self.store.names(bucket) if name.startswith(prefix)]
        names = [name for name in names if name > after]
        page = names[: gcs_server.PAGE]
        more = len(page) < len(names)
        keys = "".join(f"<Contents><Key>{escape(name)}</Key></Contents>" for name in page)
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        text = (
            f"<ListBucketResult><KeyCount>{len(page)}</KeyCount>"
            f"<IsTruncated>{'true' if more else 'false'}</IsTruncated>{token}{keys}"
            "</ListBucketResult>"
        )
        self.answer(200, text.encode())


class Server(gcs_server.Server):
    handler = Handler

    @property
    def environment(self):
        return {
            "AWS_ENDPOINT_URL": self.address,
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
        }
