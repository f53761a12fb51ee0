"""Codes that stay in the mapped file: what lies where, what a replaced or damaged file does, and how much memory processes share."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import save_prompt_cache

import kvtool
from formats.container import open_container
from formats.errors import DigestError, FormatError
from kvtool.bench import sharing
from kvtool.bench.filing import synthetic
from kvtool.capturing import capture
from kvtool.probe import probe_model
from veloxquant_mlx import native
from veloxquant_mlx.caches.coded import CodedKVCache
from veloxquant_mlx.native.mapped import Mapped

pytestmark = pytest.mark.skipif(not native.available(), reason="needs the C++ extension")
TOKENS, MANY = 4096, 32768
CODECS = ("rvq-4", "rvq-2+2", "affine-4", "k=rabitq,v=rvq-4", "commvq-2", "vecinfer-2", "qjl")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Any:
    """A model, a snapshot of synthetic rows, and a file of them for each codec."""
    model = kvtool.load_model("tiny-a")
    folder = tmp_path_factory.mktemp("shared")
    snapshot = synthetic(model, probe_model(model.model), TOKENS, 5)
    files = {}
    for spec in CODECS:
        files[spec] = folder / f"{len(files)}.kv"
        kvtool.save(snapshot, files[spec], codec=spec)
    files[MANY] = folder / "many.kv"
    # As cached: the angles of keys before RoPE are memory of each process's own.
    kvtool.save(synthetic(model, probe_model(model.model), MANY, 5), files[MANY], codec="rvq-4", frame="post")
    return SimpleNamespace(model=model, snapshot=snapshot, files=files)


def copied(path: Path, tmp_path: Path) -> Path:
    """The same bytes under a name of the test's own."""
    other = tmp_path / "own.kv"
    other.write_bytes(path.read_bytes())
    return other


def mapped_parts(cache: list[Any]) -> list[Mapped]:
    assert all(isinstance(c, CodedKVCache) for c in cache)
    parts = [part for c in cache for block in c.blocks for rows in (block.k, block.v) for part in rows.parts.values()]
    return [part for part in parts if isinstance(part, Mapped)]


def attended(cache: list[Any], queries: int = 1) -> list[np.ndarray]:
    """Attention of seeded queries to every layer, and one more row."""
    out = []
    for i, own in enumerate(cache):
        draw = np.random.default_rng(i)
        heads, _, dim = own.blocks[0].k.shape
        q = mx.array(draw.standard_normal((1, 2 * heads, queries, dim), np.float32))
        row = mx.array(draw.standard_normal((1, heads, queries, dim), np.float32))
        fetched, _ = own.update_and_fetch(row, row)
        out.append(np.array(fetched.attend(q, dim**-0.5, None if queries == 1 else "causal")))
    return out


def addresses(path: Path) -> list[range]:
    """Where a file is mapped in this process."""
    lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    spans = [line[0].split("-") for line in lines if line[-1] == str(path)]
    return [range(int(start, 16), int(stop, 16)) for start, stop in spans]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads /proc")
@pytest.mark.parametrize("spec", CODECS)
def test_codes_lie_in_the_mapped_file(made, spec) -> None:
    restored = kvtool.load(made.files[spec], made.model)
    parts = mapped_parts(restored.cache)
    spans = addresses(made.files[spec])
    assert len(parts) >= 2 * len(restored.cache)
    for part in parts:
        start = part.view.__array_interface__["data"][0]
        assert any(start in span and start + part.nbytes - 1 in span for span in spans)
        assert not part.view.flags.writeable
        assert native.packed(part) is part.view and native.shared(part) is part.view
    # Nearly all of a file is in them.
    assert sum(part.nbytes for part in parts) > 0.7 * made.files[spec].stat().st_size
    kept = kvtool.load(made.files[spec], made.model, mapped=False)
    assert not mapped_parts(kept.cache)
    for own, other in zip(restored.cache, kept.cache, strict=True):
        assert own.nbytes == other.nbytes


@pytest.mark.parametrize("spec", CODECS)
@pytest.mark.parametrize("queries", [1, 48])
def test_results_are_those_of_copied_codes(made, spec, queries) -> None:
    """By the native back end, and by MLX: asked to, or as queries are many."""
    for run in (lambda c: attended(c, queries), lambda c: [np.array(x) for own in c for x in own.keys_and_values()]):
        results = [run(kvtool.load(made.files[spec], made.model, mapped=mapped).cache) for mapped in (True, False)]
        with native.without():
            # Loaded for the native back end, read by MLX.
            with_mlx = run(kvtool.load(made.files[spec], made.model, mapped=False).cache)
        mapped_cache = kvtool.load(made.files[spec], made.model).cache
        assert mapped_parts(mapped_cache)
        with native.without():
            results_mlx = run(mapped_cache)
        for got, want in (*zip(*results, strict=True), *zip(results_mlx, with_mlx, strict=True)):
            np.testing.assert_array_equal(got, want)


def test_codes_are_copied_where_mlx_reads_them(made) -> None:
    with native.without():
        assert not mapped_parts(kvtool.load(made.files["rvq-4"], made.model).cache)


def test_mapped_codes_are_stored_uncompressed(made) -> None:
    for spec in CODECS:
        with open_container(made.files[spec]) as reader:
            lossy = {
                name
                for layer in reader.manifest.layers
                for role in (layer.k, layer.v)
                for s in role.segments
                for name in s.tensors.values()
            }
            lossy = {name for name in lossy if not name.endswith(".data")}
            assert lossy and all(reader.tensors[name].encoding == "none" for name in lossy)


def test_a_file_is_replaced_and_removed_while_it_is_read(made, tmp_path) -> None:
    path = copied(made.files["rvq-4"], tmp_path)
    want = attended(kvtool.load(path, made.model).cache)
    restored, forks = kvtool.load(path, made.model), None
    kvtool.save(made.snapshot, path, codec="affine-4")
    forks = restored.fork(2)
    for cache in (restored.cache, forks[0].cache):
        for got, expected in zip(attended(cache), want, strict=True):
            np.testing.assert_array_equal(got, expected)
    path.unlink()
    for got, expected in zip(attended(forks[1].cache), want, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_damage_is_found_at_load(made, tmp_path) -> None:
    path = copied(made.files["rvq-4"], tmp_path)
    with open_container(path) as reader:
        info = max(reader.tensors.values(), key=lambda info: info.padded)
    whole = path.read_bytes()
    for at in (info.offset, info.offset + info.stored // 2, info.offset + info.stored - 1):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(DigestError, match=re.escape(info.name)):
            kvtool.load(path, made.model)
    for size in (len(whole) - 1, len(whole) - 64, info.offset + 1, 100):
        path.write_bytes(whole[:size])
        with pytest.raises(FormatError):
            kvtool.load(path, made.model)


def test_mlx_lm_evaluates_the_state_and_says_why_it_cannot_save_it(made, tmp_path) -> None:
    restored = kvtool.load(made.files["rvq-4"], made.model)
    before = mx.get_active_memory()
    mx.eval([c.state for c in restored.cache])
    assert mx.get_active_memory() - before < made.files["rvq-4"].stat().st_size / 4
    with pytest.raises(ValueError, match=r"mapped from .*0\.kv: save with kvtool\.save, or load with mapped=False"):
        save_prompt_cache(str(tmp_path / "c.safetensors"), restored.cache)
    save_prompt_cache(str(tmp_path / "c.safetensors"), kvtool.load(made.files["rvq-4"], made.model, mapped=False).cache)
    again = capture(made.model, cache=restored.cache, tokens=list(made.snapshot.tokens))
    kvtool.save(again, tmp_path / "again.kv", codec="raw")


@pytest.mark.skipif(not sharing.SMAPS.exists(), reason="reads /proc")
@pytest.mark.parametrize("mapped", [True, False])
def test_processes_share_the_pages_of_a_file(made, mapped) -> None:
    """What loading and attending adds to three processes; where the codes are copied, each has its own."""
    path, count = made.files[MANY], 3
    size = path.stat().st_size
    digests, found = sharing.in_processes("tiny-a", path, count, mapped)
    assert digests == [sharing.attended(kvtool.load(path, made.model, mapped=False).cache)] * count
    if mapped:
        assert size * 0.8 < sum(memory.file for memory in found) < size * 1.1
        assert all(memory.own < size / 4 for memory in found), (size, found)
    else:
        assert all(memory.own > size * 0.7 for memory in found), (size, found)
