"""Digests compared in threads before the tensors are asked for: the same errors, of the same tensors, as without."""

import threading

import numpy as np
import pytest

from formats import container
from formats.container import Reader, TensorPlan, open_container, write_container
from formats.errors import DigestError, KVError, ManifestError
from formats.examine import DIGEST_AT, header_digest
from tests.container_cases import tiny_manifest, tiny_plans

SIZES = {"a": container.AHEAD, "small": 64, "b": 3 * container.AHEAD, "c": 2 * container.AHEAD}


@pytest.fixture
def file(tmp_path):
    """A file of three large tensors and a small one, and their arrays."""
    draw = np.random.default_rng(0)
    arrays = {name: draw.integers(0, 256, size, np.uint8) for name, size in SIZES.items()}
    plans = [TensorPlan(name, "U8", x.shape, lambda x=x: x, compress=False) for name, x in arrays.items()]
    write_container(tmp_path / "f.kv", tiny_manifest(), tiny_plans() + plans)
    return tmp_path / "f.kv", arrays


@pytest.fixture(params=["asked for", "at once"])
def reading(request):
    """Opens a file and begins to hash its tensors: those that are asked for, or all of them while its header is read."""

    def opened(path, names):
        reader = open_container(path, ahead=request.param == "at once")
        if request.param == "at once":
            assert set(reader._ahead) == set(SIZES) - {"small"}
        reader.verify_ahead(names)
        return reader

    return opened


def test_arrays_are_those_of_the_file(file, reading):
    path, arrays = file
    with reading(path, list(arrays)) as reader:
        assert all(np.array_equal(reader.array(name), x) for name, x in arrays.items())
        assert all(np.array_equal(reader.array(name), x) for name, x in arrays.items())


@pytest.mark.parametrize("name", SIZES)
def test_a_flipped_bit_is_an_error_of_its_tensor_alone(file, name, reading):
    path, arrays = file
    with open_container(path) as reader:
        info = reader.tensors[name]
    data = bytearray(path.read_bytes())
    data[info.offset + info.bytes // 2] ^= 4
    path.write_bytes(data)
    with reading(path, list(arrays)) as reader:
        for other, x in arrays.items():
            if other == name:
                with pytest.raises(DigestError, match=f"{path}: tensor {name!r}"):
                    reader.array(name)
            else:
                assert np.array_equal(reader.array(other), x)
        with pytest.raises(DigestError):
            reader.array(name)
        assert [defect.tensor for defect in reader.verify()] == [name]


def test_a_tensor_is_hashed_once(file, monkeypatch, reading):
    path, arrays = file
    hashed = []
    check, digest = container.check_digest, Reader._digest
    monkeypatch.setattr(container, "check_digest", lambda data, info, *rest: (hashed.append(info.padded), check(data, info, *rest)))
    monkeypatch.setattr(Reader, "_digest", lambda self, start, stop: (hashed.append(stop - start), digest(self, start, stop))[1])
    with reading(path, list(arrays)) as reader:
        for name in arrays:
            reader.array(name)
    assert sorted(hashed) == sorted(SIZES.values())


def test_large_tensors_are_hashed_in_pieces(file, monkeypatch, reading):
    monkeypatch.setattr(container, "_PIECE", container.AHEAD // 2 + 64)
    path, arrays = file
    with reading(path, list(arrays)) as reader:
        assert all(np.array_equal(reader.array(name), x) for name, x in arrays.items())


def test_a_header_that_is_refused_ends_the_threads(file, monkeypatch):
    """Its tensors lie where they should, so that they are begun with, but its manifest is of no use."""
    path, _ = file
    begun = []
    begin = Reader._hash_ahead
    monkeypatch.setattr(Reader, "_hash_ahead", lambda self, extents, threads=None: (begun.extend(extents), begin(self, extents, threads)))
    data = path.read_bytes().replace(b'\\"schema\\":', b'\\"schemb\\":')
    header = 8 + int.from_bytes(data[:8], "little")
    digest = header_digest(data[:header]).encode()
    path.write_bytes(data[:DIGEST_AT] + digest + data[DIGEST_AT + 64 :])
    with pytest.raises(ManifestError, match="'schema' is missing"):
        open_container(path, ahead=True)
    assert begun and not any(thread.name.startswith("kvtool-verify") for thread in threading.enumerate())


@pytest.mark.parametrize("size", [0, 7, 100, -1])
def test_a_file_cut_short_is_an_error_as_without(file, size):
    path, _ = file
    path.write_bytes(path.read_bytes()[:size])
    errors = []
    for ahead in (False, True):
        with pytest.raises(KVError) as caught:
            open_container(path, ahead=ahead)
        errors.append((type(caught.value), str(caught.value)))
    assert errors[0] == errors[1]


def test_closing_ends_the_threads(file):
    path, arrays = file
    reader = open_container(path)
    shown = reader.array("small")
    reader.verify_ahead(list(arrays))
    reader.close()
    assert not any(thread.name.startswith("kvtool-verify") for thread in threading.enumerate())
    # An array that was handed out keeps the mapping, which is then checked as if nothing had been begun.
    assert np.array_equal(reader.array("a"), arrays["a"]) and np.array_equal(shown, arrays["small"])
