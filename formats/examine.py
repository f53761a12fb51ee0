"""What the header of a kvtool file says, and everything that can be wrong with it, in O(header) time.

The header begins with PREFIX, then the 64 hex digits of its own blake3, at a fixed place: so a file is recognised, and its header
proven whole, before any JSON is parsed. `open_container` raises the first problem found here; `check` reports all of them.
"""

import re
import sys
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field

import blake3

from formats.alike import Outline
from formats.errors import DigestError, HeaderDigestError, HeaderError, KVError, LayoutError, ManifestError, NotKvtoolError, Problems
from formats.foreign.mlx_lm import version_of
from formats.header import (
    Entry,
    Header,
    check_extents,
    count,
    header_text,
    is_possible,
    is_tensor_name,
    parse_entries,
    parse_json,
    read_raw,
)
from formats.manifest import ITEM_BYTES, JSON, CacheInfo, Manifest, Node, Role, parse
from formats.strict_json import Room, loads
from formats.tensor_info import TensorInfo
from formats.token_ids import TokenIds

ALIGNMENT = 64
FORMAT = "kvtool"
PREFIX = b'{"__metadata__":{"format":"kvtool","header_blake3":"'
DIGEST_AT = 8 + len(PREFIX)
_TOKENS = re.compile(r'"tokens":\{"blake3":"[0-9a-f]{64}","ids":\[([0-9,]*+)\]\}')
_ENTRY = 320  # bytes that a tensor of the header takes
ENCODINGS, DTYPES = ("none", "zstd"), tuple(ITEM_BYTES)
# The most that a zstd payload may expand; the writer stores raw what would expand more.
MAX_EXPANSION = 1024


@dataclass
class Examination:
    """The result: as much as could be read, and the problems in the order they were met.

    Attributes:
        alike: whether it was read by another header's outline.
    """

    header_bytes: int = 0
    alike: bool = False
    manifest: Manifest | None = None
    tensors: Mapping[str, TensorInfo] = field(default_factory=dict)
    problems: list[KVError] = field(default_factory=Problems)


def padded(size: int) -> int:
    """`size` rounded up to the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def header_digest(raw: bytes) -> str:
    """Blake3, in hex, of length bytes and header, with '0' for the 64 digits at DIGEST_AT."""
    hasher = blake3.blake3(raw[:DIGEST_AT])
    hasher.update(b"0" * 64)
    hasher.update(memoryview(raw)[DIGEST_AT + 64 :])
    return hasher.hexdigest()


def outline(raw: bytes, manifest: Manifest, tensors: Mapping[str, TensorInfo]) -> Outline | None:
    """What headers like this one have in common with it, where that can be told."""
    return Outline.of(raw, DIGEST_AT + 64, manifest, tensors)


def examine(fd: int, size: int, like: Outline | None = None, laid_out: Callable[[Header], None] | None = None) -> Examination:
    """Read and examine the header of an open file of `size` bytes. Raises nothing about its content; see `problems`.

    Args:
        like: of a header that this one may be alike; it is then read in a tenth of the time.
        laid_out: called with what the header lays out, before its manifest is read, where nothing was wrong so far and it is not alike.
    """
    found = Examination()
    try:
        raw, room = read_raw(fd, size), Room(size)
        found.header_bytes = len(raw)
        _recognise(raw, room)
        if len(raw) % ALIGNMENT:
            found.problems.append(HeaderError(f"length bytes and header are {len(raw)} bytes, not a multiple of {ALIGNMENT}"))
        recorded, actual = raw[DIGEST_AT : DIGEST_AT + 64], header_digest(raw)
        known = None if like is None or recorded != actual.encode() else like.read(raw, DIGEST_AT + 64, size)
        if known is not None:
            found.manifest, found.tensors, found.alike = known.manifest, known.tensors, True
            return found
        if recorded != actual.encode():
            shown = recorded.decode("ascii", "replace")
            found.problems.append(HeaderDigestError(f"the header has digest {actual}, recorded is {shown}"))
        text = header_text(raw, room)
        del raw
        obj = parse_json(text, room)
        del text
        before = len(found.problems)
        header = parse_entries(obj, found.header_bytes, found.problems)
        del obj
        if len(found.problems) == before:
            check_extents(header, size, found.problems, in_order=True)
        if laid_out is not None and not found.problems:
            laid_out(header)
        _read_manifest(header, found, size)
    except KVError as error:
        found.problems.append(error)
    return found


def _recognise(raw: bytes, room: Room) -> None:
    """Raise what the file is, if it does not begin as a kvtool file does."""
    if raw[8:DIGEST_AT] == PREFIX and len(raw) >= DIGEST_AT + 64:
        return
    try:
        header = parse_entries(parse_json(header_text(raw, room), room), len(raw), Problems())
    except HeaderError as error:
        raise HeaderError(f"{error.what} (and it does not begin as a kvtool file does)") from None
    if header.metadata.get("format") == FORMAT or "kvtool" in header.metadata or "header_blake3" in header.metadata:
        raise HeaderDigestError("the header's digest is not at its place: damaged, or rewritten by another program")
    version = version_of(header.metadata)
    if version is not None:
        raise NotKvtoolError(
            f"not a kvtool file: it looks like an mlx-lm prompt cache of version {version}",
            hint="kvtool export --from-cache FILE --tokens IDS --model M -o OUT.kv",
        )
    raise NotKvtoolError(f"not a kvtool file: a safetensors file of {len(header.entries)} tensors without kvtool's metadata")


def _read_manifest(header: Header, found: Examination, size: int) -> None:
    if set(header.metadata) != {"format", "header_blake3", "kvtool"}:
        raise HeaderError(f"header: __metadata__ must have format, header_blake3 and kvtool, but has {sorted(header.metadata)}"[:200])
    root = Node(manifest_json(header, size))
    # The manifest first: a newer schema may describe its tensors in another way.
    try:
        found.manifest = parse(root.value)
    except (ManifestError, DigestError) as error:
        found.problems.append(error)
    tensors_node = root.key("tensors")
    table = tensors_node.members()
    for name in sorted(set(header.entries) - set(table)):
        found.problems.append(ManifestError(f"$.tensors: tensor {name[:80]!r} of the file is missing"))
    tensors = {}
    for name, node in tensors_node.items():
        try:
            info = _tensor(name, node, header.entries.get(name), found.header_bytes)
        except KVError as error:
            found.problems.append(error)
        else:
            tensors[name] = info
    # In the order of the file, so that a walk over them reads forwards.
    found.tensors = dict(sorted(tensors.items(), key=lambda item: item[1].offset))
    if found.manifest is not None:
        found.problems.extend(reference_problems(found.manifest, table))


def manifest_json(header: Header, size: int) -> JSON:
    """The manifest's JSON, which is taken out of the header of a file of `size` bytes. Token ids, written as this program writes them, are
    read apart from it, into four bytes each. Errors as `loads`."""
    text, room = header.metadata.pop("kvtool"), Room(size)
    # As much again, for what is freed and not given back.
    room.take(2 * sys.getsizeof(text) + _ENTRY * len(header.entries), "header")
    found = _TOKENS.search(text)
    if found is not None and text.count('"ids"') == 1:
        start, digits = found.start(1), found[1]
        text = text[:start] + text[start + len(digits) :]
        del found
        room.take(ITEM_BYTES["I32"] * (digits.count(",") + 1), "manifest")
        ids = TokenIds.parse(digits.encode())
        value = loads(text, "manifest", room)
        # An object of that form may also stand elsewhere; then the manifest's own tokens have no ids.
        tokens = value.get("tokens") if isinstance(value, dict) else None
        if ids is not None and isinstance(tokens, dict) and tokens.get("ids") == []:
            tokens["ids"] = ids
            return value
        del value
        text = text[:start] + digits + text[start:]
    return loads(text, "manifest", room)


def _tensor(name: str, node: Node, entry: Entry | None, header_bytes: int) -> TensorInfo:
    if not is_tensor_name(name):
        raise LayoutError(f"tensor name {name[:80]!r} is not allowed")
    if entry is None:
        raise node.fail("the file has no such tensor")
    # In the order of TensorInfo's fields.
    info = TensorInfo(
        name,
        node.key("dtype").choice(DTYPES),
        tuple(node.key("shape").integers(0, 1 << 48, 33)),
        node.key("bytes").integer(),
        node.key("stored").integer(),
        entry.end - entry.begin,
        header_bytes + entry.begin,
        node.key("encoding").choice(ENCODINGS),
        node.key("blake3").digest(),
    )
    if len(info.shape) > 32:
        raise LayoutError(f"tensor {name!r}: more than 32 dimensions")
    if entry.begin % ALIGNMENT or info.padded % ALIGNMENT:
        raise LayoutError(f"tensor {name!r}: bytes {entry.begin} .. {entry.end} are not multiples of {ALIGNMENT}")
    need = count(info.shape) * ITEM_BYTES[info.dtype]
    if need != info.bytes:
        raise LayoutError(f"tensor {name!r}: shape {list(info.shape)} of {info.dtype} needs {need} bytes, recorded are {info.bytes}")
    if not is_possible(info.shape):
        raise LayoutError(f"tensor {name!r}: no array has the shape {str(list(info.shape))[:80]}")
    if info.padded != padded(info.stored):
        raise LayoutError(f"tensor {name!r}: {info.stored} stored bytes need {padded(info.stored)} with padding, but have {info.padded}")
    if info.encoding == "none" and info.stored != info.bytes:
        raise LayoutError(f"tensor {name!r}: {info.bytes} bytes, but {info.stored} stored without compression")
    if info.encoding == "zstd" and info.bytes > info.stored * MAX_EXPANSION:
        raise LayoutError(f"tensor {name!r}: {info.stored} stored bytes may not expand to {info.bytes}, more than {MAX_EXPANSION}-fold")
    dtype = info.dtype if info.encoding == "none" else "U8"
    if entry.dtype != dtype or entry.shape != (info.padded // ITEM_BYTES[dtype],):
        raise LayoutError(f"tensor {name!r}: laid out as {entry.dtype} {list(entry.shape)}, must be {dtype} of one dimension")
    return info


def reference_problems(manifest: Manifest, names: Container[str]) -> list[KVError]:
    """A ManifestError for each tensor that the manifest names and `names` does not have, or that it names twice."""
    problems: list[KVError] = Problems()
    used: set[str] = set()

    def tensor(name: str, path: str) -> None:
        if name not in names:
            problems.append(ManifestError(f"{path}: there is no tensor {name[:80]!r}"))
        elif name in used:
            problems.append(ManifestError(f"{path}: tensor {name[:80]!r} is used twice"))
        used.add(name)

    def role(value: Role | None, path: str) -> None:
        for i, segment in enumerate(value.segments if value else ()):
            for part, name in segment.tensors.items():
                tensor(name, f"{path}.segments[{i}].tensors.{part}")

    def cache(value: CacheInfo, path: str) -> None:
        role(value.k, f"{path}.k")
        role(value.v, f"{path}.v")
        for i, array in enumerate(value.arrays):
            if array is not None:
                tensor(array.tensor, f"{path}.arrays[{i}].tensor")
        for i, sub in enumerate(value.caches):
            cache(sub, f"{path}.caches[{i}]")

    for i, layer in enumerate(manifest.layers):
        cache(layer, f"$.layers[{i}]")
    for i, given in enumerate(manifest.layer_inputs):
        role(given.rows, f"$.layer_inputs[{i}].rows")
    return problems


def tensor_json(info: TensorInfo) -> dict[str, object]:
    """A tensor's entry in the manifest."""
    return {key: getattr(info, key) for key in ("dtype", "shape", "bytes", "stored", "encoding", "blake3")}
