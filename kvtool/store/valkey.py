"""Objects in Valkey or Redis (5 or later), one server or a cluster; through `redis`.

    redis://[USER[:PASSWORD]@]HOST[:PORT][/DB][?prefix=kvtool&cluster=1]       rediss:// over TLS; valkey:// and valkeys:// are the same

    {PREFIX/<name>}                   hash: upload, size, part, used. The object is there while this key is
    {PREFIX/<name>}:<upload>:<i>      part i of 8 MiB; expires after an hour unless the upload is committed

The braces put all keys of an object on one node of a cluster. A write sends the parts, then one script checks that all are there, takes
their expiry off and makes the hash, unless the name is taken: that is the commit point. A reader takes parts of the upload that the hash
names, so it sees one whole object or none; where a part is gone (a server that evicts), the object counts as missing and is removed, to be
written anew. How long things stay is the server's business: give it a `maxmemory-policy` and persistence to match.

The password may also come from REDISCLI_AUTH, as with redis-cli. One command may take `timeout` seconds and is repeated 3 times at most.
"""

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from redis import Redis
from redis.backoff import ExponentialBackoff
from redis.cluster import RedisCluster
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    NoPermissionError,
    OutOfMemoryError,
    RedisClusterException,
    RedisError,
    TimeoutError,
)
from redis.retry import Retry

from kvtool.store.objects import Entry, Missing, check_name, first, is_name
from kvtool.store.scratch import Scratch

SCHEMES = {"redis": "redis", "rediss": "rediss", "valkey": "redis", "valkeys": "rediss"}
TIMEOUT = 20.0
RETRIES = 3
PART = 8 << 20
_EXPIRY = 3600
_MOST_PARTS = 1 << 16
_TIME = re.compile(rb"[0-9]{1,12}(\.[0-9]{1,9})?")
_BATCH = 500
_PREFIX = re.compile(r"[A-Za-z0-9._-]+")

# KEYS: the hash, the parts. 1: committed (now, or by this very upload before), 0: the name is taken, -1: a part is gone.
_COMMIT = """
if redis.call('EXISTS', KEYS[1]) == 1 then
  if redis.call('HGET', KEYS[1], 'upload') == ARGV[1] then return 1 end
  return 0
end
for i = 2, #KEYS do if redis.call('EXISTS', KEYS[i]) == 0 then return -1 end end
for i = 2, #KEYS do redis.call('PERSIST', KEYS[i]) end
local now = redis.call('TIME')
redis.call('HSET', KEYS[1], 'upload', ARGV[1], 'size', ARGV[2], 'part', ARGV[3], 'used', now[1] .. '.' .. string.format('%06d', now[2]))
return 1
"""
# KEYS as above. Removes the object if it still is that upload; 1 if it was.
_REMOVE = """
if redis.call('HGET', KEYS[1], 'upload') ~= ARGV[1] then return 0 end
for i = 1, #KEYS do redis.call('UNLINK', KEYS[i]) end
return 1
"""
_TOUCH = """
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
local now = redis.call('TIME')
redis.call('HSET', KEYS[1], 'used', now[1] .. '.' .. string.format('%06d', now[2]))
return 1
"""
_NOW = "local now = redis.call('TIME') return now[1] .. '.' .. string.format('%06d', now[2])"


class Valkey:
    """See `Objects`.

    Args:
        url: as above.
        timeout: seconds that one command may take.
    Raises:
        ValueError: not such a URL.
        OSError: a cluster that does not answer; one server is asked at the first use.
    """

    def __init__(self, url: str, *, timeout: float = TIMEOUT) -> None:
        target, self.url, self._prefix, cluster = _parsed(url)
        self.name_key: bytes | None = None
        self._scratch = Scratch()
        options: dict[str, Any] = {"socket_timeout": timeout, "socket_connect_timeout": min(5.0, timeout)}
        password = os.environ.get("REDISCLI_AUTH")
        if password and urlsplit(target).password is None:
            options["password"] = password
        options["retry"] = Retry(ExponentialBackoff(cap=1.0, base=0.05), RETRIES)
        with _errors(self.url):
            self._client: Any = (RedisCluster if cluster else Redis).from_url(target, **options)

    def __repr__(self) -> str:
        return f"Valkey({self.url!r}, prefix={self._prefix!r})"

    def __str__(self) -> str:
        return self.url

    @property
    def scratch(self) -> Path:
        return self._scratch.folder()

    def _key(self, name: str) -> str:
        return f"{{{self._prefix}/{check_name(name)}}}"

    def _committed(self, name: str) -> tuple[bytes, int, int] | None:
        """(upload, bytes, bytes of a part) of an object."""
        found = self._client.hmget(self._key(name), ["upload", "size", "part"])
        if None in found:
            return None
        upload, size, part = found
        if not (size.isdigit() and part.isdigit() and int(part) and int(size) <= int(part) * _MOST_PARTS):
            raise OSError(errno.EIO, f"a hash that no kvtool wrote (size {size!r}, part {part!r})", f"{self.url}: {name}")
        return upload, int(size), int(part)

    def _parts(self, name: str, upload: bytes, size: int, part: int) -> list[str]:
        return [f"{self._key(name)}:{upload.decode('ascii', 'replace')}:{i}" for i in range(-(-size // part))]

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        with _errors(f"{self.url}: {name}"):
            found = self._committed(name)
            if found is None:
                raise Missing(name)
            upload, size, part = found
            end = size if length is None else min(start + length, size)
            if start >= end:
                return b""
            keys = self._parts(name, upload, size, part)
            pieces = []
            for i in range(start // part, -(-end // part)):
                first, last = max(start - i * part, 0), min(end - i * part, part)
                piece = self._client.getrange(keys[i], first, last - 1)
                if len(piece) != last - first:
                    # Evicted by the server, or removed since: as `_REMOVE` compares, nobody else's object is lost.
                    self._client.eval(_REMOVE, 1 + len(keys), self._key(name), *keys, upload)
                    raise Missing(name)
                pieces.append(piece)
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def path(self, name: str) -> Path | None:
        check_name(name)
        return None

    def write(self, name: str, source: Path | bytes) -> bool:
        own = isinstance(source, Path) and source.parent == self.scratch
        try:
            with _errors(f"{self.url}: {name}"):
                return self._committed(name) is None and self._send(name, source)
        finally:
            if own:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(str(source))

    def _send(self, name: str, source: Path | bytes) -> bool:
        upload = secrets.token_hex(16).encode()
        keys: list[str] = []
        size = 0
        try:
            for i, block in enumerate(_blocks(source)):
                keys.append(f"{self._key(name)}:{upload.decode()}:{i}")
                self._client.set(keys[-1], block, ex=_EXPIRY)
                size += len(block)
            done = self._client.eval(_COMMIT, 1 + len(keys), self._key(name), *keys, upload, size, PART)
        except BaseException:
            # The commit itself may have arrived: then the parts are the object's, and stay.
            with contextlib.suppress(RedisError):
                if self._client.hget(self._key(name), "upload") != upload:
                    self._unlink(keys)
            raise
        if done != 1:
            self._unlink(keys)
        if done == -1:
            raise OSError(errno.EIO, f"a part of {size} bytes was gone before all were sent", f"{self.url}: {name}")
        return bool(done == 1)

    def _unlink(self, keys: list[str]) -> None:
        for key in keys:
            self._client.unlink(key)

    def size(self, name: str) -> int | None:
        with _errors(f"{self.url}: {name}"):
            found = self._committed(name)
            return None if found is None else found[1]

    def sizes(self, names: Sequence[str], lookup: bool = False) -> list[int | None]:
        with _errors(self.url):
            pipe = self._client.pipeline(transaction=False)
            for name in names:
                pipe.hget(self._key(name), "size")
            return [None if size is None else int(size) for size in pipe.execute()]

    def names(self, prefix: str = "") -> Iterator[Entry]:
        with _errors(self.url):
            for batch in self._scanned(f"{{{self._prefix}/{prefix}*}}"):
                pipe = self._client.pipeline(transaction=False)
                for key in batch:
                    pipe.hmget(key, ["size", "used"])
                for key, (size, used) in zip(batch, pipe.execute(raise_on_error=False), strict=True):
                    name = key[len(self._prefix) + 2 : -1].decode("utf-8", "replace")
                    # Others may write into the same server.
                    if is_name(name) and size is not None and size.isdigit() and used is not None and _TIME.fullmatch(used):
                        yield Entry(name, int(size), float(used))

    def _scanned(self, pattern: str) -> Iterator[list[bytes]]:
        """Keys that match, each once, in batches."""
        seen: set[bytes] = set()
        batch: list[bytes] = []
        for key in self._client.scan_iter(match=pattern, count=_BATCH):
            # A scan may give a key twice.
            if key not in seen:
                seen.add(key)
                batch.append(key)
            if len(batch) == _BATCH:
                yield batch
                batch = []
        if batch:
            yield batch

    def page(self, prefix: str, after: str, count: int) -> list[Entry]:
        return first(self.names(prefix), after, count)

    def remove(self, name: str) -> bool:
        with _errors(f"{self.url}: {name}"):
            found = self._committed(name)
            if found is None:
                return False
            keys = self._parts(name, *found)
            return bool(self._client.eval(_REMOVE, 1 + len(keys), self._key(name), *keys, found[0]))

    def touch(self, *names: str) -> None:
        with _errors(self.url):
            for name in names:
                self._client.eval(_TOUCH, 1, self._key(name))

    def _loose(self) -> Iterator[tuple[bytes, int, int]]:
        """(key, bytes, seconds left or -1) of every part."""
        for batch in self._scanned(f"{{{self._prefix}/*}}:*"):
            pipe = self._client.pipeline(transaction=False)
            for key in batch:
                pipe.ttl(key)
                pipe.strlen(key)
            found = pipe.execute()
            yield from zip(batch, found[1::2], found[::2], strict=True)

    def now(self) -> float:
        with _errors(self.url):
            return float(self._client.eval(_NOW, 1, self._key("now")))

    def unfinished(self) -> int:
        with _errors(self.url):
            return sum(size for _, size, left in self._loose() if left >= 0) + self._scratch.bytes()

    def sweep(self) -> int:
        """Parts that stay although their hash is gone, as servers that evict leave; those of writers that died expire by themselves."""
        freed = 0
        with _errors(self.url):
            for key, size, left in list(self._loose()):
                owner, upload, _ = key.rsplit(b":", 2)
                # Committed before its expiry was looked at, so the hash either names it by now or never will again.
                if left == -1 and self._client.hget(owner, "upload") != upload:
                    freed += size if self._client.unlink(key) else 0
        return freed

    def close(self) -> None:
        self._client.close()
        self._scratch.close()


def _blocks(source: Path | bytes) -> Iterator[bytes]:
    if isinstance(source, bytes):
        for start in range(0, len(source), PART):
            yield source[start : start + PART]
        return
    with open(source, "rb") as file:
        while block := file.read(PART):
            yield block


def _parsed(url: str) -> tuple[str, str, str, bool]:
    """(URL for redis-py, URL without password, prefix, cluster) of a URL."""
    parts = urlsplit(url)
    shown = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query=""))
    query = dict(parse_qsl(parts.query))
    prefix, cluster = query.pop("prefix", "kvtool"), query.pop("cluster", "0")
    database = parts.path.strip("/")
    if parts.scheme not in SCHEMES or not parts.hostname or (database and not database.isdigit()):
        raise ValueError(f"[store] a Valkey or Redis server must be redis://HOST:PORT/DB (rediss://, valkey://), but got {shown!r}.")
    if not _PREFIX.fullmatch(prefix) or cluster not in ("0", "1"):
        raise ValueError(f"[store] {shown}: prefix must be of A-Z a-z 0-9 . _ - and cluster 0 or 1, but got {prefix!r} and {cluster!r}.")
    if cluster == "1" and database not in ("", "0"):
        raise ValueError(f"[store] {shown}: a cluster has database 0 alone, but got {database}.")
    return urlunsplit(parts._replace(scheme=SCHEMES[parts.scheme], query=urlencode(query))), shown, prefix, cluster == "1"


@contextlib.contextmanager
def _errors(where: str) -> Iterator[None]:
    """Context manager: the client's errors as OSErrors."""
    try:
        yield
    except (AuthenticationError, AuthorizationError, NoPermissionError) as error:
        raise PermissionError(errno.EACCES, f"access refused ({error}); give the password in the URL or in REDISCLI_AUTH", where) from error
    except TimeoutError as error:
        raise OSError(errno.ETIMEDOUT, f"no answer in time ({error})", where) from error
    except OutOfMemoryError as error:
        raise OSError(errno.ENOSPC, f"the server is full ({error})", where) from error
    except (RedisError, RedisClusterException) as error:
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}", where) from error
