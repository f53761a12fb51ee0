"""Map files: what is written is read again, bytes depend on the content alone, and what is wrong is said."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from formats.errors import DigestError, FormatError, ManifestError, NotKvtoolError, TruncatedError, VersionError
from formats.manifest import ModelInfo
from formats.transfer_map import LayerMap, MapFile, from_bytes, read_map, to_bytes, write_map


def layer(rank: int | None, seed: int = 0) -> LayerMap:
    rng = np.random.default_rng(seed)
    left = rng.standard_normal((6, 16 if rank is None else rank)).astype(np.float16)
    right = None if rank is None else rng.standard_normal((rank, 16)).astype(np.float16)
    return LayerMap(("0", "2"), False, 2, 5, 3, 0.25, np.arange(6, dtype=np.float32), np.arange(16, dtype=np.float32), left, right)


def example() -> MapFile:
    a, b = (ModelInfo(name, "llama", letter * 64, "c" * 64, "float32") for name, letter in (("one", "a"), ("two", "b")))
    return MapFile(a, b, {"text": "d" * 64}, 1000, {"0": layer(None), "1": layer(4, 1)}, {"kvtool": "0"})


def edited(data: bytes, old: str, new: str) -> bytes:
    """The file with a word of its header replaced by one of the same length, and without the digest that would tell."""
    bare = unsealed(data)
    assert len(old) == len(new) and old.encode() in bare
    return bare.replace(old.encode(), new.encode(), 1)


def unsealed(data: bytes) -> bytes:
    """The file as an older program wrote it, without its own digest."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    del header["__metadata__"]["blake3"]
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-(8 + len(text)) // 64) * 64 - 8)
    return len(text).to_bytes(8, "little") + text + data[end:]


def test_round_trip(tmp_path: Path) -> None:
    digest = write_map(tmp_path / "a.map", example())
    found, same = read_map(tmp_path / "a.map")
    assert digest == same and to_bytes(found) == to_bytes(example())
    assert found.source == example().source and found.target == example().target and found.texts == example().texts
    for name, own in example().layers.items():
        there = found.layers[name]
        assert (there.sources, there.residual, there.out, there.unexplained) == (own.sources, own.residual, 16, 0.25)
        assert np.array_equal(there.left, own.left) and np.array_equal(there.source_mean, own.source_mean)
        assert (there.right is None) == (own.right is None)


def test_any_safetensors_reader_opens_it(tmp_path: Path) -> None:
    write_map(tmp_path / "a.map", example())
    assert load_file(tmp_path / "a.map")["1:right"].shape == (4, 16)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"left": np.zeros((5, 16), np.float16)}, r"left must be \(6, 16\), but got \(5, 16\)"),
        ({"right": np.zeros((3, 16), np.float16)}, r"left must be \(6, 3\), but got \(6, 16\)"),
        ({"right": np.zeros(3, np.float16)}, "must be"),
        ({"target_mean": np.zeros(15, np.float32)}, r"target_mean must be \(16,\)"),
        ({"source_mean": np.zeros(6)}, "source_mean must be float32"),
        ({"left": np.zeros((6, 16), np.int8)}, "left must be float32, or float16"),
        ({"left": np.full((6, 16), np.nan, np.float32)}, "NaN or infinity"),
        ({"sources": ()}, "sources must name at least one layer"),
        ({"heads": 0}, "must be in 1"),
    ],
)
def test_what_a_reader_would_refuse_is_not_written(change: dict, words: str) -> None:
    bad = replace(example(), layers={"0": replace(layer(None), **change)})
    with pytest.raises(ValueError, match=words):
        to_bytes(bad)


def test_names_a_layer_cannot_have() -> None:
    with pytest.raises(ValueError, match="names must be of A-Z"):
        to_bytes(replace(example(), layers={"a/b": layer(None)}))


@pytest.mark.parametrize("length", [0, 7, 8, 100, -1])
def test_truncated(length: int) -> None:
    with pytest.raises((NotKvtoolError, TruncatedError, FormatError)):
        from_bytes(to_bytes(example())[:length])


def test_newer_and_other_files() -> None:
    data = to_bytes(example())
    with pytest.raises(VersionError, match="2 is newer than 1"):
        from_bytes(edited(data, r"\"version\":1", r"\"version\":2"))
    with pytest.raises(NotKvtoolError, match="not a map"):
        from_bytes(edited(data, "kvtool-map", "kvtool-mop"))


def test_arrays_and_layers_must_agree() -> None:
    data = to_bytes(example())
    with pytest.raises(ManifestError, match="lacks"):
        from_bytes(edited(data, r"\"name\":\"1\"", r"\"name\":\"7\""))
    with pytest.raises(ManifestError, match="besides"):
        from_bytes(edited(data, '"1:right"', '"1:wrong"'))
    with pytest.raises(ManifestError, match="twice"):
        from_bytes(edited(data, r"\"name\":\"1\"", r"\"name\":\"0\""))


def test_every_byte_of_the_header_is_looked_at() -> None:
    """Flipped bits give a sound map or a named error, never another exception."""
    data = bytearray(to_bytes(example()))
    rng = np.random.default_rng(0)
    for at in rng.integers(0, 1500, 400):
        flipped = bytearray(data)
        flipped[at] ^= 1 << int(rng.integers(8))
        try:
            from_bytes(bytes(flipped))
        except (FormatError, DigestError):
            continue


def test_the_description_is_json() -> None:
    data = to_bytes(example())
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    body = json.loads(header["__metadata__"]["map"])
    assert body["source"]["name"] == "one" and [own["name"] for own in body["layers"]] == ["0", "1"]


def test_every_changed_byte_is_found() -> None:
    """Of the header and of the arrays; but for spaces that fill the header up, every one is refused."""
    data = to_bytes(example())
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 1
        if data[at] != 0x20:
            with pytest.raises((FormatError, DigestError)):
                from_bytes(bytes(changed))
    assert from_bytes(unsealed(data)).layers.keys() == example().layers.keys()
