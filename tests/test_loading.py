"""`kvtool.load`: rows as the file has them, or kept in another codec while they live."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import kvtool
from formats.container import open_container
from formats.errors import ManifestError
from kvtool.cli._common import quality_line
from tests.library import rewrite
from veloxquant_mlx.caches.coded import CodedKVCache

TEXT = "A prompt that several agents share, about caches and codes. " * 30


@pytest.fixture(scope="module")
def model() -> kvtool.LoadedModel:
    return kvtool.load_model("tiny-a")


def test_live_keeps_an_exact_file_as_codes(model: kvtool.LoadedModel, tmp_path: Path) -> None:
    snapshot = kvtool.capture(model, TEXT)
    kvtool.save(snapshot, tmp_path / "raw.kv")
    kvtool.save(snapshot, tmp_path / "coded.kv", codec="rvq-4")
    live = kvtool.load(tmp_path / "raw.kv", model, live="rvq-4")
    coded = kvtool.load(tmp_path / "coded.kv", model)
    assert all(isinstance(cache, CodedKVCache) for cache in live.cache)
    assert live.tokens == coded.tokens and live.usable == coded.usable
    assert any(note.startswith("kept as rvq-4") for note in live.notes)
    step = mx.array([[5, 6]])
    assert mx.array_equal(model.model(step, cache=live.cache), model.model(step, cache=coded.cache))
    assert sum(c.nbytes for c in live.cache) < 0.5 * sum(c.nbytes for c in kvtool.load(tmp_path / "raw.kv", model).cache)


def test_live_of_tcz_is_what_attention_can_read(model: kvtool.LoadedModel, tmp_path: Path) -> None:
    calibration = kvtool.calibrate(model, {"a": TEXT, "b": "Other words stand here, on rivers and hills. " * 40}, length=256)
    kvtool.save(kvtool.capture(model, TEXT), tmp_path / "z.kv", codec="tcz-2", calibration=calibration)
    plain = kvtool.load(tmp_path / "z.kv", model, calibration=calibration)
    assert not any(isinstance(cache, CodedKVCache) for cache in plain.cache)
    assert any("decoded" in note and "tcz" in note for note in plain.notes)
    live = kvtool.load(tmp_path / "z.kv", model, live="tc-3", calibration=calibration)
    assert all(isinstance(cache, CodedKVCache) for cache in live.cache)
    assert sum(c.nbytes for c in live.cache) < 0.5 * sum(c.nbytes for c in plain.cache)


def test_decode_and_live_exclude_each_other(model: kvtool.LoadedModel, tmp_path: Path) -> None:
    kvtool.save(kvtool.capture(model, TEXT), tmp_path / "a.kv")
    with pytest.raises(ValueError, match="not both"):
        kvtool.load(tmp_path / "a.kv", model, decode=True, live="rvq-4")


def test_make_cache_grows_codes_from_nothing(model: kvtool.LoadedModel) -> None:
    cache = kvtool.make_cache(model, "rvq-8,sink=4,recent=32")
    ids = mx.array([list(model.tokenizer.encode(TEXT))])
    one, two = model.model(ids, cache=cache), model.model(ids)
    assert mx.allclose(one, two, atol=1e-4)
    first = model.model(mx.array([[7]]), cache=cache)
    assert cache[0].blocks[0].count == 4 and len(cache[0].blocks) == 2
    assert cache[0].offset == ids.shape[1] + 1
    whole = model.model(mx.concatenate([ids, mx.array([[7]])], axis=1))[:, -1:]
    # 8 bits a value: an error of 1/256 of a key's spread, not of float32.
    assert mx.max(mx.abs(first - whole)).item() < 0.05 * mx.max(mx.abs(whole)).item()


@pytest.mark.parametrize(
    ("codec", "why"), [("raw", "compresses"), ("commvq-2", "as they come"), ("tc-2", "as they come"), ("rvq-9", "rvq-N")]
)
def test_make_cache_refuses_what_cannot_grow(model: kvtool.LoadedModel, codec: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        kvtool.make_cache(model, codec)


def test_a_file_made_from_live_codes_says_so(model: kvtool.LoadedModel, tmp_path: Path) -> None:
    kvtool.save(kvtool.capture(model, TEXT), tmp_path / "a.kv", codec="rvq-4")
    restored = kvtool.load(tmp_path / "a.kv", model)
    kvtool.save(kvtool.capture(model, cache=restored.cache, tokens=restored.tokens), tmp_path / "b.kv")
    with kvtool.open(tmp_path / "b.kv") as archive:
        (step,) = archive.manifest.quality
    assert step["step"] == "live" and "rvq-4" in step["codec"] and step["layers"] == [0, 1, 2, 3]
    assert "decoded rows" in quality_line(step)
    assert kvtool.capture(model, cache=kvtool.load(tmp_path / "a.kv", model, decode=True).cache).history == ()


def test_pending_is_refused_once_the_caches_have_gone_on(model: kvtool.LoadedModel, tmp_path: Path) -> None:
    kvtool.save(kvtool.capture(model, TEXT), tmp_path / "a.kv", codec="rvq-4")
    restored = kvtool.load(tmp_path / "a.kv", model)
    assert len(restored.pending()) == 1 == len(restored.pending())
    model.model(mx.array([[5, 6, 7]]), cache=restored.cache)
    with pytest.raises(ValueError, match="gone on since"):
        restored.pending()


@pytest.mark.parametrize("live", ["tcz-1", "raw", "rvq-9", 7])
def test_live_must_be_readable(model: kvtool.LoadedModel, tmp_path: Path, live: object) -> None:
    kvtool.save(kvtool.capture(model, TEXT), tmp_path / "a.kv", codec="rvq-4")
    with pytest.raises(TypeError if live == 7 else ValueError, match=r"live must|rvq-N|spec string"):
        kvtool.load(tmp_path / "a.kv", model, live=live)


def test_mlx_lms_own_model_is_refused_by_name(model: kvtool.LoadedModel, tmp_path: Path) -> None:
    kvtool.save(kvtool.capture(model, TEXT), tmp_path / "a.kv", codec="rvq-4")
    for call in (lambda m: kvtool.load(tmp_path / "a.kv", m), lambda m: kvtool.capture(m, TEXT), lambda m: kvtool.make_cache(m, "rvq-4")):
        with pytest.raises(TypeError, match=r"must come from kvtool\.load_model, but got Model"):
            call(model.model)


def test_tables_that_no_rows_can_be_read_with_are_found_at_the_load(model: kvtool.LoadedModel, tmp_path: Path) -> None:
    """A file whose digests fit, and whose widths of planes do not."""
    path = tmp_path / "a.kv"
    kvtool.save(kvtool.capture(model, TEXT), path, codec="commvq-2", compress=False)
    with open_container(path) as reader:
        name = next(name for name in reader.tensors if name.endswith("widths"))
        widths = np.full_like(reader.array(name), 255)
    forged = rewrite(path, tmp_path / "forged.kv", lambda m: None, {name: ("U8", widths)})
    for decode in (False, True):
        with pytest.raises(ManifestError, match="widths"):
            kvtool.load(forged, model, decode=decode)
