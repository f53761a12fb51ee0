"""Named arrays and a JSON description of them as a safetensors file: calibrations and maps. SPEC.md, "Calibrations".

    u64 LE N | N bytes of JSON, space padded so that (8 + N) % 64 == 0 | arrays, those of wide items first, without gaps

Its name is the blake3 of all its bytes. The writer is deterministic: equal content gives equal bytes. Reading checks everything and copies
nothing: arrays are views of the mapped file.
"""

import mmap
import os
from collections.abc import Mapping, Sequence
from typing import Any

import blake3
import numpy as np

from formats.errors import DigestError, HeaderError, KVError, LayoutError, ManifestError, NotKvtoolError, VersionError
from formats.files import naming, opened
from formats.header import MAX_HEADER, Entry, Header, check_extents, is_tensor_name, parse_entries, parse_json, read_raw
from formats.manifest import Node
from formats.strict_json import dumps, loads

MAX_BYTES = 1 << 34
# safetensors dtype -> numpy's; no others occur.
DTYPES = {
    "F64": "<f8", "I64": "<i8", "U64": "<u8", "F32": "<f4", "I32": "<i4", "U32": "<u4", "F16": "<f2", "I16": "<i2", "U16": "<u2",
    "I8": "|i1", "U8": "|u1",
}  # fmt: skip
_NAMES = {np.dtype(numpy): name for name, numpy in DTYPES.items()}
_ALIGNMENT = 64

Arrays = Mapping[str, np.ndarray]


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


class Kind:
    """One kind of such files.

    Args:
        word: what it is called in messages, and the field of the metadata that holds the description.
        version: newest that this program reads.
        sealed: whether the file holds the digest of its own header and arrays, because nobody else names it by one.
    """

    def __init__(self, word: str, version: int, *, sealed: bool = False) -> None:
        self.word, self.version, self.format, self.sealed = word, version, f"kvtool-{word}", sealed

    def to_bytes(self, body: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> bytes:
        """A file as bytes; the caller reads it back.

        Args:
            body: the description, without its version.
            arrays: by tensor name.

        Raises:
            ValueError: a dtype, or a size, that a reader would refuse.
        """
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

    def header(self, raw: bytes, size: int) -> tuple[Header, Node]:
        """The header of a file of so many bytes, and the description in it. Errors as `parse`."""
        problems: list[KVError] = []
        header = parse_entries(parse_json(raw), raw, problems)
        if not problems and header.metadata.get("format") != self.format:
            kind = "a kvtool file" if header.metadata.get("format") == "kvtool" else "safetensors without its metadata"
            raise NotKvtoolError(f"not a {self.word}: {kind}")
        if not problems:
            check_extents(header, size, problems, in_order=True)
        if problems:
            raise problems[0]
        if self.sealed and (unknown := sorted(set(header.metadata) - {"format", self.word, "blake3"})):
            raise HeaderError(f"header: __metadata__ of a {self.word} has the unknown fields {unknown}"[:200])
        root = Node(loads(header.metadata.get(self.word, ""), self.word))
        version = root.key("version").integer(1)
        if version > self.version:
            raise VersionError(f"$.version: {version} is newer than {self.version}, the newest this version reads", hint="upgrade kvtool")
        return header, root

    def parse(self, data: bytes | memoryview) -> tuple[Node, dict[str, np.ndarray]]:
        """The description and the arrays of a file; arrays are views of the bytes.

        Raises:
            FormatError: what is wrong with it.
        """
        view = memoryview(data)
        if len(view) < 8 or not 2 <= int.from_bytes(view[:8], "little") <= min(MAX_HEADER, len(view) - 8):
            raise NotKvtoolError(f"not a {self.word}: {len(view)} bytes do not begin as a safetensors file")
        raw = bytes(view[: 8 + int.from_bytes(view[:8], "little")])
        header, root = self.header(raw, len(view))
        if "blake3" in header.metadata:
            found = _seal(parse_json(raw), [view[len(raw) :]])
            if found != header.metadata["blake3"]:
                what = f"header and arrays have the digest {found[:16]}, and {header.metadata['blake3'][:16]} is recorded"
                raise DigestError(what, hint=f"make the {self.word} again, or copy it again")
        arrays = {name: self._array(name, e, view[len(raw) + e.begin : len(raw) + e.end]) for name, e in header.entries.items()}
        return root, arrays

    def read(self, path: str | os.PathLike[str]) -> tuple[Node, dict[str, np.ndarray], str]:
        """The description, the arrays and the digest of a file.

        Raises:
            FormatError: what is wrong with it.
            OSError: it cannot be read.
        """
        path = os.fspath(path)
        with naming(path), opened(path) as (fd, size):
            if size > MAX_BYTES:
                raise LayoutError(f"{size} bytes, more than {MAX_BYTES}")
            read_raw(fd, size)
            data = memoryview(mmap.mmap(fd, size, access=mmap.ACCESS_READ))
            return *self.parse(data), digest_of(data)

    def read_description(self, path: str | os.PathLike[str]) -> Node:
        """The description alone, from the header; arrays and digest are not looked at. Errors as `read`."""
        path = os.fspath(path)
        with naming(path), opened(path) as (fd, size):
            return self.header(read_raw(fd, size), size)[1]

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
