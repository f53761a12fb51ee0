"""Digests compared in threads before the tensors are asked for: the same errors, of the same tensors, as without."""

import threading

import numpy as np
import pytest

from formats import container
from formats.container import TensorPlan, open_container, write_container
from formats.errors import DigestError
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


def test_arrays_are_those_of_the_file(file):
    path, arrays = file
    with open_container(path) as reader:
        reader.verify_ahead(list(arrays))
        assert all(np.array_equal(reader.array(name), x) for name, x in arrays.items())
        assert all(np.array_equal(reader.array(name), x) for name, x in arrays.items())


@pytest.mark.parametrize("name", SIZES)
def test_a_flipped_bit_is_an_error_of_its_tensor_alone(file, name):
    path, arrays = file
    with open_container(path) as reader:
        info = reader.tensors[name]
    data = bytearray(path.read_bytes())
    data[info.offset + info.bytes // 2] ^= 4
    path.write_bytes(data)
    with open_container(path) as reader:
        reader.verify_ahead(list(arrays))
        for other, x in arrays.items():
            if other == name:
                with pytest.raises(DigestError, match=f"{path}: tensor {name!r}"):
                    reader.array(name)
            else:
                assert np.array_equal(reader.array(other), x)
        with pytest.raises(DigestError):
            reader.array(name)
        assert [defect.tensor for defect in reader.verify()] == [name]


def test_a_tensor_is_hashed_once(file, monkeypatch):
    path, arrays = file
    hashed = []
    check = container.check_digest
    monkeypatch.setattr(container, "check_digest", lambda data, info, *rest: (hashed.append(info.name), check(data, info, *rest)))
    with open_container(path) as reader:
        reader.verify_ahead(list(arrays))
        for name in arrays:
            reader.array(name)
    assert sorted(hashed) == sorted(arrays)


def test_closing_ends_the_threads(file):
    path, arrays = file
    reader = open_container(path)
    shown = reader.array("small")
    reader.verify_ahead(list(arrays))
    reader.close()
    assert not any(thread.name.startswith("kvtool-verify") for thread in threading.enumerate())
    # An array that was handed out keeps the mapping, which is then checked as if nothing had been begun.
    assert np.array_equal(reader.array("a"), arrays["a"]) and np.array_equal(shown, arrays["small"])
