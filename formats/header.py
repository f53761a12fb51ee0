"""The safetensors header, read strictly: 8 length bytes (u64 LE), N bytes of JSON, then the data that the JSON lays out.

Every check here is about bytes and numbers; what the tensors mean is the manifest's matter. Nothing is allocated before the
file has been seen to be long enough for it.
"""

import math
import os
import re
from dataclasses import dataclass, field
from typing import Any

from formats.errors import HeaderError, KVError, LayoutError, NotKvtoolError, TrailingBytesError, TruncatedError
from formats.strict_json import Room, loads, width_of

# The limit of the safetensors library.
MAX_HEADER = 100_000_000
MAX_DIMENSION = 1 << 48
# safetensors dtype -> bits per element; also those that only foreign files may use.
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
# How numpy holds each dtype; BF16 comes as the uint16 of its bits.
NUMPY = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "F16": "<f2", "BF16": "<u2",
    "U32": "<u4", "I32": "<i4", "F32": "<f4", "U64": "<u8", "I64": "<i8",
}  # fmt: skip
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,199}")


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor as the header lays it out; `begin` and `end` count from the first data byte."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass
class Header:
    """The header of a safetensors file. `size` is that of all of it, the 8 length bytes included."""

    size: int
    metadata: dict[str, str] = field(default_factory=dict)
    entries: dict[str, Entry] = field(default_factory=dict)


def is_tensor_name(name: str) -> bool:
    """Whether a tensor may have this name: 1 to 200 of A-Z a-z 0-9 _ . : -, not starting with . : or -, and no '..'."""
    return _NAME.fullmatch(name) is not None and ".." not in name and name != "__metadata__"


def read_raw(fd: int, size: int) -> bytes:
    """The length bytes and the JSON bytes of an open file of `size` bytes.

    Raises:
        NotKvtoolError: the file is empty.
        HeaderError: the length is out of bounds.
        TruncatedError: the file is shorter than its header.
    """
    if size == 0:
        raise NotKvtoolError("the file is empty")
    if size < 8:
        raise TruncatedError(f"the file has {size} bytes, less than the 8 of the header length")
    length = int.from_bytes(_pread(fd, 8, 0), "little")
    if length > MAX_HEADER:
        raise HeaderError(f"header length {length} is more than {MAX_HEADER}: damaged, or not a safetensors file")
    if length < 2:
        raise HeaderError(f"header length {length} is less than the 2 bytes of an empty JSON object")
    if 8 + length > size:
        raise TruncatedError(f"the header needs {8 + length} bytes, but the file has {size}")
    return _pread(fd, 8 + length, 0)


def _pread(fd: int, count: int, offset: int) -> bytes:
    blocks = []
    while count:
        block = os.pread(fd, count, offset)
        if not block:
            raise TruncatedError(f"the file ends at byte {offset}, while it was being read")
        blocks.append(block)
        count -= len(block)
        offset += len(block)
    return blocks[0] if len(blocks) == 1 else b"".join(blocks)


def header_text(raw: bytes, room: Room) -> str:
    """The header's JSON as text. Its bytes, which are not needed for what follows, the text, and three quarters more are paid for.

    Raises:
        HeaderError: not UTF-8, not an object, or larger than what a file of its size may have.
    """
    # The parser holds more than twice a long string for a while.
    room.take((1 + width_of(raw, 8)) * len(raw) + 3 * len(raw) // 4, "header")
    try:
        text = str(memoryview(raw)[8:], "utf-8")
    except UnicodeDecodeError as error:
        raise HeaderError(f"header: not UTF-8 at byte {8 + error.start}") from None
    if not text.startswith("{"):
        raise HeaderError("header: does not start with '{'")
    return text


def parse_json(text: str, room: Room) -> dict[str, Any]:
    """The header's JSON object. Raises HeaderError as `loads`."""
    value: dict[str, Any] = loads(text, "header", room)
    return value


def parse_entries(obj: dict[str, Any], size: int, problems: list[KVError]) -> Header:
    """Metadata and tensor entries of a header of `size` bytes, strictly; each defect is appended to `problems` and its entry left out."""
    header = Header(size)
    for name, value in obj.items():
        if name == "__metadata__":
            _metadata(value, header, problems)
            continue
        entry = _entry(name, value)
        if isinstance(entry, KVError):
            problems.append(entry)
        else:
            header.entries[name] = entry
    return header


def _metadata(value: Any, header: Header, problems: list[KVError]) -> None:
    # mlx writes null where there is no metadata.
    if value is None:
        return
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        problems.append(HeaderError("header: __metadata__ must be an object of strings"))
        return
    header.metadata = value


def _entry(name: str, value: Any) -> Entry | KVError:
    shown = repr(name[:80])
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        return HeaderError(f"tensor {shown}: must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        return LayoutError(f"tensor {shown}: unknown dtype {str(dtype)[:40]!r}")
    if not isinstance(shape, list) or not all(type(n) is int and 0 <= n <= MAX_DIMENSION for n in shape) or len(shape) > 32:
        return LayoutError(f"tensor {shown}: shape must be at most 32 integers in 0 .. 2**48, but is {str(shape)[:80]}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(n) is int and n >= 0 for n in offsets):
        return LayoutError(f"tensor {shown}: data_offsets must be two non-negative integers, but are {str(offsets)[:80]}")
    begin, end = offsets
    if begin > end:
        return LayoutError(f"tensor {shown}: begins at {begin}, after its end {end}")
    need = count(shape) * BITS[dtype] // 8
    if need != end - begin:
        return LayoutError(f"tensor {shown}: shape {shape} of {dtype} needs {need} bytes, but {end - begin} are laid out")
    if not is_possible(shape):
        return LayoutError(f"tensor {shown}: no array has the shape {str(shape)[:80]}")
    return Entry(dtype, tuple(shape), begin, end)


def count(shape: "tuple[int, ...] | list[int]") -> int:
    """The number of elements of a shape."""
    return math.prod(shape)


def is_possible(shape: "tuple[int, ...] | list[int]") -> bool:
    """Whether an array can have this shape: its sizes but for zeros multiply to less than 2^60, as numpy demands even of empty arrays."""
    return count([size for size in shape if size]) < 1 << 60


def check_extents(header: Header, size: int, problems: list[KVError], *, in_order: bool) -> None:
    """Append what is wrong with where the tensors lie: overlaps, gaps, an end that is not the file's end.

    Args:
        in_order: the header must list the tensors in the order of their offsets (kvtool's own files).
    """
    entries = list(header.entries.items())
    if not in_order:
        entries.sort(key=lambda item: (item[1].begin, item[1].end))
    expected = last = 0
    for name, entry in entries:
        if entry.begin != expected:
            kind = "overlaps or precedes the one before it" if entry.begin < expected else "leaves a gap after the one before it"
            problems.append(LayoutError(f"tensor {name[:80]!r}: begins at {entry.begin}, must begin at {expected}: {kind}"))
        expected = entry.end
        last = max(last, entry.end)
    total = header.size + last
    if total > size:
        problems.append(TruncatedError(f"the tensors end at byte {total}, but the file has {size}"))
    elif total < size:
        problems.append(TrailingBytesError(f"the tensors end at byte {total}, but the file has {size}: {size - total} bytes too many"))
