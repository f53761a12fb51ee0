"""Objects in an object store: S3 and what speaks its protocol, Google Cloud Storage, Azure; through `obstore`.

    s3://BUCKET/PREFIX   gs://BUCKET/PREFIX   az://CONTAINER/PREFIX

    PREFIX/objects/<name>      the objects
    PREFIX/used/<name>         empty; its date is when the object was last used
    PREFIX/unfinished/<id>     big objects on their way

Credentials, region and endpoint come from the environment (AWS_*, GOOGLE_*, AZURE_*) or the machine's role, never from the URL.
`gs://` goes through the same client, by the XML interface, and has not met Google's own servers: it is tested against one of our own that
keeps to that interface's reference (`tests/gcs_server.py`). $GOOGLE_BASE_URL names another endpoint than Google's.

A write is one PUT that the server refuses where the name is taken (If-None-Match: *). A file of more than 64 MiB goes up in parts to
unfinished/<id> and is copied from there to its name, under the same condition. Either is the commit point; the size is compared after it.
The server must know conditional writes (S3 itself, GCS, Azure, MinIO, R2 and moto do). What a client that was killed left of an upload in
parts is seen by the server alone: give the bucket a lifecycle rule that aborts incomplete multipart uploads after a day.

One request moves at most 64 MiB where this module chooses, may take `timeout` seconds, and is repeated 3 times at most.
"""

import contextlib
import errno
import mmap
import os
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import from_url

from kvtool.store.objects import Entry, Missing, check_name, first, is_name
from kvtool.store.scratch import Scratch

SCHEMES = {"s3": "AWS", "gs": "GOOGLE", "az": "AZURE"}
TIMEOUT = 120.0
RETRIES = 3
_CONNECT = 5.0
_PREFIX = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*")
_REFUSED = re.compile(r"status code: 40[13]\b")
_SINGLE = 64 << 20
_PART = 16 << 20
# What one server-side copy takes on S3 and Azure.
_LARGEST = 5 << 30
# An object that is read often is not marked as used more often than this.
_TOUCH_EVERY = 600.0
_AT_ONCE = 16  # requests
_ABANDONED = 24 * 3600.0


class Buckets:
    """See `Objects`.

    Args:
        url: as above.
        timeout: seconds that one request may take.
    Raises:
        ValueError: not such a URL, or credentials in it.
    """

    def __init__(self, url: str, *, timeout: float = TIMEOUT) -> None:
        scheme, bucket, prefix = _parsed(url)
        self.url = f"{scheme}://{bucket}/{prefix}".rstrip("/")
        self.name_key: bytes | None = None
        self._scratch = Scratch()
        self._touched: dict[str, float] = {}
        self._ahead: float | None = None  # of this machine's monotonic clock
        allow_http = os.environ.get(f"{SCHEMES[scheme]}_ALLOW_HTTP", "").lower() in ("1", "true", "yes")
        options: dict[str, Any] = {
            "client_options": {
                "allow_http": allow_http,
                "connect_timeout": timedelta(seconds=min(_CONNECT, timeout)),
                "timeout": timedelta(seconds=timeout),
            },
            "retry_config": {"max_retries": RETRIES, "retry_timeout": timedelta(seconds=2 * timeout)},
        }
        if scheme == "s3":
            options["config"] = {"copy_if_not_exists": "multipart"}
        with _errors(self.url):
            self._store: Any = from_url(self.url, **options)

    def __repr__(self) -> str:
        return f"Buckets({self.url!r})"

    def __str__(self) -> str:
        return self.url

    @property
    def scratch(self) -> Path:
        return self._scratch.folder()

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        key = _key(name)
        asked: Any = None
        if length is not None:
            # An empty range is none to HTTP; one byte says whether the object is there.
            asked = {"range": (start, start + max(length, 1))}
        elif start:
            asked = {"range": {"offset": start}}
        try:
            with _errors(f"{self.url}: {name}"):
                got = obstore.get(self._store, key, options=asked)
                first, end = got.range
                whole = got.meta["size"]
                data = bytes(got.bytes())
        except FileNotFoundError:
            raise Missing(name) from None
        except OSError:
            # A range that begins at the end or later is an error to HTTP.
            size = None if asked is None else self._size(key)
            if size is None or start < size:
                raise
            return b""
        if length == 0:
            return b""
        wanted = whole if length is None else min(start + length, whole)
        if (first, end) != (start, wanted) or len(data) != wanted - start:
            raise OSError(errno.EIO, f"bytes {start} to {wanted} were asked for, {len(data)} from {first} on came", f"{self.url}: {name}")
        return data

    def path(self, name: str) -> Path | None:
        check_name(name)
        return None

    def write(self, name: str, source: Path | bytes) -> bool:
        key = _key(name)
        own = isinstance(source, Path) and source.parent == self.scratch
        try:
            if self._size(key) is not None:
                return False
            size = len(source) if isinstance(source, bytes) else source.stat().st_size
            if size > _LARGEST:
                raise OSError(errno.EFBIG, f"an object of {size} bytes; object stores take {_LARGEST} in one copy", f"{self.url}: {name}")
            made = self._put(key, source) if size <= _SINGLE else self._put_in_parts(key, source)
            stored = self._size(key)
            if stored is None or (made and stored != size):
                raise OSError(errno.EIO, f"{size} bytes were written, {stored} are there", f"{self.url}: {name}")
            return made
        finally:
            if own:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(str(source))

    def _put(self, key: str, source: Path | bytes) -> bool:
        with _errors(f"{self.url}: {key}"), _buffer(source) as data:
            try:
                obstore.put(self._store, key, data, mode="create", use_multipart=False)
            except AlreadyExistsError:
                return False
        return True

    def _put_in_parts(self, key: str, source: Path | bytes) -> bool:
        on_its_way = f"unfinished/{secrets.token_hex(16)}"
        with _errors(f"{self.url}: {key}"):
            try:
                obstore.put(self._store, on_its_way, source, use_multipart=True, chunk_size=_PART, max_concurrency=4)
                obstore.copy(self._store, on_its_way, key, overwrite=False)
            except AlreadyExistsError:
                return False
            finally:
                # Where this fails too, `sweep` does it a day later.
                with contextlib.suppress(FileNotFoundError, BaseError):
                    obstore.delete(self._store, on_its_way)
        return True

    def size(self, name: str) -> int | None:
        return self._size(_key(name))

    def _size(self, key: str) -> int | None:
        try:
            with _errors(f"{self.url}: {key}"):
                return int(obstore.head(self._store, key)["size"])
        except FileNotFoundError:
            return None

    def sizes(self, names: Sequence[str], lookup: bool = False) -> list[int | None]:
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return list(pool.map(self.size, names))

    def names(self, prefix: str = "") -> Iterator[Entry]:
        used = {name: date for name, _, date in self._listed("used", prefix)}
        for name, size, date in self._listed("objects", prefix):
            if is_name(name):
                yield Entry(name, size, max(date, used.get(name, 0.0)))

    def _listed(self, folder: str, prefix: str) -> Iterator[tuple[str, int, float]]:
        """(name, bytes, date) of what lies below a folder."""
        # Listings go by whole parts of a name.
        below = "/".join([folder, *prefix.split("/")[:-1]])
        with _errors(self.url):
            for batch in obstore.list(self._store, prefix=below):
                for item in batch:
                    name = item["path"][len(folder) + 1 :]
                    if name.startswith(prefix):
                        yield name, int(item["size"]), item["last_modified"].timestamp()

    def page(self, prefix: str, after: str, count: int) -> list[Entry]:
        return first(self.names(prefix), after, count)

    def remove(self, name: str) -> bool:
        key = _key(name)
        there = self._size(key) is not None
        for each in (key, f"used/{name}"):
            with _errors(f"{self.url}: {name}"), contextlib.suppress(FileNotFoundError):
                obstore.delete(self._store, each)
        self._touched.pop(name, None)
        return there

    def touch(self, *names: str) -> None:
        now = time.monotonic()
        due = [name for name in names if now - self._touched.get(check_name(name), -_TOUCH_EVERY) >= _TOUCH_EVERY]
        if due:
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                list(pool.map(self._touch, due))
            self._touched.update(dict.fromkeys(due, now))

    def _touch(self, name: str) -> None:
        if self.size(name) is not None:
            with _errors(f"{self.url}: {name}"):
                obstore.put(self._store, f"used/{name}", b"", use_multipart=False)

    def unfinished(self) -> int:
        return sum(size for _, size, _ in self._listed("unfinished", "")) + self._scratch.bytes()

    def now(self) -> float:
        if self._ahead is None:
            # Nothing but an object's date shows a client the server's clock; afterwards this machine counts on.
            asked, key = time.monotonic(), f"unfinished/{secrets.token_hex(16)}"
            with _errors(self.url):
                obstore.put(self._store, key, b"", use_multipart=False)
                self._ahead = obstore.head(self._store, key)["last_modified"].timestamp() - asked
                obstore.delete(self._store, key)
        return self._ahead + time.monotonic()

    def sweep(self) -> int:
        freed, found = 0, list(self._listed("unfinished", ""))
        now = self.now() if found else 0.0
        for name, size, date in found:
            if now - date > _ABANDONED:
                with _errors(self.url), contextlib.suppress(FileNotFoundError):
                    obstore.delete(self._store, f"unfinished/{name}")
                freed += size
        return freed

    def close(self) -> None:
        self._scratch.close()


def _parsed(url: str) -> tuple[str, str, str]:
    """(scheme, bucket, prefix) of a URL."""
    parts = urlsplit(url)
    prefix = parts.path.strip("/")
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        # The URL is not repeated: it may have a secret in it.
        raise ValueError(f"[store] a {parts.scheme}:// URL takes no credentials and no options; both come from the environment.")
    if parts.scheme not in SCHEMES or not parts.netloc or (prefix and not _PREFIX.fullmatch(prefix)):
        raise ValueError(
            f"[store] an object store must be s3://BUCKET/PREFIX, gs:// or az:// (A-Z a-z 0-9 . _ - in PREFIX), but got {url!r}."
        )
    return parts.scheme, parts.netloc, prefix


def _key(name: str) -> str:
    return f"objects/{check_name(name)}"


@contextlib.contextmanager
def _buffer(source: Path | bytes) -> Iterator[Any]:
    """Context manager: the bytes of a source, those of a file mapped."""
    if isinstance(source, bytes):
        yield source
        return
    with open(source, "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            yield b""
            return
        # Closed when the last view of it is gone.
        yield mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


@contextlib.contextmanager
def _errors(where: str) -> Iterator[None]:
    """Context manager: the client's errors as OSErrors; what is not there stays FileNotFoundError, what is already AlreadyExistsError."""
    try:
        yield
    except (AlreadyExistsError, FileNotFoundError):
        raise
    except (BaseError, PermissionError) as error:
        text = _short(error)
        # Of a listing that is refused the client makes an error without a kind.
        refused = isinstance(error, PermissionDeniedError | UnauthenticatedError | PermissionError) or _REFUSED.search(str(error))
        if refused:
            raise PermissionError(errno.EACCES, f"access refused ({text}); credentials come from the environment", where) from error
        slow = "timed out" in str(error) or "TimedOut" in str(error)
        raise OSError(errno.ETIMEDOUT if slow else errno.EIO, text, where) from error


def _short(error: Exception) -> str:
    """The first line of an error, without query strings: signatures stand there."""
    return re.sub(r"(?<!<)\?\S*", "", (str(error).splitlines() or [""])[0])[:300]
