"""Names of a store's objects: the same in every process, and different wherever rows differ."""

import hashlib
import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from formats.errors import DigestError, IncompatibleError, KVError
from formats.manifest import ModelInfo
from kvtool.encoding import codec_plan
from kvtool.probe import CacheProbe, probe_model
from kvtool.store.keys import Space, chunk_name, layers_digest, node_of, tail_hashes, tail_name
from tests.library import tiny, twin

MODEL = tiny("qwen3")
PROBES = probe_model(MODEL.model)


def space(
    codec: str = "rvq-4",
    model: ModelInfo = MODEL.info,
    probes: tuple[CacheProbe, ...] = PROBES,
    calibration: str | None = None,
    chunk: int = 4,
    **exact: Any,
) -> Space:
    return Space.of(model, probes, codec_plan(codec, **exact), calibration, chunk)


def oracle(key: str, ids: list[int], chunk: int) -> list[str]:
    """The chain as the module's docstring has it, one id at a time."""
    current, found = bytes.fromhex(key), []
    for at in range(0, len(ids) // chunk * chunk, chunk):
        current = blake3(current + b"".join(i.to_bytes(4, "little") for i in ids[at : at + chunk])).digest()
        found.append(current.hex())
    return found


@given(st.lists(st.integers(0, 2**31 - 1), max_size=40), st.integers(1, 9))
def test_keys_are_the_chain(ids: list[int], chunk: int) -> None:
    one = space(chunk=chunk)
    assert list(one.keys(ids)) == oracle(one.key, ids, chunk)


@given(st.lists(st.integers(0, 99), min_size=1, max_size=30), st.lists(st.integers(0, 99), min_size=1, max_size=30))
def test_equal_keys_mean_equal_tokens_from_the_start(a: list[int], b: list[int]) -> None:
    one = space(chunk=3)
    for i, (x, y) in enumerate(zip(one.keys(a), one.keys(b), strict=False), 1):
        assert (x == y) == (a[: 3 * i] == b[: 3 * i])


def test_case_15_keys_do_not_depend_on_the_process() -> None:
    """Keys that depended on the hash seed of the process missed after every restart."""
    program = (
        "from tests.test_store_keys import space; from kvtool.store.keys import tail_name; s = space()\n"
        "print(s.key, *s.keys(range(20)), tail_name(s.key, [1, 2], 0, 2))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed, "PATH": ""}
        ).stdout
        for seed in ("1", "2")
    }
    mine = " ".join([space().key, *space().keys(range(20)), tail_name(space().key, [1, 2], 0, 2)])
    assert outputs == {mine + "\n"}


DIFFERENT = {
    "weights": space(model=replace(MODEL.info, weights="0" * 64)),
    "tokenizer": space(model=replace(MODEL.info, tokenizer="0" * 64)),
    "dtype": space(model=replace(MODEL.info, dtype="float16")),
    "architecture": space(model=replace(MODEL.info, architecture="other")),
    "rope": space(probes=probe_model(twin("qwen3", rope_theta=5000.0).model)),
    "layers": space(probes=probe_model(tiny("glm4").model)),
    "codec": space("rvq-3"),
    "codec of one role": space("k=rvq-4,v=rvq-3"),
    "codec's parameter": space("affine-4"),
    "frame": space("rvq-4,frame=post") if codec_plan("rvq-4").k.default_frame("k") == "pre" else space("rvq-4,frame=pre"),
    "sink": space(sink=5),
    "calibration": space(calibration="0" * 64),
    "chunk": space(chunk=5),
}


def test_all_that_rows_depend_on_is_in_the_key() -> None:
    keys = {name: one.key for name, one in DIFFERENT.items()} | {"base": space().key}
    assert len(set(keys.values())) == len(keys)


def test_what_chunks_do_not_depend_on_is_not() -> None:
    assert space(recent=7).key == space().key
    assert space(model=replace(MODEL.info, name="another name for it")).key == space().key


def test_a_space_reads_back_and_a_changed_one_does_not() -> None:
    one = space()
    assert Space.parse(one.data, one.key) == one and json.loads(one.data)["algorithm"] == "blake3"
    assert one.key != hashlib.sha256(one.data).hexdigest()
    with pytest.raises(DigestError):
        Space.parse(one.data.replace(b'"sink":4', b'"sink":5'), one.key)
    newer = one.data.replace(b'"schema":1', b'"schema":2')
    for data in (newer, b"[]", b"{", b"\xff", b"[" * 100_000):
        with pytest.raises(KVError):
            Space.parse(data, blake3(data).hexdigest())


@pytest.mark.parametrize("field", ["weights", "tokenizer"])
def test_a_model_without_identity_has_no_space(field: str) -> None:
    with pytest.raises(IncompatibleError, match="no known weights or tokenizer"):
        space(model=replace(MODEL.info, **{field: None}))


@pytest.mark.parametrize("chunk", [0, -1, 1.5, True, 1 << 17])
def test_odd_chunks_are_refused(chunk: Any) -> None:
    with pytest.raises(ValueError, match="chunk must be 1 to 65536"):
        space(chunk=chunk)


def test_names_say_what_they_are() -> None:
    key, parent = "ab" * 32, "cd" * 32
    node = node_of(chunk_name(key, parent, 8, 4))
    assert node is not None and (node.id, node.parent, node.start, node.stop, node.tail) == (key, parent[:16], 8, 12, False)
    node = node_of(tail_name(parent, [1, 2, 3], 8, 2))
    assert node is not None and (node.parent, node.start, node.stop, node.tail, node.recent) == (parent[:16], 8, 11, True, 2)
    assert [node_of(name) for name in ("pins/" + key, "chunks/ab/x.kv", "spaces/x.json", chunk_name(key, parent, 8, 4) + "x")] == [None] * 4


@given(st.lists(st.integers(0, 50), max_size=20), st.sets(st.tuples(st.integers(0, 3), st.integers(0, 20)), max_size=6))
def test_hashes_of_tails_are_those_one_by_one(ids: list[int], wanted: set[tuple[int, int]]) -> None:
    fit = {(recent, tokens) for recent, tokens in wanted if tokens <= len(ids)}
    parent = "ef" * 32

    def alone(recent: int, tokens: int) -> str:
        data = b"tail" + bytes.fromhex(parent) + recent.to_bytes(4, "little")
        return blake3(data + b"".join(i.to_bytes(4, "little") for i in ids[:tokens])).hexdigest()[:32]

    assert tail_hashes(parent, ids, fit) == {one: alone(*one) for one in fit}


def test_layers_are_alike_where_back_ends_round_apart() -> None:
    k = PROBES[0].k
    assert k is not None and k.rope is not None and k.rope.base is not None
    near = replace(PROBES[0], k=replace(k, rope=replace(k.rope, base=k.rope.base * (1 + 1e-9))))
    far = replace(PROBES[0], k=replace(k, rope=replace(k.rope, base=k.rope.base * (1 + 1e-4))))
    assert layers_digest([near]) == layers_digest([PROBES[0]]) != layers_digest([far])


def test_a_space_is_of_all_that_import_compares() -> None:
    info = MODEL.info
    own = space()
    for change in (
        {"weights": "cd" * 32},
        {"adapter": "cd" * 32},
        {"quantisation": {"summary": "affine 4 bits in groups of 64: 9 modules", "blake3": "cd" * 32}},
        {"tokenizer": "cd" * 32},
        {"tokenizer_state": "cd" * 32},
        {"config": {**(info.config or {}), "rms_norm_eps": 1e-3}},
    ):
        other = replace(info, **change)
        assert not own.same_model(other, PROBES) and space(model=other).key != own.key
    # RoPE is compared as the layers turn rows, but where that is not known.
    moved = replace(info, config={**(info.config or {}), "rope_theta": 7.0})
    assert own.same_model(replace(info, name="by another name"), PROBES) and own.same_model(moved, PROBES)
    assert PROBES[0].k is not None
    unknown = (replace(PROBES[0], k=replace(PROBES[0].k, rope=None, rope_problem="unknown")), *PROBES[1:])
    assert not space(probes=unknown).same_model(moved, unknown) and space(probes=unknown).same_model(info, unknown)
