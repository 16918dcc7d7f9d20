"""A tiny object store on this machine that answers as S3 does: listing, sizes, ranges, and
refusals.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.parse import parse_qs, urlsplit
from xml.sax.saxutils import escape

WHEN = "2026-11-20T10:00:00.000Z"
FORBIDDEN = "closed"  # a bucket that nobody may read


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    objects: ClassVar[dict[str, bytes]] = {}

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        bucket, _, key = parts.path.lstrip("/").partition("/")
        query = parse_qs(parts.query)
        if bucket == FORBIDDEN:
            return self._answer(403, _error("AccessDenied"))
        if not key:
            return self._answer(
                200,
                self._listing(
                    bucket, query.get("prefix", [""])[0], query.get("delimiter", [""])[0]
                ),
            )
        body = self.objects.get(f"{bucket}/{key}")
        if body is None:
            return self._answer(404, _error("NoSuchKey"))
        if spoken := self.headers.get("Range"):
            first, _, last = spoken.removeprefix("bytes=").partition("-")
            begin = int(first)
            end = min(int(last or len(body) - 1), len(body) - 1)
            return self._answer(206, body[begin : end + 1], f"bytes {begin}-{end}/{len(body)}")
        return self._answer(200, body)

    def _listing(self, bucket: str, prefix: str, delimiter: str) -> bytes:
        keys = sorted(
            name.partition("/")[2] for name in self.objects if name.startswith(f"{bucket}/")
        )
        keys = [key for key in keys if key.startswith(prefix)]
        folders = sorted(
            {
                prefix + key[len(prefix) :].split("/")[0] + "/"
                for key in keys
                if delimiter and "/" in key[len(prefix) :]
            }
        )
        flat = [key for key in keys if not (delimiter and "/" in key[len(prefix) :])]
        rows = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>{WHEN}</LastModified><ETag>&quot;1&quot;</ETag>"
            f"<Size>{len(self.objects[f'{bucket}/{key}'])}</Size><StorageClass>STANDARD</StorageClass></Contents>"
            for key in flat
        )
        rows += "".join(
            f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>"
            for folder in folders
        )
        count = len(flat) + len(folders)
        return (
            '<?xml version="1.0"?><ListBucketResult '
            f'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>{bucket}</Name>'
            f"<Prefix>{escape(prefix)}</Prefix><KeyCount>{count}</KeyCount><MaxKeys>1000</MaxKeys>"
            f"<IsTruncated>false</IsTruncated>{rows}</ListBucketResult>"
        ).encode()

    def _answer(self, status: int, body: bytes, content_range: str | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Last-Modified", "Fri, 20 Nov 2026 10:00:00 GMT")
        self.send_header("ETag", '"1"')
        if content_range:
            self.send_header("Content-Range", content_range)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def _error(code: str) -> bytes:
    return (
        f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>{code}</Message></Error>'.encode()
    )


@contextmanager
def object_store(objects: dict[str, bytes]) -> Iterator[str]:
    """Serve objects, named ``bucket/key``; yield the address."""
    handler = type("Handler", (_Handler,), {"objects": objects})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
