"""Files written by the first version of the format are read exactly, and today's writer gives the same bytes."""

import pytest

from formats.check import check
from formats.container import open_container
from tests.container_cases import (
    identity_manifest,
    inputs_manifest,
    inputs_plans,
    plain_read,
    small_arrays,
    small_manifest,
    tiny_manifest,
    tiny_plans,
)
from tests.golden.make_container import FOLDER, make

TINY = {plan.name: (plan.dtype, plan.produce()) for plan in tiny_plans()}
INPUTS = {plan.name: (plan.dtype, plan.produce()) for plan in inputs_plans()}
CASES = {
    "tiny": (tiny_manifest(), TINY),
    "inputs": (inputs_manifest(), INPUTS),
    "identity": (identity_manifest(), TINY),
    "raw": (small_manifest(), small_arrays()),
    "zstd": (small_manifest(), small_arrays()),
}


def test_no_golden_is_missing_or_unknown():
    assert sorted(path.name for path in FOLDER.iterdir()) == sorted(f"{name}.kv" for name in CASES)


@pytest.mark.parametrize("name", CASES)
def test_golden_reads_exactly(name):
    path = FOLDER / f"{name}.kv"
    manifest, arrays = CASES[name]
    assert check(path) == []
    with open_container(path) as reader:
        assert reader.manifest == manifest
        assert list(reader.tensors) == list(arrays)
        for key, (dtype, array) in arrays.items():
            got = reader.array(key)
            assert reader.tensors[key].dtype == dtype
            assert (got.dtype, got.shape, got.tobytes()) == (array.dtype, array.shape, array.tobytes())
        encodings = {info.encoding for info in reader.tensors.values()}
        assert encodings == ({"none", "zstd"} if name == "zstd" else {"none"})
    plain = plain_read(path.read_bytes())[1]
    assert all(plain[key].tobytes() == array.tobytes() for key, (_, array) in arrays.items())


def test_todays_writer_gives_the_same_bytes(tmp_path):
    make(tmp_path)
    for name in ("tiny", "inputs", "identity", "raw"):
        assert (tmp_path / f"{name}.kv").read_bytes() == (FOLDER / f"{name}.kv").read_bytes(), name
    # Another zstd may compress otherwise; the content must be the same.
    (old_manifest, old), (new_manifest, new) = (plain_read((folder / "zstd.kv").read_bytes()) for folder in (FOLDER, tmp_path))
    assert old.keys() == new.keys() and all(old[key].tobytes() == new[key].tobytes() for key in old)
    old_manifest.pop("tensors"), new_manifest.pop("tensors")
    assert old_manifest == new_manifest
