"""The kvtool file: one safetensors file with a manifest in its header. SPEC.md has it byte by byte.

    u64 LE N | N bytes of JSON, space padded so that (8 + N) % 64 == 0 | tensors, each zero padded to a multiple of 64 bytes

`write_container` makes one, `open_container` reads one. OSErrors (no such file, disk full, I/O error) pass through as they are;
everything that is wrong with the bytes is a KVError.

Arrays are views of the mapped file, checked when they are handed out and not again. `write_container` replaces a file, it never modifies
one, so they keep what was checked whatever is saved, recoded or removed. A program that writes into a file that is mapped changes them,
and one that cuts it short ends this process with SIGBUS: the one thing that the system answers with a signal instead of an exception.
"""

import contextlib
import mmap
import os
import shlex
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar

import blake3
import numpy as np
import zstandard

from formats.alike import Outline
from formats.atomic import AtomicFile, atomic_write
from formats.errors import CompressionError, DigestError, KVError, LayoutError, PaddingError, Problems
from formats.examine import (
    DIGEST_AT,
    MAX_EXPANSION,
    PREFIX,
    TensorInfo,
    examine,
    header_digest,
    manifest_json,
    outline,
    padded,
    reference_problems,
    tensor_json,
)
from formats.files import naming, opened
from formats.header import MAX_HEADER, NUMPY, Header, count, header_text, is_tensor_name, parse_entries, parse_json
from formats.manifest import ITEM_BYTES, Manifest, parse, to_json
from formats.strict_json import Room, dumps, loads

_CHUNK = 1 << 20
_LEVEL = 3
# zstd expands about 1.5 GB/s, less than disks read: it is kept if it saves 15 %. Samples of 64 KiB decide whether it is tried at all.
_KEEP_BELOW = 0.85
_SAMPLE = 1 << 16
_MAX_WINDOW = 1 << 27
_THREADED = 1 << 20  # bytes from which threads hash faster than one does
_SMALL = 1 << 20  # bytes of tensors that may wait to be written, besides the largest
AHEAD = 1 << 18  # bytes from which another thread's hashing is worth its hand-over
_PIECE = 1 << 24  # bytes that such a thread hashes before it looks whether it is still wanted: a slow disk takes a second for them
_READERS = min(16, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)  # threads that hash


@dataclass(frozen=True)
class TensorPlan:
    """A tensor to be written.

    Attributes:
        name, dtype, shape: as the manifest has them.
        produce: called once, in the order of the plans; gives bytes or an array of this dtype and shape.
        compress: try zstd. Without it a reader has the array as a view of the mapped file, whose pages processes share.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    produce: Callable[[], "bytes | memoryview | np.ndarray"]
    compress: bool = True

    @property
    def nbytes(self) -> int:
        """Logical bytes: elements times the bytes of one."""
        return count(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class WriteReport:
    """What was written: the path, and the bytes of file, header (with its length bytes) and tensors (with their padding)."""

    path: str
    file_bytes: int
    header_bytes: int
    tensor_bytes: int


@dataclass(frozen=True)
class Defect:
    """One tensor that is not what was written."""

    tensor: str
    error: KVError


def write_container(
    path: str | os.PathLike[str],
    manifest: Manifest | Callable[[], Manifest],
    plans: Sequence[TensorPlan],
    *,
    compress: bool = True,
    reserve: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> WriteReport:
    """Write a file in one pass over the tensors, atomically. A tensor is produced, by the caller's thread, while a thread writes those
    before it; no more than that one, another and a megabyte of small ones are in memory.

    Args:
        path: the file; it may be one that a Reader has open.
        manifest: the manifest, or a function that gives it, called after all tensors are written.
        plans: the tensors, in file order.
        compress: try zstd on each tensor whose plan allows it, and keep it where it saves 15 % or more.
        reserve: bytes to leave for the header beyond what is known at the start. A header that outgrows its place is
            right all the same: the tensors are then moved up inside the temporary file.
        progress: called with (logical bytes done, in all) after each tensor.
    Returns:
        The sizes.
    Raises:
        ValueError, TypeError: a plan, what it produced, or the manifest is wrong.
        OSError: as the system gives it; `path` is then as it was (or new and whole, if only the folder's fsync failed).
    """
    plans = tuple(plans)
    _check_plans(plans)
    names = {plan.name for plan in plans}
    known = None if callable(manifest) else manifest
    if known is not None:
        _check_manifest(known, names)
    space = padded(len(_header(known, _worst_case(plans))) + reserve)
    total = sum(plan.nbytes for plan in plans)
    done, end = 0, space
    tensors: list[TensorInfo] = []
    waiting: deque[tuple[int, Future[TensorInfo]]] = deque()

    def write(plan: TensorPlan, data: memoryview) -> TensorInfo:
        nonlocal end
        info = _write_tensor(out, plan, data, end, compress and plan.compress)
        end += info.padded
        return info

    def finish() -> None:
        """Wait for the first of those that wait."""
        nonlocal done
        size, written = waiting.popleft()
        tensors.append(written.result())
        done += size
        if progress is not None:
            progress(done, total)

    # The thread has ended when the temporary file is closed, whatever was raised.
    with atomic_write(path) as out, ThreadPoolExecutor(1, "kvtool-write") as thread:
        out.seek(space)
        for plan in plans:
            data = _produced(plan)
            sizes = [plan.nbytes, *(size for size, _ in waiting)]
            while waiting and sum(sizes) > max(sizes) + _SMALL:
                finish()
                sizes.pop(1)
            waiting.append((plan.nbytes, thread.submit(write, plan, data)))
            del data
        while waiting:
            finish()
        if callable(manifest):
            known = manifest()
            _check_manifest(known, names)
        header = _header(known, tensors, base=space)
        if len(header) > space:
            # Offsets count from the end of the header, so moving the tensors leaves the header as it is.
            grown = padded(len(header))
            out.move(space, end, grown)
            end += grown - space
            space = grown
        out.seek(0)
        out.write(_sealed(header, space, end))
        # An attempt at compression may have written past the last tensor.
        out.truncate(end)
    return WriteReport(os.fspath(path), end, space, end - space)


def manifest_bytes(manifest: Manifest) -> int:
    """What a manifest takes of the header, for `reserve`."""
    return len(_header(manifest, ())) - len(_header(None, ()))


def _check_plans(plans: tuple[TensorPlan, ...]) -> None:
    names = [plan.name for plan in plans]
    if len(set(names)) != len(names):
        raise ValueError(f"[write_container] tensor names must differ, but got {sorted(n for n in names if names.count(n) > 1)}.")
    for plan in plans:
        if not is_tensor_name(plan.name):
            raise ValueError(f"[write_container] {plan.name!r} is not a tensor name (A-Z a-z 0-9 _ . : -, no '..').")
        if plan.dtype not in ITEM_BYTES:
            raise ValueError(f"[write_container] {plan.name}: dtype must be one of {', '.join(ITEM_BYTES)}, but got {plan.dtype}.")
        if len(plan.shape) > 32 or not all(isinstance(n, int) and n >= 0 for n in plan.shape):
            raise ValueError(f"[write_container] {plan.name}: shape must be non-negative integers, but got {plan.shape}.")


def _check_manifest(manifest: Manifest, names: set[str]) -> None:
    """Refuse to write what the reader would refuse, as the caller's mistake that it is."""
    try:
        # Whether there is room in a file of its size is seen at the end.
        parse(loads(dumps(to_json(manifest)), "manifest", Room(MAX_HEADER << 4)))
        problems = reference_problems(manifest, names)
    except KVError as error:
        raise ValueError(f"[write_container] the manifest is not valid: {error}") from error
    if problems:
        raise ValueError(f"[write_container] the manifest is not valid: {problems[0]}")


def _worst_case(plans: tuple[TensorPlan, ...]) -> list[TensorInfo]:
    """Tensor entries at least as long in JSON as the real ones will be."""
    sizes = [padded(plan.nbytes) for plan in plans]
    last = sum(sizes)
    return [
        TensorInfo(plan.name, plan.dtype, plan.shape, plan.nbytes, plan.nbytes, size, last, "none", "0" * 64)
        for plan, size in zip(plans, sizes, strict=True)
    ]


def _header(manifest: Manifest | None, tensors: Sequence[TensorInfo], base: int = 0) -> bytes:
    """Length bytes and JSON with zeros for length and digest, unpadded. `base`: file offset of the first data byte."""
    value: dict[str, Any] = {} if manifest is None else to_json(manifest)
    value["tensors"] = {info.name: tensor_json(info) for info in tensors}
    parts = [PREFIX.decode(), "0" * 64, '","kvtool":', dumps(dumps(value)), "}"]
    for info in tensors:
        dtype = info.dtype if info.encoding == "none" else "U8"
        begin = info.offset - base
        entry = {"dtype": dtype, "shape": [info.padded // ITEM_BYTES[dtype]], "data_offsets": [begin, begin + info.padded]}
        parts.append(f",{dumps(info.name)}:{dumps(entry)}")
    return bytes(8) + "".join([*parts, "}"]).encode()


def _sealed(header: bytes, size: int, file_bytes: int) -> bytes:
    """The header padded to `size` bytes, with its length and digest, of a file of so many bytes."""
    if size - 8 > MAX_HEADER:
        raise ValueError(f"[write_container] the header would have {size - 8} bytes, more than {MAX_HEADER}.")
    try:
        room = Room(file_bytes)
        manifest_json(parse_entries(parse_json(header_text(header, room), room), size, Problems()), file_bytes)
    except KVError as error:
        raise ValueError(f"[write_container] a reader would refuse this header: {error}; fewer and longer segments take less.") from error
    raw = bytearray(header.ljust(size, b" "))
    raw[:8] = (size - 8).to_bytes(8, "little")
    raw[DIGEST_AT : DIGEST_AT + 64] = header_digest(bytes(raw)).encode()
    return bytes(raw)


def _write_tensor(out: AtomicFile, plan: TensorPlan, data: memoryview, offset: int, compress: bool) -> TensorInfo:
    encoding = "none"
    if compress and _worth_compressing(data):
        engine = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=False, write_content_size=True).compressobj(size=len(data))
        chunks = (data[i : i + _CHUNK] for i in range(0, len(data), _CHUNK))
        stored, digest = _write_padded(out, _compressed(engine, chunks))
        if padded(stored) < _KEEP_BELOW * padded(len(data)) and len(data) <= stored * MAX_EXPANSION:
            encoding = "zstd"
        else:
            out.seek(offset)
    if encoding == "none":
        # A chunk is copied before it is hashed and written, so that a source changing meanwhile cannot part the two.
        stored, digest = _write_padded(out, _copied(data))
    return TensorInfo(plan.name, plan.dtype, plan.shape, len(data), stored, padded(stored), offset, encoding, digest)


def _copied(data: memoryview) -> Iterator[memoryview]:
    """Chunks of the data, each in the same memory: to be used before the next is asked for."""
    buffer = memoryview(bytearray(min(_CHUNK, len(data))))
    for start in range(0, len(data), _CHUNK):
        chunk = buffer[: min(_CHUNK, len(data) - start)]
        chunk[:] = data[start : start + len(chunk)]
        yield chunk


def _compressed(engine: Any, chunks: Iterator[memoryview]) -> Iterator[bytes]:
    for chunk in chunks:
        yield engine.compress(chunk)
    yield engine.flush()


def _write_padded(out: AtomicFile, chunks: Iterator[bytes] | Iterator[memoryview]) -> tuple[int, str]:
    hasher = blake3.blake3()
    stored = 0
    for chunk in chunks:
        hasher.update(chunk)
        out.write(chunk)
        stored += len(chunk)
    padding = bytes(padded(stored) - stored)
    hasher.update(padding)
    out.write(padding)
    return stored, hasher.hexdigest()


def _produced(plan: TensorPlan) -> memoryview:
    value = plan.produce()
    if isinstance(value, np.ndarray):
        expected = np.dtype(NUMPY[plan.dtype])
        if value.dtype != expected or value.shape != plan.shape:
            got = f"{value.dtype} {value.shape}"
            raise ValueError(f"[write_container] {plan.name}: must be {expected} {plan.shape} for {plan.dtype}, but got {got}.")
        data = np.ascontiguousarray(value).reshape(-1).view(np.uint8).data if value.size else memoryview(b"")
    else:
        data = memoryview(value).cast("B")
    if len(data) != plan.nbytes:
        raise ValueError(f"[write_container] {plan.name}: {plan.dtype} {plan.shape} has {plan.nbytes} bytes, but got {len(data)}.")
    if plan.dtype == "BOOL" and len(data) and int(np.frombuffer(data, np.uint8).max()) > 1:
        raise ValueError(f"[write_container] {plan.name}: BOOL bytes must be 0 or 1.")
    return data


def _worth_compressing(data: memoryview) -> bool:
    if len(data) <= 4 * _SAMPLE:
        return len(data) > 0
    step = (len(data) - _SAMPLE) // 3
    engine = zstandard.ZstdCompressor(level=_LEVEL)
    size = sum(len(engine.compress(data[i * step : i * step + _SAMPLE])) for i in range(4))
    return size < _KEEP_BELOW * 4 * _SAMPLE


class Reader:
    """An open file: manifest and tensor table at once, tensors on demand. A context manager.

    The file stays readable while it is replaced or unlinked. Arrays that were handed out stay valid after `close`.

    Args:
        path: the file.
        like: `outline()` of a file whose header this one's may be alike.
        ahead: begin to hash all tensors, as `verify_ahead` does, as soon as it is known where they lie: what they mean is read meanwhile.
    Attributes:
        alike: whether it was.
    """

    there: ClassVar[bool] = True  # all of the file is, not a part of it
    path: str
    manifest: Manifest
    tensors: Mapping[str, TensorInfo]
    file_bytes: int
    header_bytes: int

    def __init__(self, path: str | os.PathLike[str], like: Outline | None = None, *, ahead: bool = False) -> None:
        self.path = os.fspath(path)
        self._threads: ThreadPoolExecutor | None = None
        self._ahead: dict[str, Future[str]] = {}
        self._closed = False
        try:
            with self._naming(), opened(self.path) as (fd, size):
                if size:
                    self._map = mmap.mmap(fd, size, access=mmap.ACCESS_READ)
                    self._bytes = np.frombuffer(self._map, np.uint8)  # what arrays are views of
                found = examine(fd, size, like, self._begin if ahead else None)
                if found.problems:
                    raise found.problems[0]
        except BaseException:
            self.close()
            raise
        # parse either gave the manifest or a problem.
        assert found.manifest is not None
        self.manifest = found.manifest
        self.tensors = found.tensors
        self.file_bytes = size
        self.header_bytes, self.alike = found.header_bytes, found.alike

    def _naming(self) -> contextlib.AbstractContextManager[None]:
        check = f"kvtool check {shlex.quote(self.path)} names all that is wrong with it; copy it again, or export it again"
        return naming(self.path, damaged=check, foreign="give a file of kvtool export")

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def outline(self) -> Outline | None:
        """What files that say the same but for digests, tokens and positions have in common with this one, where that can be told."""
        return outline(self._map[: self.header_bytes], self.manifest, self.tensors)

    def close(self) -> None:
        """Release the file; the mapping itself lives as long as an array that shows it."""
        self._closed = True
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
            self._ahead.clear()
        if hasattr(self, "_bytes"):
            del self._bytes
        if hasattr(self, "_map"):
            try:
                self._map.close()
            except BufferError:  # an array shows it
                self._bytes = np.frombuffer(self._map, np.uint8)

    def verify_ahead(self, names: Sequence[str], threads: ThreadPoolExecutor | None = None) -> None:
        """Begin to hash tensors, in threads and in this order; `array` waits for that of the tensor it is asked for, and compares.

        Args:
            names: keys of `tensors` that will be asked for soon. Small ones are left to `array`.
            threads: the threads, which are the caller's to end; None for this reader's own.
        """
        wanted = (self.tensors[name] for name in names if name not in self._ahead)
        self._hash_ahead([(info.name, info.offset, info.offset + info.padded) for info in wanted], threads)

    def _begin(self, header: Header) -> None:
        """Hash the tensors that a header lays out."""
        self._hash_ahead([(name, header.size + entry.begin, header.size + entry.end) for name, entry in header.entries.items()])

    def _hash_ahead(self, extents: Sequence[tuple[str, int, int]], threads: ThreadPoolExecutor | None = None) -> None:
        large = [extent for extent in extents if extent[2] - extent[1] >= AHEAD]
        if large and threads is None:
            threads = self._threads = self._threads or verifying_threads()
        for name, start, stop in large:
            assert threads is not None
            self._ahead[name] = threads.submit(self._digest, start, stop)

    def _digest(self, start: int, stop: int) -> str:
        """The digest of bytes of the file."""
        hasher = blake3.blake3()
        for at in range(start, stop, _PIECE):
            if self._closed:
                raise CancelledError
            hasher.update(self._bytes[at : min(at + _PIECE, stop)].data)
        return hasher.hexdigest()

    def array(self, name: str, *, verify: bool = True) -> np.ndarray:
        """One tensor in its logical shape, read-only: a view of the mapped file, or decompressed if it is zstd.

        Args:
            name: a key of `tensors`.
            verify: compare the digest of the stored bytes first.
        Returns:
            BF16 as uint16, BOOL as bool, else the dtype itself.
        Raises:
            KeyError: no such tensor.
            IntegrityError: digest, padding or zstd frame is wrong.
        """
        try:
            ahead = self._ahead.pop(name, None) if verify else None
            if ahead is not None:
                compare(self.tensors[name], ahead.result())
            return tensor_array(self._bytes, self.tensors[name], verify=verify and ahead is None)
        except KVError:
            with self._naming():
                raise

    def check(self, names: Iterable[str]) -> None:
        """Compare the digests of some tensors. Errors as `array`."""
        with self._naming():
            for name in names:
                check_digest(self._bytes, self.tensors[name])

    def verify(self, progress: Callable[[int, int], None] | None = None) -> list[Defect]:
        """Read every tensor with its checks, one at a time, and return those that fail.

        Args:
            progress: called with (stored bytes done, in all) after each tensor.
        """
        defects = []
        done, total = 0, sum(info.padded for info in self.tensors.values())
        for name, info in self.tensors.items():
            try:
                self.array(name)
            except KVError as error:
                defects.append(Defect(name, error.alone()))
            done += info.padded
            if progress is not None:
                progress(done, total)
        return defects


def verifying_threads() -> ThreadPoolExecutor:
    """Threads that digests are compared in."""
    return ThreadPoolExecutor(_READERS, "kvtool-verify")


def open_container(path: str | os.PathLike[str], *, ahead: bool = False) -> Reader:
    """Open a file; everything that the header can tell is checked, the tensors when they are read.

    Args:
        path: the file.
        ahead: begin to hash all tensors at once, in threads: for a caller that will ask for them.

    Raises:
        KVError: what is wrong with the file.
        OSError: it cannot be read at all.
    """
    return Reader(path, ahead=ahead)


def check_digest(data: np.ndarray, info: TensorInfo, threads: int = 1) -> None:
    """Raise DigestError unless the stored bytes of a tensor have the digest that is recorded."""
    stored = data[info.offset : info.offset + info.padded]
    compare(info, blake3.blake3(stored.data, max_threads=threads).hexdigest())


def compare(info: TensorInfo, digest: str) -> None:
    """Raise DigestError unless a digest is the one that is recorded of a tensor."""
    if digest != info.blake3:
        raise DigestError(f"tensor {info.name!r} has digest {digest}, recorded is {info.blake3}")


def tensor_array(data: np.ndarray, info: TensorInfo, *, verify: bool = True) -> np.ndarray:
    """One tensor out of the bytes of a file; see `Reader.array`."""
    if info.bytes == 0 and info.padded == 0:
        return np.zeros(info.shape, NUMPY[info.dtype])
    if verify:
        check_digest(data, info, blake3.blake3.AUTO if info.padded >= _THREADED else 1)
    if info.encoding == "none" and info.padded == info.bytes and info.dtype != "BOOL":
        return data[info.offset : info.offset + info.bytes].view(NUMPY[info.dtype]).reshape(info.shape)
    stored = data[info.offset : info.offset + info.padded]
    if info.padded > info.stored and stored[info.stored :].any():
        raise PaddingError(f"tensor {info.name!r}: the {info.padded - info.stored} padding bytes are not all zero")
    if info.encoding == "zstd":
        plain = np.frombuffer(_decompress(stored[: info.stored].data, info), np.uint8)
    else:
        plain = stored[: info.bytes]
    if info.dtype == "BOOL" and plain.size and int(plain.max()) > 1:
        raise LayoutError(f"tensor {info.name!r}: a BOOL byte is neither 0 nor 1")
    return plain.view(NUMPY[info.dtype]).reshape(info.shape)


def _decompress(frame: memoryview, info: TensorInfo) -> bytes:
    """Exactly info.bytes bytes out of exactly one frame that records its size."""
    try:
        parameters = zstandard.get_frame_parameters(frame)
        if parameters.content_size != info.bytes or parameters.dict_id:
            raise CompressionError(f"tensor {info.name!r}: the zstd frame gives {parameters.content_size} bytes, recorded are {info.bytes}")
        engine = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)
        plain: bytes = engine.decompress(frame, max_output_size=info.bytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CompressionError(f"tensor {info.name!r}: the zstd frame is corrupt: {error}") from None
    if len(plain) != info.bytes:
        raise CompressionError(f"tensor {info.name!r}: the zstd frame expands to {len(plain)} bytes, recorded are {info.bytes}")
    return plain
