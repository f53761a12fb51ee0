"""A server of Google Cloud Storage's XML interface, in memory, as its reference (cloud.google.com/storage/docs/xml-api) has it.

Google gives out no server to test against, and the emulators that others make (fake-gcs-server, gcp-storage-emulator) have the JSON
interface alone, while the client speaks the XML one. So this says what a client that keeps to the reference gets, not what Google's own
servers do. What the reference does not have is refused (400), and so is a token that the service account's key did not sign (401).
"""

import base64
import contextlib
import hashlib
import json
import re
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

EMAIL = "tests@project.iam.gserviceaccount.com"
SMALLEST_PART = 5 << 20
_HEADERS = {"x-goog-if-generation-match", "x-goog-copy-source"}
_LISTING = {"list-type", "prefix", "delimiter", "continuation-token", "max-keys", "start-after"}


@dataclass
class Held:
    """An object: its bytes, its generation, when it was written."""

    data: bytes
    generation: int
    date: float

    @property
    def etag(self) -> str:
        return f'"{hashlib.md5(self.data, usedforsecurity=False).hexdigest()}"'


@dataclass
class Google:
    """What the server holds, and how it behaves.

    Attributes:
        bucket: the one bucket.
        page: entries of a listing in one answer.
        ahead: seconds by which its clock is ahead of this machine's.
        asked: method, path and headers of each request.
    """

    bucket: str
    page: int = 1000
    ahead: float = 0.0
    objects: dict[str, Held] = field(default_factory=dict)
    uploads: dict[str, tuple[str, dict[int, bytes]]] = field(default_factory=dict)
    asked: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    key: rsa.RSAPrivateKey = field(default_factory=lambda: rsa.generate_private_key(65537, 2048))
    port: int = 0

    def now(self) -> float:
        return time.time() + self.ahead

    def account(self, folder: Path, key: rsa.RSAPrivateKey | None = None) -> Path:
        """The file of a service account, with this server's key or another."""
        pem = (key or self.key).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
        path = folder / "account.json"
        path.write_text(json.dumps({"type": "service_account", "client_email": EMAIL, "private_key": pem, "private_key_id": "1"}))
        return path

    def environment(self, folder: Path) -> dict[str, str]:
        """What a client is told of it."""
        return {
            "GOOGLE_BASE_URL": f"http://127.0.0.1:{self.port}",
            "GOOGLE_ALLOW_HTTP": "true",
            "GOOGLE_SERVICE_ACCOUNT": str(self.account(folder)),
        }

    def knows(self, header: str) -> bool:
        """Whether a request's token is one that the service account signed for itself, and not over."""
        found = re.fullmatch(r"Bearer ([\w-]+)\.([\w-]+)\.([\w-]+)", header)
        if found is None:
            return False
        head, claims, signature = (base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)) for part in found.groups())
        with contextlib.suppress(InvalidSignature):
            self.key.public_key().verify(signature, f"{found[1]}.{found[2]}".encode(), padding.PKCS1v15(), SHA256())
            said = json.loads(claims)
            return json.loads(head)["alg"] == "RS256" and said["iss"] == said["sub"] == EMAIL and said["exp"] > time.time()
        return False

    def put(self, key: str, data: bytes, match: str | None) -> Held | None:
        """Keep an object; None where its generation is not the one that was to be there (0: none)."""
        with self.lock:
            there = self.objects.get(key)
            if match is not None and int(match) != (0 if there is None else there.generation):
                return None
            generation = time.time_ns() if there is None else max(time.time_ns(), there.generation + 1)
            self.objects[key] = Held(data, generation, self.now())
            return self.objects[key]


@contextlib.contextmanager
def gcs_server(bucket: str, **how: Any) -> Iterator[Google]:
    """Context manager: a server with one empty bucket."""
    google = Google(bucket, **how)

    class Handler(_Handler):
        holds = google

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    google.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield google
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    holds: Google
    body = b""

    def log_message(self, *_: Any) -> None:
        pass

    def date_time_string(self, timestamp: float | None = None) -> str:
        return super().date_time_string(self.holds.now() if timestamp is None else timestamp)

    def answer(self, status: int, body: bytes = b"", length: int | None = None, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)

    def xml(self, status: int, root: str, inner: str) -> None:
        namespace = "" if root == "Error" else " xmlns='http://s3.amazonaws.com/doc/2006-03-01/'"
        body = f"<?xml version='1.0' encoding='UTF-8'?><{root}{namespace}>{inner}</{root}>".encode()
        self.answer(status, b"" if self.command == "HEAD" else body, len(body), Content_Type="application/xml; charset=UTF-8")

    def error(self, status: int, code: str, message: str = "") -> None:
        self.xml(status, "Error", f"<Code>{code}</Code><Message>{escape(message)}</Message>")

    def serve(self) -> None:
        parts = urlsplit(self.path)
        bucket, _, key = parts.path.removeprefix("/").partition("/")
        query, headers = dict(parse_qsl(parts.query, keep_blank_values=True)), {k.lower(): v for k, v in self.headers.items()}
        self.body = self.rfile.read(int(headers.get("content-length", 0)))
        self.holds.asked.append((self.command, self.path, headers))
        strange = {name for name in headers if name.startswith("x-goog-")} - _HEADERS
        if "transfer-encoding" in headers or strange:
            return self.error(400, "InvalidArgument", f"{sorted(strange) or 'a body without a length'}")
        if not self.holds.knows(headers.get("authorization", "")):
            return self.error(401, "AuthenticationRequired", "Authentication required.")
        if unquote(bucket) != self.holds.bucket:
            return self.error(404, "NoSuchBucket", "The specified bucket does not exist.")
        way = {
            ("GET", False, False): self.list,
            ("GET", True, False): self.get,
            ("HEAD", True, False): self.get,
            ("PUT", True, False): self.put,
            ("DELETE", True, False): self.delete,
            **{(method, True, True): self.parts for method in ("POST", "PUT", "DELETE")},
        }.get((self.command, bool(key), bool({"uploads", "uploadId"} & set(query))))
        if way is None or (way in (self.get, self.put, self.delete) and query):
            return self.error(400, "InvalidArgument", self.path)
        way(unquote(key), query, headers)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = serve

    def list(self, _: str, query: dict[str, str], headers: dict[str, str]) -> None:
        if query.get("list-type") != "2" or set(query) - _LISTING:
            return self.error(400, "InvalidArgument", self.path)
        after = base64.urlsafe_b64decode(query.get("continuation-token", "")).decode() or query.get("start-after", "")
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        with self.holds.lock:
            held = dict(self.holds.objects)
        entries: dict[str, Held | None] = {}
        for key in sorted(held):
            if key.startswith(prefix):
                end = key.find(delimiter, len(prefix)) if delimiter else -1
                entries[key if end < 0 else key[: end + len(delimiter)]] = held[key] if end < 0 else None
        wanted, most = [key for key in entries if key > after], min(int(query.get("max-keys", 1000)), self.holds.page)
        shown, inner = wanted[:most], ""
        for key in shown:
            one = entries[key]
            if one is None:
                inner += f"<CommonPrefixes><Prefix>{escape(key)}</Prefix></CommonPrefixes>"
                continue
            date = datetime.fromtimestamp(one.date, UTC).strftime("%Y-%m-%dT%H:%M:%S.") + f"{int(one.date * 1000) % 1000:03d}Z"
            inner += f"<Contents><Key>{escape(key)}</Key><Generation>{one.generation}</Generation><MetaGeneration>1</MetaGeneration>"
            inner += f"<LastModified>{date}</LastModified><ETag>{escape(one.etag)}</ETag><Size>{len(one.data)}</Size></Contents>"
        more = len(wanted) > most
        token = base64.urlsafe_b64encode(shown[-1].encode()).decode() if more else ""
        inner += f"<NextContinuationToken>{token}</NextContinuationToken>" if more else ""
        head = f"<Name>{self.holds.bucket}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(shown)}</KeyCount>"
        self.xml(200, "ListBucketResult", f"{head}<IsTruncated>{str(more).lower()}</IsTruncated>{inner}")

    def get(self, key: str, query: dict[str, str], headers: dict[str, str]) -> None:
        held = self.holds.objects.get(key)
        if held is None:
            return self.error(404, "NoSuchKey", "The specified key does not exist.")
        said = {"ETag": held.etag, "Last_Modified": self.date_time_string(held.date), "x_goog_generation": str(held.generation)}
        size, asked = len(held.data), re.fullmatch(r"bytes=(\d+)-(\d*)", headers.get("range", ""))
        if asked is None:
            return self.answer(200, b"" if self.command == "HEAD" else held.data, size, **said)
        first, last = int(asked[1]), min(int(asked[2] or size), size - 1)
        if first >= size:
            return self.error(416, "InvalidRange", "The requested range cannot be satisfied.")
        self.answer(206, held.data[first : last + 1], Content_Range=f"bytes {first}-{last}/{size}", **said)

    def put(self, key: str, query: dict[str, str], headers: dict[str, str]) -> None:
        source, match = headers.get("x-goog-copy-source"), headers.get("x-goog-if-generation-match")
        data = self.body
        if source is not None:
            bucket, _, name = unquote(source).removeprefix("/").partition("/")
            there = self.holds.objects.get(name) if bucket == self.holds.bucket else None
            if there is None:
                return self.error(404, "NoSuchKey", "The specified key does not exist.")
            data = there.data
        made = self.holds.put(key, data, match)
        if made is None:
            return self.error(412, "PreconditionFailed", "At least one of the pre-conditions you specified did not hold.")
        if source is not None:
            date = datetime.fromtimestamp(made.date, UTC).isoformat()
            return self.xml(200, "CopyObjectResult", f"<ETag>{escape(made.etag)}</ETag><LastModified>{date}</LastModified>")
        self.answer(200, ETag=made.etag, x_goog_generation=str(made.generation), x_goog_metageneration="1")

    def delete(self, key: str, query: dict[str, str], headers: dict[str, str]) -> None:
        with self.holds.lock:
            gone = self.holds.objects.pop(key, None)
        if gone is None:
            return self.error(404, "NoSuchKey", "The specified key does not exist.")
        self.answer(204)

    def parts(self, key: str, query: dict[str, str], headers: dict[str, str]) -> None:
        """An upload in parts: begun, a part, ended, given up."""
        if self.command == "POST" and "uploads" in query:
            upload = secrets.token_hex(16)
            self.holds.uploads[upload] = (key, {})
            return self.xml(200, "InitiateMultipartUploadResult", f"<Bucket>{self.holds.bucket}</Bucket><UploadId>{upload}</UploadId>")
        target, held = self.holds.uploads.get(query.get("uploadId", ""), ("", {}))
        if target != key or not key:
            return self.error(404, "NoSuchUpload", "The requested upload was not found.")
        if self.command == "DELETE":
            del self.holds.uploads[query["uploadId"]]
            return self.answer(204)
        if self.command == "PUT":
            held[int(query["partNumber"])] = self.body
            return self.answer(200, ETag=Held(self.body, 0, 0.0).etag)
        named = [(int(part.findtext("{*}PartNumber", "0")), part.findtext("{*}ETag")) for part in ElementTree.fromstring(self.body)]
        numbers = [number for number, _ in named]
        if numbers != sorted(set(numbers)) or any(n not in held or Held(held[n], 0, 0.0).etag != etag for n, etag in named):
            return self.error(400, "InvalidPart", "A part was not found, or its ETag is another.")
        if any(len(held[number]) < SMALLEST_PART for number in numbers[:-1]):
            return self.error(400, "EntityTooSmall", "A part but the last is less than 5 MiB.")
        made = self.holds.put(key, b"".join(held[number] for number in numbers), headers.get("x-goog-if-generation-match"))
        assert made is not None
        del self.holds.uploads[query["uploadId"]]
        self.xml(200, "CompleteMultipartUploadResult", f"<Key>{escape(key)}</Key><ETag>{escape(made.etag)}</ETag>")
