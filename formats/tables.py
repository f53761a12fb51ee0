"""Named arrays and a JSON description of them as a safetensors file: calibrations, maps and profiles. SPEC.md, "Calibrations".

    u64 LE N | N bytes of JSON, space padded so that (8 + N) % 64 == 0 | arrays, those of wide items first, without gaps

Its name is the blake3 of all its bytes. The writer is deterministic: equal content gives equal bytes. Reading checks everything and copies
nothing: arrays are views of the mapped file.
"""

import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

import blake3
import numpy as np

from formats.atomic import atomic_write
from formats.errors import DigestError, HeaderError, KVError, LayoutError, ManifestError, NotKvtoolError, Problems, VersionError
from formats.files import naming, opened
from formats.header import MAX_HEADER, Entry, Header, check_extents, header_text, is_tensor_name, parse_entries, parse_json, read_raw
from formats.manifest import ModelInfo, Node, model_of
from formats.strict_json import Room, dumps, loads

MAX_BYTES = 1 << 34
# safetensors dtype -> numpy's; no others occur.
DTYPES = {
    "F64": "<f8", "I64": "<i8", "U64": "<u8", "F32": "<f4", "I32": "<i4", "U32": "<u4", "F16": "<f2", "I16": "<i2", "U16": "<u2",
    "I8": "|i1", "U8": "|u1",
}  # fmt: skip
_NAMES = {np.dtype(numpy): name for name, numpy in DTYPES.items()}
_ALIGNMENT = 64

Arrays = Mapping[str, np.ndarray]
Content = TypeVar("Content")


def _text(header: Mapping[str, Any]) -> str:
    """The JSON of a header. Not sorted: the metadata comes first, then the arrays as they lie."""
    return "{" + ",".join(f"{dumps(key)}:{dumps(value)}" for key, value in header.items()) + "}"


def _seal(header: Mapping[str, Any], data: Sequence[bytes | memoryview]) -> str:
    """blake3 of a header without its digest, and of the arrays."""
    bare = {name: value for name, value in header["__metadata__"].items() if name != "blake3"}
    total = blake3.blake3(_text({**header, "__metadata__": bare}).encode())
    for part in data:
        total.update(part)
    return total.hexdigest()


class Kind(Generic[Content]):
    """One kind of such files.

    Args:
        word: what it is called in messages, and the field of the metadata that holds the description.
        version: newest that this program reads.
        command: what makes such files, for hints.
        described: content -> its description, without the version, and its arrays by tensor name.
        made: a description and arrays -> the content; raises FormatError for what it may not hold.
        sealed: whether the file holds the digest of its own header and arrays, because nobody else names it by one.
    """

    def __init__(
        self,
        word: str,
        version: int,
        command: str,
        *,
        described: Callable[[Content], tuple[Mapping[str, Any], Arrays]],
        made: Callable[[Node, Arrays], Content],
        sealed: bool = False,
    ) -> None:
        self.word, self.version, self.command, self.format, self.sealed = word, version, command, f"kvtool-{word}", sealed
        self._described, self._made = described, made

    def to_bytes(self, content: Content) -> bytes:
        """A file as bytes.

        Raises:
            ValueError: a name, dtype, shape, size or value that a reader would refuse.
        """
        data = self._stored(*self._described(content))
        try:
            self.from_bytes(data)
        except KVError as error:
            raise ValueError(f"[{self.word}] it could not be read again: {error}") from error
        return data

    def from_bytes(self, data: bytes | memoryview) -> Content:
        """What bytes of a file hold; arrays are views of them. Errors as `read`."""
        return self._made(*self._parse(data))

    def read(self, path: str | os.PathLike[str]) -> tuple[Content, str]:
        """A file and its digest (hex); arrays are views of the mapped file.

        Raises:
            FormatError, IntegrityError: what is wrong with it.
            OSError: it cannot be read.
        """
        path = os.fspath(path)
        with self._naming(path), opened(path) as (fd, size):
            if size > MAX_BYTES:
                raise LayoutError(f"{size} bytes, more than {MAX_BYTES}")
            read_raw(fd, size)
            data = memoryview(mmap.mmap(fd, size, access=mmap.ACCESS_READ))
            return self.from_bytes(data), digest_of(data)

    def write(self, path: str | os.PathLike[str], content: Content) -> str:
        """Write a file, atomically; returns its digest.

        Raises:
            ValueError: content that a reader would refuse.
            OSError: as the system gives it.
        """
        data = self.to_bytes(content)
        with atomic_write(path) as out:
            out.write(data)
        return digest_of(data)

    def _naming(self, path: str) -> AbstractContextManager[None]:
        return naming(path, damaged=f"copy it again, or make it again with {self.command}", foreign=f"give a file of {self.command}")

    def _stored(self, body: Mapping[str, Any], arrays: Arrays) -> bytes:
        stored = {name: self._storable(name, np.asarray(array)) for name, array in arrays.items()}
        order = sorted(stored, key=lambda name: (-stored[name].itemsize, name))
        header: dict[str, Any] = {"__metadata__": {"format": self.format, self.word: dumps({"version": self.version, **body})}}
        end = 0
        for name in order:
            array = stored[name]
            header[name] = {"dtype": _NAMES[array.dtype], "shape": list(array.shape), "data_offsets": [end, end + array.nbytes]}
            end += array.nbytes
        data = [stored[name].tobytes() for name in order]
        if self.sealed:
            header["__metadata__"]["blake3"] = _seal(header, data)
        text = _text(header)
        raw = text.encode().ljust(-(-(8 + len(text.encode())) // _ALIGNMENT) * _ALIGNMENT - 8, b" ")
        if len(raw) > MAX_HEADER or 8 + len(raw) + end > MAX_BYTES:
            raise ValueError(
                f"[{self.word}] header and arrays must have at most {MAX_HEADER} and {MAX_BYTES} bytes, got {len(raw)}, {end}."
            )
        return b"".join([len(raw).to_bytes(8, "little"), raw, *data])

    def tensor_name(self, *words: str) -> str:
        """Words joined by colons.

        Raises:
            ValueError: a word that no tensor's name may have.
        """
        full = ":".join(words)
        if not is_tensor_name(full) or full.count(":") != len(words) - 1 or not all(words):
            raise ValueError(f"[{self.word}] names must be of A-Z a-z 0-9 _ . -, none empty, but got {full!r:.80}.")
        return full

    def _header(self, raw: bytes, size: int) -> tuple[Header, Node]:
        """The header of a file of so many bytes, and the description in it."""
        problems = Problems()
        room = Room(size)
        header = parse_entries(parse_json(header_text(raw, room), room), len(raw), problems)
        if not problems and header.metadata.get("format") != self.format:
            kind = "a kvtool file" if header.metadata.get("format") == "kvtool" else "safetensors without its metadata"
            raise NotKvtoolError(f"not a {self.word}: {kind}")
        if not problems:
            check_extents(header, size, problems, in_order=True)
        if problems:
            raise problems[0]
        if self.sealed and (unknown := sorted(set(header.metadata) - {"format", self.word, "blake3"})):
            raise HeaderError(f"header: __metadata__ of a {self.word} has the unknown fields {unknown}"[:200])
        root = Node(loads(header.metadata.get(self.word, ""), self.word, room))
        version = root.key("version").integer(1)
        if version > self.version:
            raise VersionError(f"$.version: {version} is newer than {self.version}, the newest this version reads", hint="upgrade kvtool")
        return header, root

    def _parse(self, data: bytes | memoryview) -> tuple[Node, dict[str, np.ndarray]]:
        """The description and the arrays of a file."""
        view = memoryview(data)
        if len(view) < 8 or not 2 <= int.from_bytes(view[:8], "little") <= min(MAX_HEADER, len(view) - 8):
            raise NotKvtoolError(f"not a {self.word}: {len(view)} bytes do not begin as a safetensors file")
        raw = bytes(view[: 8 + int.from_bytes(view[:8], "little")])
        header, root = self._header(raw, len(view))
        if "blake3" in header.metadata:
            room = Room(len(view))
            found = _seal(parse_json(header_text(raw, room), room), [view[len(raw) :]])
            if found != header.metadata["blake3"]:
                raise DigestError(f"header and arrays have the digest {found[:16]}, and {header.metadata['blake3'][:16]} is recorded")
        arrays = {name: self._array(name, e, view[len(raw) + e.begin : len(raw) + e.end]) for name, e in header.entries.items()}
        return root, arrays

    def described_model(self, path: str | os.PathLike[str]) -> ModelInfo:
        """The model that a file is of, from its header; its arrays and its digest are not looked at. Errors as `read`."""
        path = os.fspath(path)
        with self._naming(path), opened(path) as (fd, size):
            return model_of(self._header(read_raw(fd, size), size)[1].key("model"))

    def _storable(self, name: str, array: np.ndarray) -> np.ndarray:
        array = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(array.shape)
        if array.dtype not in _NAMES:
            raise ValueError(f"[{self.word}] {name} must be of {', '.join(DTYPES)}, but got {array.dtype}.")
        return array

    def _array(self, name: str, entry: Entry, data: memoryview) -> np.ndarray:
        if not is_tensor_name(name):
            raise ManifestError(f"tensor {name[:80]!r}: not a name that occurs in a {self.word}")
        if entry.dtype not in DTYPES:
            raise LayoutError(f"tensor {name[:80]!r}: dtype {entry.dtype} does not occur in a {self.word}")
        array = np.frombuffer(data, np.dtype(DTYPES[entry.dtype])).reshape(entry.shape)
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise ManifestError(f"tensor {name[:80]!r}: holds NaN or infinity")
        return array


def digest_of(data: bytes | memoryview) -> str:
    """blake3, in hex, of a file's bytes: its name."""
    return blake3.blake3(data, max_threads=blake3.blake3.AUTO).hexdigest()
