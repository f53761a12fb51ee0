"""Encrypted objects in any other back end: without the key nobody reads them or changes them unseen.

    header    "kvtool sealed 1\\n" | key id, 16 bytes | salt, 32 random bytes
    segments  ChaCha20-Poly1305 of 1 MiB of the object each, the last one of what is left (of nothing where the object is empty)
    key       HKDF-SHA256(key file, salt, "kvtool object" | header before the salt | name): of one object under one name
    nonce     number of the segment, 11 bytes big-endian | 1 in the last segment, else 0

This is the STREAM construction (Hoang, Reyhanitabar, Rogaway, Vizar 2015): segments that are changed, reordered, left out, cut off or taken
from another object or name are refused. Any range is read by its segments. Sizes, times and names stay visible. A name is a hash of tokens,
made with `name_key` where the store has one, so that nobody without the key can test a guess of a prompt; equal prompts have equal names
all the same. Who can write to the back end can still remove objects, or put an older object of the same name back."""

import contextlib
import errno
import os
import secrets
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from formats.errors import IncompatibleError, IntegrityError
from kvtool.store.key_files import KEY_BYTES, MAGIC
from kvtool.store.objects import Entry, Missing, Objects, check_name
from kvtool.store.scratch import Scratch

SEGMENT = 1 << 20
_TAG = 16
_ID = 16
_SALT = 32
HEADER = len(MAGIC) + _ID + _SALT
_REMEMBERED = 1024


class Sealed:
    """See `Objects`.

    Args:
        inner: where the encrypted objects go.
        key: 32 random bytes (`key_files.read_key`).
    """

    def __init__(self, inner: Objects, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"[store] a key must be {KEY_BYTES} bytes, but got {len(key)}.")
        self.inner = inner
        self._key = key
        self._id = _derived(key, None, b"kvtool key id", _ID)
        self.name_key: bytes | None = _derived(key, None, b"kvtool names", 32)
        self._scratch = Scratch()
        # Size and cipher of objects read lately, so that a range costs one read of the back end.
        self._known: OrderedDict[str, tuple[int, ChaCha20Poly1305]] = OrderedDict()
        self._knowing = threading.Lock()

    def __repr__(self) -> str:
        return f"Sealed({self.inner!r}, key {self._id.hex()[:8]})"

    def __str__(self) -> str:
        return str(self.inner)

    @property
    def scratch(self) -> Path:
        return self._scratch.folder()

    def _cipher(self, header: bytes, name: str) -> ChaCha20Poly1305:
        info = b"kvtool object" + header[:-_SALT] + name.encode()
        return ChaCha20Poly1305(_derived(self._key, header[-_SALT:], info, 32))

    def _opened(self, name: str) -> tuple[int, ChaCha20Poly1305]:
        """(bytes of the object, its cipher)."""
        with self._knowing:
            if name in self._known:
                self._known.move_to_end(name)
                return self._known[name]
        size = self.inner.size(name)
        if size is None:
            raise Missing(name)
        header = self.inner.read(name, 0, HEADER)
        if "/spaces/" in f"/{name}" and header.startswith(b'{"'):
            # Neither what is there nor what a put would add could be read by whoever goes on without the key, or with it.
            raise IncompatibleError("the store is not encrypted", path=str(self.inner), hint="unset KVTOOL_STORE_KEY, or use another store")
        if len(header) != HEADER or not header.startswith(MAGIC):
            raise IntegrityError("not an encrypted object of kvtool", path=name, hint="this store was made without a key")
        key_id = header[len(MAGIC) : -_SALT]
        if key_id != self._id:
            raise IncompatibleError(f"encrypted with key {key_id.hex()[:8]}, the key given is {self._id.hex()[:8]}", path=name)
        opened = _plain_size(size, name), self._cipher(header, name)
        with self._knowing:
            self._known[name] = opened
            while len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        return opened

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        remembered = check_name(name) in self._known
        try:
            return self._read(name, start, length)
        except IntegrityError:
            # It may have been removed and written anew since its header was read.
            self._forget(name)
            if not remembered:
                raise
        return self._read(name, start, length)

    def _read(self, name: str, start: int, length: int | None) -> bytes:
        size, cipher = self._opened(name)
        end = size if length is None else min(start + length, size)
        # Also of an empty object the one segment is looked at.
        if start >= end and not (size == 0 and start == 0):
            return b""
        first, last = start // SEGMENT, max(end - 1, 0) // SEGMENT
        final = max(size - 1, 0) // SEGMENT
        data = memoryview(self.inner.read(name, HEADER + first * (SEGMENT + _TAG), (last - first + 1) * (SEGMENT + _TAG)))
        pieces = []
        for i in range(first, last + 1):
            at = (i - first) * (SEGMENT + _TAG)
            try:
                plain = cipher.decrypt(_nonce(i, i == final), data[at : at + SEGMENT + _TAG], None)
            except (InvalidTag, ValueError):
                raise IntegrityError(f"segment {i} of {final + 1} is not what was written", path=name) from None
            pieces.append(plain[max(start - i * SEGMENT, 0) : end - i * SEGMENT])
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _forget(self, name: str) -> None:
        with self._knowing:
            self._known.pop(name, None)

    def path(self, name: str) -> Path | None:
        check_name(name)
        return None

    def write(self, name: str, source: Path | bytes) -> bool:
        own = isinstance(source, Path) and source.parent == self.scratch
        try:
            if self.inner.size(name) is not None:
                return False
            header = MAGIC + self._id + secrets.token_bytes(_SALT)
            cipher = self._cipher(header, name)
            if isinstance(source, bytes) and len(source) <= SEGMENT:
                return self.inner.write(name, header + cipher.encrypt(_nonce(0, True), source, None))
            target = self.inner.scratch / f"{secrets.token_hex(8)}.sealed"
            try:
                with open(target, "xb") as file:
                    file.write(header)
                    for i, (block, last) in enumerate(_blocks(source)):
                        file.write(cipher.encrypt(_nonce(i, last), block, None))
                return self.inner.write(name, target)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(target)
        finally:
            if own:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(str(source))

    def size(self, name: str) -> int | None:
        sealed = self.inner.size(name)
        return None if sealed is None else _plain_size(sealed, name)

    def sizes(self, names: Sequence[str], lookup: bool = False) -> list[int | None]:
        found = zip(names, self.inner.sizes(names, lookup), strict=True)
        return [None if sealed is None else _plain_size(sealed, name) for name, sealed in found]

    def names(self, prefix: str = "") -> Iterator[Entry]:
        """Sizes are what the objects take, encryption included."""
        return self.inner.names(prefix)

    def page(self, prefix: str, after: str, count: int) -> list[Entry]:
        return self.inner.page(prefix, after, count)

    def remove(self, name: str) -> bool:
        self._forget(name)
        return self.inner.remove(name)

    def touch(self, *names: str) -> None:
        self.inner.touch(*names)

    def now(self) -> float:
        return self.inner.now()

    def unfinished(self) -> int:
        return self.inner.unfinished() + self._scratch.bytes()

    def sweep(self) -> int:
        return self.inner.sweep()

    def close(self) -> None:
        self._scratch.close()
        self.inner.close()


def _derived(key: bytes, salt: bytes | None, info: bytes, length: int) -> bytes:
    return HKDF(algorithm=SHA256(), length=length, salt=salt, info=info).derive(key)


def _nonce(segment: int, last: bool) -> bytes:
    return segment.to_bytes(11, "big") + bytes([last])


def _plain_size(sealed: int, name: str) -> int:
    """Bytes of the object in an encrypted one."""
    segments = -(-(sealed - HEADER) // (SEGMENT + _TAG))
    size = sealed - HEADER - segments * _TAG
    # Only an empty object has an empty segment.
    if size < 0 or (segments > 1 and size <= (segments - 1) * SEGMENT):
        raise IntegrityError(f"{sealed} bytes are no whole encrypted object", path=name)
    return size


def _blocks(source: Path | bytes) -> Iterator[tuple[bytes, bool]]:
    """(segment, whether it is the last one) of a source; one empty segment of an empty one."""
    if isinstance(source, bytes):
        for start in range(0, max(len(source), 1), SEGMENT):
            yield source[start : start + SEGMENT], start + SEGMENT >= len(source)
        return
    size = os.stat(source).st_size
    left = size
    with open(source, "rb") as file:
        while True:
            block = file.read(min(SEGMENT, left))
            left -= len(block)
            if len(block) < SEGMENT and left:
                raise OSError(errno.EIO, f"it was cut short while it was read; it had {size} bytes", str(source))
            yield block, left == 0
            if left == 0:
                return
