"""The container: what is written reads back, in the specified bytes, and each defect is named as what it is."""

import dataclasses
import json
import os
import subprocess
import sys
import threading
import tracemalloc

import blake3
import mlx.core as mx
import numpy as np
import pytest
import safetensors.numpy
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from formats import errors
from formats.check import check
from formats.container import TensorPlan, open_container, write_container
from formats.manifest import ITEM_BYTES, Manifest, Tokens, parse, to_json
from tests.container_cases import (
    NUMPY,
    forge,
    outer_text,
    plain_read,
    plans,
    seal,
    small_arrays,
    small_manifest,
    split,
    tiny_manifest,
    tiny_plans,
)


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.kv"
    write_container(path, small_manifest(), plans(small_arrays()))
    return path


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.kv"
    write_container(path, tiny_manifest(), tiny_plans())
    return path


def refused(path, data: bytes, error: type[errors.KVError], text: str = "") -> None:
    """The bytes are refused with this very class when opened, and check names it too."""
    path.write_bytes(data)
    with pytest.raises(errors.KVError) as caught, open_container(path):
        pass
    assert type(caught.value) is error, caught.value
    assert text in str(caught.value)
    assert str(caught.value).startswith(f"{path}: ")
    problems = check(path)
    assert error.__name__ in [problem.error for problem in problems]
    assert {problem.exit_code for problem in problems} <= {3, 4}


# -- what is written reads back


def test_reads_back(small):
    with open_container(small) as reader:
        assert reader.manifest == small_manifest()
        assert list(reader.tensors) == list(small_arrays())
        assert reader.tensors["layers.1.k.1.x"].encoding == "zstd"
        assert reader.verify() == []
        for name, (dtype, array) in small_arrays().items():
            for verify in (True, False):
                got = reader.array(name, verify=verify)
                assert got.dtype == array.dtype and got.shape == array.shape and got.tobytes() == array.tobytes()
                assert not got.flags.writeable or not got.size
            assert reader.tensors[name].dtype == dtype
    assert check(small) == []


def test_bytes_follow_the_specification(small):
    manifest, arrays = plain_read(small.read_bytes())
    assert parse(manifest) == small_manifest()
    for name, (_, array) in small_arrays().items():
        assert arrays[name].tobytes() == array.tobytes() and arrays[name].shape == array.shape


def test_report_and_progress(tmp_path):
    seen = []
    report = write_container(
        tmp_path / "a", small_manifest(), plans(small_arrays()), progress=lambda done, total: seen.append((done, total))
    )
    size = os.path.getsize(tmp_path / "a")
    assert report.file_bytes == size == report.header_bytes + report.tensor_bytes and report.path == str(tmp_path / "a")
    assert [done for done, _ in seen] == list(np.cumsum([array.nbytes for _, array in small_arrays().values()]))
    assert {total for _, total in seen} == {seen[-1][0]}


def test_other_libraries_open_it(small, tmp_path):
    flat = {name: array for name, (dtype, array) in small_arrays().items() if dtype != "BF16" and name != "layers.1.k.1.x"}
    with safetensors.safe_open(small, "np") as file:
        assert set(file.keys()) == set(small_arrays())
        assert set(file.metadata()) == {"format", "header_blake3", "kvtool"}
        for name, array in flat.items():
            got = file.get_tensor(name)
            assert got.ndim == 1 and got.dtype == array.dtype
            assert got[: array.size].tobytes() == array.tobytes() and not got[array.size :].any()
    (tmp_path / "small.safetensors").write_bytes(small.read_bytes())
    loaded = mx.load(str(tmp_path / "small.safetensors"))
    assert set(loaded) == set(small_arrays())
    assert loaded["layers.0.v.0.x"].dtype == mx.bfloat16
    assert np.array(loaded["layers.0.v.0.x"].view(mx.uint16))[:40].tobytes() == small_arrays()["layers.0.v.0.x"][1].tobytes()
    for name, array in flat.items():
        assert np.array(loaded[name])[: array.size].tobytes() == array.tobytes()


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_tensor_reads_back(tmp_path_factory, data):
    arrays = {}
    for i in range(data.draw(st.integers(0, 4))):
        dtype = data.draw(st.sampled_from(sorted(ITEM_BYTES)))
        shape = tuple(data.draw(st.lists(st.integers(0, 9), max_size=4)))
        kind = np.dtype(NUMPY[dtype])
        size = int(np.prod(shape)) * kind.itemsize
        fill = data.draw(st.sampled_from(["random", "zero"]))
        content = np.random.default_rng(i).integers(0, 2 if dtype == "BOOL" else 256, size, dtype=np.uint8)
        arrays[f"t{i}"] = (dtype, (content if fill == "random" else content * 0).view(kind).reshape(shape))
    path = tmp_path_factory.mktemp("any") / "a.kv"
    manifest = dataclasses.replace(tiny_manifest(), layers=())
    write_container(path, manifest, plans(arrays), compress=data.draw(st.booleans()))
    assert check(path) == []
    with open_container(path) as reader:
        for name, (_, array) in arrays.items():
            got = reader.array(name)
            assert got.shape == array.shape and got.dtype == array.dtype and got.tobytes() == array.tobytes()
    plain_read(path.read_bytes())


def test_manifest_given_at_the_end(tmp_path):
    # Once with room for it, once without: the tensors then move up, and the file differs only in how its header is padded.
    called = []

    def manifest() -> Manifest:
        called.append(True)
        return small_manifest()

    arrays = small_arrays() | {"big": ("U8", np.random.default_rng(0).integers(0, 256, 3_000_001, dtype=np.uint8))}
    for name, reserve in (("room", 1 << 16), ("none", 0)):
        path = tmp_path / name
        write_container(path, manifest, plans(arrays), reserve=reserve)
        assert check(path) == []
        with open_container(path) as reader:
            assert reader.manifest == small_manifest()
            assert reader.array("big").tobytes() == arrays["big"][1].tobytes()
            assert reader.array("layers.0.k.0.x").tobytes() == arrays["layers.0.k.0.x"][1].tobytes()
    assert len(called) == 2


def test_same_input_same_bytes(small, tmp_path):
    write_container(tmp_path / "again", small_manifest(), plans(small_arrays()))
    assert (tmp_path / "again").read_bytes() == small.read_bytes()


def test_compression_only_where_it_saves(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {
        "noise": ("U8", rng.integers(0, 256, 1_000_000, dtype=np.uint8)),
        "skewed": ("U8", rng.integers(0, 4, 1_000_000, dtype=np.uint8)),
        # The samples look compressible, the whole is not: written twice, kept raw.
        "trap": ("U8", rng.integers(0, 256, 8_000_000, dtype=np.uint8)),
        # 10 MB of zeros would expand more than 1024-fold.
        "zeros": ("U8", np.zeros(10_000_000, np.uint8)),
        "short": ("U8", np.zeros(60, np.uint8)),
    }
    step = (8_000_000 - (1 << 16)) // 3
    for i in range(4):
        arrays["trap"][1][i * step : i * step + (1 << 16)] = 0
    manifest = dataclasses.replace(tiny_manifest(), layers=())
    write_container(tmp_path / "a", manifest, plans(arrays))
    with open_container(tmp_path / "a") as reader:
        encodings = {name: info.encoding for name, info in reader.tensors.items()}
        assert encodings == {"noise": "none", "skewed": "zstd", "trap": "none", "zeros": "none", "short": "none"}
        assert reader.tensors["skewed"].stored < 320_000
        assert reader.verify() == []
        for name, (_, array) in arrays.items():
            assert reader.array(name).tobytes() == array.tobytes()
    write_container(tmp_path / "b", manifest, plans(arrays), compress=False)
    with open_container(tmp_path / "b") as reader:
        assert {info.encoding for info in reader.tensors.values()} == {"none"}


def test_reading_raw_copies_nothing_and_opening_is_cheap(tmp_path):
    size = 40_000_000
    data = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
    manifest = dataclasses.replace(tiny_manifest(), layers=())
    tracemalloc.start()
    write_container(tmp_path / "a", manifest, [TensorPlan("a", "U8", (size,), lambda: data)])
    assert tracemalloc.get_traced_memory()[1] < 12_000_000  # chunks and zstd's own state only; the tensor was there before
    tracemalloc.reset_peak()
    with open_container(tmp_path / "a") as reader:
        got = reader.array("a")
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()
    # The view outlives the reader.
    assert got[-1] == data[-1] and np.array_equal(got, data)


def test_two_tensors_in_memory_at_a_time(tmp_path):
    alive = []

    def produce(i: int) -> np.ndarray:
        tracemalloc.reset_peak()
        alive.append(tracemalloc.get_traced_memory()[0])
        return np.random.default_rng(i).integers(0, 256, 4_000_000, dtype=np.uint8)

    tracemalloc.start()
    manifest = dataclasses.replace(tiny_manifest(), layers=())
    write_container(tmp_path / "a", manifest, [TensorPlan(f"t{i}", "U8", (4_000_000,), lambda i=i: produce(i)) for i in range(6)])
    tracemalloc.stop()
    # The one that is being written, while the next is produced; its copy is a chunk.
    assert max(alive) - alive[0] < 4_000_000 + 2_500_000


def test_small_tensors_wait_beside_a_large_one_up_to_a_megabyte(tmp_path, monkeypatch):
    """While the first is written, the caller goes on until what waits is too much."""
    sizes, produced, held = [4_000_000, *[200_000] * 9, 4_000_000], [], threading.Event()
    real = os.write

    def write(fd, view):
        held.wait(20)
        return real(fd, view)

    def produce(i: int) -> bytes:
        produced.append(i)
        if i == 6:  # the first and five small ones wait
            seen.append(list(produced))
            held.set()
        return bytes(sizes[i])

    seen = []
    monkeypatch.setattr(os, "write", write)
    manifest = dataclasses.replace(tiny_manifest(), layers=())
    tensors = [TensorPlan(f"t{i}", "U8", (size,), lambda i=i: produce(i)) for i, size in enumerate(sizes)]
    write_container(tmp_path / "a", manifest, tensors, compress=False)
    assert seen == [list(range(7))] and produced == list(range(11)) and check(tmp_path / "a") == []


def test_replaced_or_unlinked_while_open(small, tmp_path):
    arrays = small_arrays()
    with open_container(small) as reader:
        write_container(small, tiny_manifest(), tiny_plans())
        assert reader.array("layers.0.k.0.x").tobytes() == arrays["layers.0.k.0.x"][1].tobytes()
        small.unlink()
        assert reader.verify() == []
        assert reader.array("layers.1.k.1.x").tobytes() == arrays["layers.1.k.1.x"][1].tobytes()


def test_rewriting_the_file_that_is_being_read(small):
    with open_container(small) as reader:
        copies = [TensorPlan(n, i.dtype, i.shape, lambda n=n: reader.array(n)) for n, i in reader.tensors.items()]
        before = small.read_bytes()
        write_container(small, reader.manifest, copies)
    assert small.read_bytes() == before


def test_buffer_changed_after_write(tmp_path):
    data = np.arange(100, dtype=np.uint32)
    manifest = dataclasses.replace(tiny_manifest(), layers=())
    write_container(tmp_path / "a", manifest, [TensorPlan("a", "U32", (100,), lambda: data.data)])
    data[:] = 0
    with open_container(tmp_path / "a") as reader:
        assert reader.array("a").tolist() == list(range(100))


def test_check_reads_only_and_needs_no_mlx(small):
    code = f"""if True:
        import sys
        from formats.check import check
        import formats.bitpack, formats.foreign.mlx_lm
        assert check({str(small)!r}) == []
        assert not any(name.split(".")[0] in ("mlx", "mlx_lm") for name in sys.modules)
    """
    before = (small.stat().st_mtime_ns, small.read_bytes())
    subprocess.run([sys.executable, "-c", code], check=True)
    assert (small.stat().st_mtime_ns, small.read_bytes()) == before


def test_buffer_changed_during_write(tmp_path, monkeypatch):
    data = np.zeros(3_000_000, np.uint8)
    real = os.write

    def write(fd, view):
        data[:] += 1
        return real(fd, view)

    monkeypatch.setattr(os, "write", write)
    manifest = dataclasses.replace(tiny_manifest(), layers=())
    write_container(tmp_path / "a", manifest, [TensorPlan("a", "U8", (3_000_000,), lambda: data)], compress=False)
    assert data[0] > 2 and check(tmp_path / "a") == []


def test_failed_compression_leaves_nothing_behind(tmp_path):
    data = np.random.default_rng(0).integers(0, 256, 64, dtype=np.uint8)
    manifest = dataclasses.replace(tiny_manifest(), layers=())
    report = write_container(tmp_path / "a", manifest, [TensorPlan("a", "U8", (64,), lambda: data)])
    assert report.tensor_bytes == 64 and os.path.getsize(tmp_path / "a") == report.file_bytes
    assert check(tmp_path / "a") == []


# -- the caller's mistakes


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (TensorPlan("../x", "U8", (1,), lambda: b"a"), "tensor name"),
        (TensorPlan("", "U8", (1,), lambda: b"a"), "tensor name"),
        (TensorPlan("__metadata__", "U8", (1,), lambda: b"a"), "tensor name"),
        (TensorPlan("x", "F64", (1,), lambda: bytes(8)), "dtype"),
        (TensorPlan("x", "U8", (-1,), lambda: b""), "shape"),
        (TensorPlan("x", "U8", (2,), lambda: b"a"), "2 bytes, but got 1"),
        (TensorPlan("x", "F16", (2,), lambda: np.zeros(2, np.float32)), "must be float16"),
        (TensorPlan("x", "U8", (2, 1), lambda: np.zeros((1, 2), np.uint8)), r"\(1, 2\)"),
        (TensorPlan("x", "F16", (2,), lambda: np.zeros(2, ">f2")), "must be float16"),
        (TensorPlan("x", "BOOL", (2,), lambda: b"\x00\x02"), "BOOL"),
    ],
)
def test_bad_plans(tmp_path, plan, text):
    with pytest.raises(ValueError, match=text):
        write_container(tmp_path / "a", dataclasses.replace(tiny_manifest(), layers=()), [plan])
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"length": 2}, "usable tokens"),
        ({"extra": {"x": float("nan")}}, "NaN|nan|JSON"),
        ({"extra": {"x": "\ud800"}}, "surrogates"),
        ({"schema": 0}, "schema"),
        ({"tokens": Tokens((1,), "00" * 32)}, "digest"),
        ({"codecs": ()}, "codec"),
    ],
)
def test_bad_manifests(tmp_path, change, text):
    with pytest.raises(ValueError, match=text):
        write_container(tmp_path / "a", dataclasses.replace(tiny_manifest(), **change), tiny_plans())
    with pytest.raises(ValueError, match=text):
        write_container(tmp_path / "a", lambda: dataclasses.replace(tiny_manifest(), **change), tiny_plans())
    with pytest.raises(ValueError, match="no tensor 'k'"):
        write_container(tmp_path / "a", tiny_manifest(), [])
    with pytest.raises(ValueError, match="must differ"):
        write_container(tmp_path / "a", tiny_manifest(), tiny_plans() * 2)
    assert os.listdir(tmp_path) == []


# -- damage


def test_every_flipped_bit_is_found(tiny, tmp_path):
    data = bytearray(tiny.read_bytes())
    path = tmp_path / "flipped"
    path.write_bytes(data)
    fd = os.open(path, os.O_WRONLY)
    missed = []
    for i in range(len(data)):
        for bit in range(8):
            os.pwrite(fd, bytes([data[i] ^ 1 << bit]), i)
            if not check(path):
                missed.append((i, bit))
        os.pwrite(fd, data[i : i + 1], i)
    os.close(fd)
    assert missed == [] and check(path) == []


def test_flipped_bits_in_every_section(small, tmp_path):
    data = bytearray(small.read_bytes())
    path = tmp_path / "flipped"
    rng = np.random.default_rng(0)
    with open_container(small) as reader:
        tensors = list(reader.tensors.values())
        header = reader.header_bytes
    for i in rng.choice(header, 300, replace=False):
        path.write_bytes(data[:i] + bytes([data[i] ^ 1 << int(rng.integers(8))]) + data[i + 1 :])
        with pytest.raises(errors.KVError), open_container(path):
            pass
        assert check(path)
    for info in tensors:
        for offset in {0, info.stored // 2, info.stored - 1, info.stored, info.padded - 1} if info.padded else ():
            at = info.offset + min(offset, info.padded - 1)
            path.write_bytes(data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :])
            with open_container(path) as reader:
                assert [(d.tensor, type(d.error)) for d in reader.verify()] == [(info.name, errors.DigestError)]
                with pytest.raises(errors.DigestError, match=info.name) as caught:
                    reader.array(info.name)
                assert caught.value.exit_code == 4
            assert [p.error for p in check(path)] == ["DigestError"]


def test_every_truncation_is_found(small, tmp_path):
    data = small.read_bytes()
    path = tmp_path / "short"
    sizes = list(range(80)) + list(range(80, len(data), 37)) + [len(data) - 1]
    for size in sizes:
        error = errors.NotKvtoolError if size == 0 else errors.TruncatedError
        refused(path, data[:size], error)


def test_token_ids_tampered(small, tmp_path):
    data = small.read_bytes()
    manifest = split(data)[1]
    manifest["tokens"]["ids"][0] += 1
    refused(tmp_path / "a", forge(data, manifest=manifest), errors.DigestError, "token ids")


# -- forged files: the header digest is right, the content is not


def test_forging_unchanged_is_sound(small, tmp_path):
    (tmp_path / "a").write_bytes(forge(small.read_bytes()))
    assert check(tmp_path / "a") == []
    with open_container(tmp_path / "a") as reader:
        assert reader.manifest == small_manifest()


@pytest.mark.parametrize("length", [2**60, 2**63, 2**64 - 1, 100_000_001])
def test_forged_header_length(tiny, tmp_path, length):
    data = tiny.read_bytes()
    tracemalloc.start()
    refused(tmp_path / "a", length.to_bytes(8, "little") + data[8:], errors.HeaderError, str(length))
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


def test_header_lengths(tiny, tmp_path):
    data = tiny.read_bytes()
    path = tmp_path / "a"
    refused(path, (100_000_000).to_bytes(8, "little") + data[8:], errors.TruncatedError)
    refused(path, bytes(8) + data[8:], errors.HeaderError, "less than")
    length = int.from_bytes(data[:8], "little")
    refused(path, (length - 64).to_bytes(8, "little") + data[8:], errors.HeaderDigestError)
    outer, manifest, tail = split(data)
    text = outer_text(outer, manifest)
    refused(path, seal(text + " " * (1 - (8 + len(text)) % 64), tail, align=False), errors.HeaderError, "multiple of 64")


def edited(data: bytes, name: str, **change) -> bytes:
    outer = split(data)[0]
    outer[name].update(change)
    return forge(data, outer)


def test_forged_layout(small, tmp_path):
    data, path, name = small.read_bytes(), tmp_path / "a", "layers.0.v.0.x"
    begin, end = split(data)[0][name]["data_offsets"]
    half = split(data)[0][name]["shape"][0]
    for change, text in [
        ({"data_offsets": [begin - 64, end - 64]}, "overlap"),
        ({"data_offsets": [begin + 64, end + 64]}, "gap"),
        ({"data_offsets": [begin, end - 64]}, "needs"),
        ({"data_offsets": [end, begin]}, "after its end"),
        ({"data_offsets": [begin, 2**62]}, "needs"),
        ({"data_offsets": [-64, end]}, "non-negative"),
        ({"data_offsets": [begin]}, "two non-negative"),
        ({"data_offsets": [float(begin), end]}, "two non-negative"),
        ({"data_offsets": [True, end]}, "two non-negative"),
        ({"shape": [half + 1]}, "needs"),
        ({"shape": [-half]}, "integers in 0"),
        ({"shape": [-1, -half]}, "integers in 0"),
        ({"shape": [2**32, 2**32]}, "needs"),
        ({"shape": [2**62, 4]}, "integers in 0"),
        ({"shape": [2**48] * 32}, "needs"),
        ({"shape": [1] * 33}, "at most 32"),
        ({"shape": half}, "at most 32"),
        ({"shape": [2, half // 2]}, "one dimension"),
        ({"dtype": "F99"}, "dtype"),
        ({"dtype": 5}, "dtype"),
        ({"dtype": "F32"}, "needs"),
        ({"dtype": "I16"}, "laid out as"),
    ]:  # fmt: skip
        refused(path, edited(data, name, **change), errors.LayoutError, text)
    refused(path, edited(data, name, more=1), errors.HeaderError, "exactly dtype")
    outer = split(data)[0]
    outer[name] = None
    refused(path, forge(data, outer), errors.HeaderError, "exactly dtype")
    outer = split(data)[0]
    outer = {key: outer[key] for key in ["__metadata__", *reversed(list(outer)[1:])]}
    refused(path, forge(data, outer), errors.LayoutError, "gap")


def test_past_the_end_and_trailing_bytes(small, tmp_path):
    data, path = small.read_bytes(), tmp_path / "a"
    outer, manifest, _ = split(data)
    last = list(outer)[-1]
    begin = outer[last]["data_offsets"][0]
    outer[last] |= {"data_offsets": [begin, begin + 2**40], "shape": [2**38]}
    manifest["tensors"][last] |= {"stored": 2**40, "bytes": 2**40, "shape": [2**38]}
    refused(path, forge(data, outer, manifest), errors.TruncatedError, "the file has")
    for extra in (b"\0", b" " * 64, data):
        refused(path, data + extra, errors.TrailingBytesError, f"{len(extra)} bytes too many")


def test_misaligned_tensors(tmp_path, tiny):
    data = tiny.read_bytes()
    outer, manifest, tail = split(data)
    outer["k"] |= {"data_offsets": [0, 32], "shape": [16]}
    manifest["tensors"]["k"] |= {"blake3": blake3.blake3(tail[:32]).hexdigest()}
    refused(tmp_path / "a", forge(data, outer, manifest, tail[:32]), errors.LayoutError, "multiples of 64")


def test_nonzero_padding(tiny, tmp_path):
    data = tiny.read_bytes()
    _, manifest, tail = split(data)
    for at in (8, 63):
        bad = tail[:at] + b"\x01" + tail[at + 1 :]
        manifest["tensors"]["k"]["blake3"] = blake3.blake3(bad).hexdigest()
        path = tmp_path / "a"
        path.write_bytes(forge(data, manifest=manifest, tail=bad))
        assert [p.error for p in check(path)] == ["PaddingError"]
        with open_container(path) as reader, pytest.raises(errors.PaddingError, match="56 padding bytes"):
            reader.array("k", verify=False)


def test_bool_bytes(tmp_path, small):
    data = small.read_bytes()
    _, manifest, tail = split(data)
    begin = split(data)[0]["layers.2.a.2"]["data_offsets"][0]
    bad = tail[:begin] + b"\x02" + tail[begin + 1 :]
    manifest["tensors"]["layers.2.a.2"]["blake3"] = blake3.blake3(bad[begin : begin + 64]).hexdigest()
    (tmp_path / "a").write_bytes(forge(data, manifest=manifest, tail=bad))
    assert [p.error for p in check(tmp_path / "a")] == ["LayoutError"]


def zstd_file(frame: bytes, size: int) -> bytes:
    """A file of one U8 tensor of `size` bytes in this frame."""
    stored = frame + bytes(-len(frame) % 64)
    tensor = {
        "dtype": "U8",
        "shape": [size],
        "bytes": size,
        "stored": len(frame),
        "encoding": "zstd",
        "blake3": blake3.blake3(stored).hexdigest(),
    }
    manifest = to_json(dataclasses.replace(tiny_manifest(), layers=())) | {"tensors": {"k": tensor}}
    outer = {"k": {"dtype": "U8", "shape": [len(stored)], "data_offsets": [0, len(stored)]}}
    return seal(outer_text(outer, manifest), stored)


def without_size(plain: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=False).compress(plain)


def test_zstd_frames(tmp_path):
    plain = bytes(range(256)) * 8
    frame = zstandard.ZstdCompressor().compress(plain)
    path = tmp_path / "a"
    path.write_bytes(zstd_file(frame, 2048))
    assert check(path) == []
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 26))
    assert len(bomb) < 1 << 12
    # The size is in the frame header's bytes 5 and 6: 256 + the number there.
    lying = bytearray(frame)
    lying[5:7] = (1024 - 256).to_bytes(2, "little")
    assert zstandard.get_frame_parameters(bytes(lying)).content_size == 1024
    for bad, size, text in [
        (frame, 2047, "gives 2048 bytes, recorded are 2047"),
        (frame, 2049, "gives 2048 bytes"),
        (bytes(lying), 1024, "corrupt"),
        (bytes(lying), 2048, "gives 1024"),
        (without_size(plain), 2048, "gives"),
        (frame + frame, 2048, "corrupt"),
        (frame + b"\0", 2048, "corrupt"),
        (frame[:-1], 2048, "corrupt"),
        (frame[:3], 2048, "corrupt"),
        (b"\x50\x2a\x4d\x18" + bytes(4) + frame, 2048, "gives 0 bytes"),
        (b"not a frame", 2048, "corrupt"),
        (bomb, len(bomb) * 1024, "gives"),
    ]:
        path.write_bytes(zstd_file(bad, size))
        tracemalloc.start()
        assert [p.error for p in check(path)] == ["CompressionError"], text
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
        tracemalloc.stop()
        with open_container(path) as reader, pytest.raises(errors.CompressionError, match=text):
            reader.array("k", verify=False)
    # An honest bomb is refused before anything is decompressed.
    refused(path, zstd_file(bomb, 1 << 26), errors.LayoutError, "1024-fold")


@pytest.mark.parametrize("name", ["../../etc/passwd", "a/b", "a\\b", "a\0b", "", "a..b", ".x", "x" * 201, "ä", "a b"])
def test_tensor_names(tiny, tmp_path, name):
    data = tiny.read_bytes()
    outer, manifest, _ = split(data)
    outer[name] = outer.pop("k")
    manifest["tensors"] = {name: manifest["tensors"]["k"]}
    manifest["layers"][0]["k"]["segments"][0]["tensors"]["x"] = name
    refused(tmp_path / "a", forge(data, outer, manifest), errors.LayoutError, "not allowed")


def replaced(data: bytes, old: str, new: str, *, manifest: bool) -> bytes:
    """The file with a piece of header or manifest text replaced, sealed again."""
    outer, inner, tail = split(data)
    text = json.dumps(inner, separators=(",", ":")) if manifest else outer_text(outer, inner)
    assert text.count(old) == 1
    text = text.replace(old, new)
    return seal(outer_text(outer, text) if manifest else text, tail)


@pytest.mark.parametrize(
    ("old", "new", "manifest", "text"),
    [
        ('"length":1', '"length":1,"length":1', True, "duplicate key 'length'"),
        ('"length":1', '"length":NaN', True, "NaN"),
        ('"length":1', '"length":-Infinity', True, "Infinity"),
        ('"length":1', '"length":1e999', True, "out of range"),
        ('"length":1', '"length":' + "9" * 5000, True, "20 digits"),
        ('"extra":{}', '"extra":' + "[" * 100_000 + "]" * 100_000, True, "deep"),
        ('"extra":{}', '"extra":' + '{"a":' * 33 + "1" + "}" * 33, True, "deep"),
        ('"extra":{}', '"extra":[' + "0," * (1 << 22) + "0]", True, "elements, more than 4194304"),
        ('"extra":{}', '"extra":{"a":"\\ud800"}', True, "surrogate"),
        ('"extra":{}', '"extra":{"a":1,}', True, "not JSON"),
        ('"extra":{}', '"extra":{"a":"\n"}', True, "not JSON"),
        ('"extra":{}', '"extra":{}}', True, "not JSON"),
        ('"extra":{}', '"extra":"', True, "not JSON"),
        ('"dtype":"F16","shape":[32]', '"dtype":"F16","dtype":"F16","shape":[32]', False, "duplicate key 'dtype'"),
        ('"dtype":"F16","shape":[32]', '"dtype":' + "[" * 100_000, False, "deep"),
        ('"format":"kvtool",', '"format":"kvtool",', False, None),
    ],
)
def test_hostile_json(tiny, tmp_path, old, new, manifest, text):
    data = replaced(tiny.read_bytes(), old, new, manifest=manifest)
    if text is None:
        (tmp_path / "a").write_bytes(data)
        assert check(tmp_path / "a") == []
        return
    refused(tmp_path / "a", data, errors.HeaderError, text)


def test_header_not_utf8_and_metadata(tiny, tmp_path):
    outer, manifest, tail = split(tiny.read_bytes())
    text = outer_text(outer, manifest)
    path = tmp_path / "a"
    refused(path, seal(text.encode().replace(b'"k":', b'"\xff":'), tail), errors.HeaderError, "UTF-8")
    refused(path, seal(text.replace('","kvtool":', '","more":"x","kvtool":'), tail), errors.HeaderError, "__metadata__ must have")
    refused(path, seal(text.replace('","kvtool":', '","kvtoo":'), tail), errors.HeaderError, "__metadata__ must have")
    refused(path, seal(text.replace('","kvtool":', '","kvtool":1,"x":'), tail), errors.HeaderError, "object of strings")
    refused(path, seal(outer_text(outer, "[]"), tail), errors.ManifestError, "$: must be an object")


def edits() -> list[tuple[str, object, type[errors.KVError], str]]:
    missing = object()
    manifest, fmt, version, layout = None, errors.ManifestError, errors.VersionError, errors.LayoutError
    keys = ["schema", "requires", "producer", "model", "tokens", "length", "codecs", "ropes", "layers", "quality", "extra", "tensors"]
    cases = [(key, missing, fmt, f"'{key}' is missing") for key in keys]
    cases += [(key, 3.5, fmt, f"$.{key}: must be") for key in keys if key != "tokens"]
    for parent, names in {
        "model": ["name", "architecture", "weights", "tokenizer", "dtype"],
        "tokens": ["ids", "blake3"],
        "layers.0": ["cls", "attention", "window", "offset", "positions", "k", "v", "arrays", "params", "caches"],
        "layers.0.k": ["heads", "dim", "dtype", "rope", "segments"],
        "layers.0.k.segments.0": ["rows", "codec", "frame", "tensors"],
        "layers.2.arrays.0": ["dtype", "shape", "tensor"],
        "codecs.0": ["id", "params"],
        "ropes.0": ["kind", "dims", "pairing", "base", "scale", "periods", "magnitude", "first"],
        "quality.0": ["step"],
        "tensors.layers!0!k!0!x": ["dtype", "shape", "bytes", "stored", "encoding", "blake3"],
    }.items():
        for name in names:
            cases.append((f"{parent}.{name}", missing, fmt, f"'{name}' is missing"))
            cases.append((f"{parent}.{name}", {"list": True}, fmt if name not in ("params", "tensors") else None, name))
    big = 1 << 62
    cases += [
        ("schema", 2, version, "newer than 1"),
        ("schema", 0, fmt, "$.schema"),
        ("requires", ["time-travel"], version, "time-travel"),
        ("length", 7, fmt, "only 6 token ids"),
        ("length", -1, fmt, "must be in 0"),
        ("length", True, fmt, "an integer"),
        ("tokens.ids.0", -1, fmt, "token ids"),
        ("tokens.ids.0", 2**31, fmt, "token ids"),
        ("tokens.ids.0", 9_999_999_999_999_999_999, fmt, "token ids"),
        ("tokens.ids.0", 1.0, fmt, "other than integers"),
        ("tokens.blake3", "A" * 64, fmt, "malformed"),
        ("tokens.blake3", "a" * 64, errors.DigestError, "token ids"),
        ("model.weights", "xyz", fmt, "malformed"),
        ("producer.mlx", 1, fmt, "$.producer.mlx"),
        ("layers.0.attention", "linear", fmt, "must be one of"),
        ("layers.0.window", 0, fmt, "window"),
        ("layers.0.positions", [[0, 4]], fmt, "segments end at row 5, but positions give 4"),
        ("layers.0.positions", [[5, 0]], fmt, "reversed"),
        ("layers.0.positions", [[-1, 4]], fmt, "must be in 0"),
        ("layers.0.positions", [[0, 1, 2]], fmt, "2 numbers"),
        ("layers.0.positions", [[0, big], [0, big], [0, big]], fmt, "segments end"),
        ("layers.0.k.segments", [], fmt, "segments end at row 0"),
        ("layers.1.k.segments.1.rows", [2, 253], fmt, "must start at 3"),
        ("layers.1.k.segments.1.rows", [4, 253], fmt, "must start at 3"),
        ("layers.0.k.segments.0.codec", 2, fmt, "must be in 0 .. 1"),
        ("layers.0.k.segments.0.frame", "mid", fmt, "must be one of"),
        ("layers.0.k.segments.0.tensors.x", "nothing", fmt, "no tensor 'nothing'"),
        ("layers.3.caches.0.arrays.0.tensor", "nothing", fmt, "$.layers[3].caches[0].arrays[0].tensor"),
        ("layers.0.k.rope", 2, fmt, "must be in 0 .. 1"),
        ("layers.0.k.dtype", "U8", fmt, "must be one of"),
        ("ropes", [], fmt, "no rope"),
        ("ropes.0.dims", 3, fmt, "even"),
        ("ropes.0.base", None, fmt, "exactly one"),
        ("ropes.1.base", 5.0, fmt, "exactly one"),
        ("ropes.1.periods", [1.0], fmt, "1 periods for 4 dims"),
        ("codecs", [], fmt, "no codec"),
        ("tensors.more", {}, fmt, "no such tensor"),
        ("tensors.layers!0!k!0!x", missing, fmt, "is missing"),
        ("tensors.layers!0!k!0!x.shape", [2, 5, 5], layout, "needs 100 bytes"),
        ("tensors.layers!0!k!0!x.shape", [2**48] * 30, layout, "needs"),
        ("tensors.layers!0!k!0!x.shape", [1] * 40, layout, "32 dimensions"),
        ("tensors.layers!0!k!0!x.shape", [-2, -20], fmt, "must be in 0"),
        ("tensors.layers!0!k!0!x.bytes", 82, layout, "recorded are 82"),
        ("tensors.layers!0!k!0!x.stored", 82, layout, "stored without compression"),
        ("tensors.layers!0!k!0!x.stored", 10, layout, "with padding"),
        ("tensors.layers!0!k!0!x.dtype", "F64", fmt, "must be one of"),
        ("tensors.layers!0!k!0!x.dtype", "BF16", layout, "laid out as"),
        ("tensors.layers!0!k!0!x.encoding", "lz4", fmt, "must be one of"),
        ("tensors.layers!0!k!0!x.encoding", "zstd", layout, "laid out as"),
        ("tensors.layers!0!k!0!x.blake3", "00", fmt, "malformed"),
    ]  # fmt: skip
    assert manifest is None
    return [
        (where, value if value is not missing else "<missing>", error, text) for where, value, error, text in cases if error is not None
    ]


@pytest.mark.parametrize(("where", "value", "error", "text"), edits(), ids=lambda value: str(value)[:40] if isinstance(value, str) else "")
def test_manifest_fields(small, tmp_path, where, value, error, text):
    data = small.read_bytes()
    manifest = split(data)[1]
    *parents, last = [int(part) if part.isdigit() else part.replace("!", ".") for part in where.split(".")]
    node = manifest
    for part in parents:
        node = node[part]
    if value == "<missing>":
        del node[last]
    else:
        node[last] = value
    refused(tmp_path / "a", forge(data, manifest=manifest), error, text)


def test_unknown_fields_are_ignored(small, tmp_path):
    data = small.read_bytes()
    manifest = split(data)[1]
    for node in (manifest, manifest["model"], manifest["layers"][0], manifest["layers"][0]["k"], manifest["tokens"], manifest["codecs"][0]):
        node["from the future"] = [1]
    for entry in manifest["tensors"].values():
        entry["from the future"] = 1
    (tmp_path / "a").write_bytes(forge(data, manifest=manifest))
    assert check(tmp_path / "a") == []
    with open_container(tmp_path / "a") as reader:
        assert reader.manifest == small_manifest()


def test_nested_too_deep(tiny, tmp_path):
    data = tiny.read_bytes()
    manifest = split(data)[1]
    leaf = manifest["layers"][0] | {"k": None, "positions": []}
    for _ in range(8):
        leaf = leaf | {"caches": [leaf]}
    manifest["layers"] = [leaf]
    refused(tmp_path / "a", forge(data, manifest=manifest), errors.ManifestError, "nested more than 8 deep")


# -- not kvtool files


def test_other_files(tmp_path, tiny):
    path = tmp_path / "a"
    refused(path, b"", errors.NotKvtoolError, "empty")
    refused(path, b"kvtool", errors.TruncatedError, "6 bytes")
    refused(path, b"This is a text file, not a cache.\n" * 9, errors.HeaderError, "not a safetensors file")
    arrays = {"0.0": np.zeros((1, 2, 3, 4), np.float32), "0.1": np.zeros((1, 2, 3, 4), np.float32)}
    safetensors.numpy.save_file(arrays, path)
    refused(path, path.read_bytes(), errors.NotKvtoolError, "a safetensors file of 2 tensors")
    for version, metadata in ((1, {"0.0": "", "2.0": "KVCache"}), (2, {"1.0": "KVCache", "2.0": ""})):
        safetensors.numpy.save_file(arrays, path, metadata)
        refused(path, path.read_bytes(), errors.NotKvtoolError, f"mlx-lm prompt cache of version {version}")
    # Re-saved by a library whose order of the metadata changes from run to run: refused in whichever it is.
    with safetensors.safe_open(tiny, "np") as file:
        safetensors.numpy.save_file({"k": file.get_tensor("k")}, path, dict(reversed(file.metadata().items())))
    data = path.read_bytes()
    assert check(path)[0].error in ("HeaderError", "HeaderDigestError")
    refused(path, data.replace(b'"format"', b'"formaT"'), errors.HeaderDigestError, "another program")
    refused(path, (2).to_bytes(8, "little") + b"[]", errors.HeaderError, "start with")
    refused(path, (2).to_bytes(8, "little") + b"{}", errors.NotKvtoolError, "0 tensors")


def test_not_regular_files(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, text in ((tmp_path, "a folder"), (tmp_path / "pipe", "not a regular")):
        with pytest.raises(errors.NotKvtoolError, match=text) as caught:
            open_container(path)
        assert caught.value.path == str(path)
        assert [p.error for p in check(path)] == ["NotKvtoolError"]
    with pytest.raises(FileNotFoundError):
        open_container(tmp_path / "absent")
    with pytest.raises(FileNotFoundError):
        check(tmp_path / "absent")


def test_every_error_class_has_its_exit_code():
    def family(cls: type) -> list[type]:
        return [cls] + [sub for child in cls.__subclasses__() for sub in family(child)]

    codes = {3: errors.FormatError, 4: errors.IntegrityError, 5: errors.IncompatibleError, 6: errors.BackendError, 7: errors.QualityError}
    for code, root in codes.items():
        assert {cls.exit_code for cls in family(root)} == {code}
    error = errors.HeaderError("what", path="p", hint="h")
    assert (str(error), error.hint) == ("p: what", "h") and str(errors.HeaderError("what")) == "what"
