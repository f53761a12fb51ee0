"""SPEC.md says what the code does: the fixed bytes, names and limits stand in it as they are in the code."""

import dataclasses
from pathlib import Path

import numpy as np

import formats.manifest as manifest
from formats import errors, examine, header, strict_json
from formats.bitpack import LAYOUTS, pack
from tests.container_cases import inputs_manifest, small_manifest

SPEC = (Path(header.__file__).parent / "SPEC.md").read_text(encoding="utf-8")


def test_fixed_bytes_and_limits():
    assert f"    {examine.PREFIX.decode()}\n" in SPEC
    assert f"these {len(examine.PREFIX)} bytes" in SPEC
    assert f"offsets {examine.DIGEST_AT} to {examine.DIGEST_AT + 63}" in SPEC
    assert f"{header.MAX_HEADER:,}".replace(",", " ") in SPEC
    assert f"{strict_json.MAX_ELEMENTS:,}".replace(",", " ") in SPEC
    assert f"more than {strict_json.MAX_DIGITS} digits in a row" in SPEC and f"deeper than {strict_json.MAX_DEPTH}" in SPEC
    assert f"at most {examine.MAX_EXPANSION} times" in SPEC and f"at most {manifest.MAX_NESTING} levels" in SPEC


def test_every_field_dtype_error_and_layout_is_described():
    def keys(value) -> set[str]:
        if isinstance(value, list):
            return set().union(*map(keys, value))
        return set(value).union(*map(keys, value.values())) if isinstance(value, dict) else set()

    json = manifest.to_json(dataclasses.replace(small_manifest(), codecs=(), quality=(), extra={}, producer={}))
    for cache in json["layers"]:
        cache["params"] = {}
    for segment in json["layers"][0]["k"]["segments"] + json["layers"][1]["k"]["segments"] + json["layers"][0]["v"]["segments"]:
        segment["tensors"] = {}
    names = (
        keys(json)
        | keys(manifest.to_json(inputs_manifest())["layer_inputs"]) - {"data"}
        | set(examine.tensor_json(examine.TensorInfo("", "U8", (), 0, 0, 0, 0, "", "")))
    )
    assert {name for name in names if f"`{name}`" not in SPEC and f'"{name}"' not in SPEC} == set()
    assert {name for name in manifest.ITEM_BYTES if name not in SPEC} == set()
    words = (*manifest.ATTENTION, *manifest.FRAMES, *manifest.PAIRINGS, *examine.ENCODINGS, *LAYOUTS)
    assert {word for word in words if f"`{word}`" not in SPEC} == set()
    raised = [errors.FormatError.__subclasses__(), errors.IntegrityError.__subclasses__()]
    assert {cls.__name__ for family in raised for cls in family if cls.__name__ not in SPEC} == set()


def test_packing_example():
    codes = np.array([1, 2, 3], np.uint8)
    assert f"`{pack(codes, 3, 'lsb8').tobytes().hex(' ')}` in lsb8 and 0x{int(pack(codes, 3, 'lsb32')[0]):08x} in lsb32" in SPEC
