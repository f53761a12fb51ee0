"""Headers read by the outline of another: what they say, and what is wrong with them, is what reading them by themselves gives."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from formats.alike import Outline
from formats.container import Reader
from formats.errors import KVError
from formats.examine import DIGEST_AT, header_digest
from formats.manifest import Manifest
from kvtool.capturing import Snapshot
from kvtool.model import LoadedModel
from kvtool.probe import probe_model
from kvtool.states import CacheState
from kvtool.store.store import Store

ROWS, CHUNK = 5 * 64, 64


@pytest.fixture(scope="module")
def chunks(tiny_a: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Chunks of one prompt in the order of their tokens, and its end."""
    states, rng = [], np.random.default_rng(0)
    for probe in probe_model(tiny_a.model):
        k, v = (mx.array(rng.standard_normal((about.heads, ROWS, about.dim))).astype(about.dtype) for about in (probe.k, probe.v))
        states.append(CacheState("KVCache", "full", offset=ROWS, positions=((0, ROWS),), k=k, v=v))
    folder, tokens = tmp_path_factory.mktemp("store"), tuple(int(i) for i in rng.integers(2, 200, ROWS))
    Store(folder, chunk=CHUNK).put(Snapshot(tiny_a.info, tokens, ROWS, tuple(states), probe_model(tiny_a.model)), codec="rvq-4")
    found = [path for path in folder.rglob("*.kv") if "writing" not in path.parts]
    return sorted(found, key=lambda path: (Reader(path).manifest.layers[0].positions, "tails" in path.parts))


def outline(path: Path) -> Outline:
    found = Reader(path).outline()
    assert found is not None
    return found


def test_chunks_are_alike_but_for_the_first_and_the_end(chunks: list[Path]) -> None:
    like = outline(chunks[1])
    for path in chunks:
        by_it, alone = Reader(path, like), Reader(path)
        assert (by_it.manifest, by_it.tensors, by_it.header_bytes) == (alone.manifest, alone.tensors, alone.header_bytes)
        assert list(by_it.tensors) == list(alone.tensors) and not alone.alike
        assert by_it.alike == (path not in (chunks[0], chunks[-1]))  # exact rows are elsewhere in these
    assert not Reader(chunks[2], outline(chunks[0])).alike


def rewritten(path: Path, header: bytes, to: Path) -> Path:
    """A file with another header, as long, under a digest that is right."""
    data = path.read_bytes()
    raw = bytearray(data[: len(header)])
    raw[:] = header
    raw[DIGEST_AT : DIGEST_AT + 64] = header_digest(bytes(raw)).encode()
    to.write_bytes(bytes(raw) + data[len(header) :])
    return to


def outcome(path: Path, like: Outline | None) -> tuple:
    try:
        with Reader(path, like) as reader:
            return reader.manifest, reader.tensors
    except KVError as error:
        return type(error), str(error)


def test_what_is_wrong_is_said_as_without_it(chunks: list[Path], tmp_path: Path) -> None:
    like, path = outline(chunks[1]), chunks[2]
    header = path.read_bytes()[: Reader(path).header_bytes]
    for old, new in (
        (rb"\"offset\":192", rb"\"offset\":092"),  # no JSON
        (rb"\"offset\":192", rb"\"offset\":191"),
        (rb"\"positions\":[[128,192]]", rb"\"positions\":[[128,193]]"),
        (rb"\"positions\":[[128,192]]", rb"\"positions\":[[192,128]]"),
        (rb"\"start\":128", rb"\"start\":1.0"),
        (rb"\"ids\":[", rb"\"ids\":,"),
        (rb"\"step\":\"encode\"", rb"\"step\":[\"encod\""),
        (rb"\"step\":\"encode\"", rb"\"stop\":\"encode\""),
        (rb"\"k_relative_error\":0", rb"\"k_relative_error\":N"),
        (rb"\"quality\":[{", rb"\"quality\":[["),
        (rb"\"heads\":", rb"\"hands\":"),
        (rb"\"layers\":[{", rb"\"layers\":[["),
        (rb"\"blake3\":\"", rb"\"blake3\":\"X"),
    ):
        assert old in header and len(new) - len(old) in (0, 1)
        changed = header.replace(old, new, 1)[: len(header)]
        bad = rewritten(path, changed, tmp_path / "bad.kv")
        assert outcome(bad, like) == outcome(bad, None), (old, new)
    cut = tmp_path / "cut.kv"
    cut.write_bytes(path.read_bytes()[:-64])
    assert outcome(cut, like) == outcome(cut, None)
    flipped = tmp_path / "flipped.kv"
    flipped.write_bytes(header[:200] + b"#" + path.read_bytes()[201:])
    assert outcome(flipped, like) == outcome(flipped, None)


def test_any_change_of_a_character_reads_as_without_it(chunks: list[Path], tmp_path: Path) -> None:
    rng, like, path = np.random.default_rng(1), outline(chunks[1]), chunks[3]
    header, letters = path.read_bytes()[: Reader(path).header_bytes], b'0123456789abcf"\\{}[]:,. -eE#'
    alike = 0
    for _ in range(250):
        changed = bytearray(header)
        for at in rng.integers(DIGEST_AT + 64, len(header), 1):
            changed[at] = letters[rng.integers(len(letters))]
        bad = rewritten(path, bytes(changed), tmp_path / "bad.kv")
        assert outcome(bad, like) == outcome(bad, None), bytes(changed)
        alike += isinstance(outcome(bad, None)[0], Manifest) and Reader(bad, like).alike
    assert alike  # digits of errors and digests
