"""An extension that was built from other sources than those beside this Python is refused by name, and the doctor says what to do."""

from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest

from formats.errors import BackendError
from kvtool.cli import run
from kvtool.cli.doctor import examine
from veloxquant_mlx import metal, native
from veloxquant_mlx.native import stamp

SOURCES = Path(native.__file__).parent / "src"
TEXT = "the native extension /x/_native.so was built from sources 012345678901, but beside this Python are sources "


def test_digest_is_of_every_source(tmp_path: Path) -> None:
    assert stamp.digest(tmp_path) is None  # a wheel has no sources, and an extension of its own
    (tmp_path / "b.cpp").write_text("1")
    (tmp_path / "a.hpp").write_text("2")
    first = stamp.digest(tmp_path)
    (tmp_path / "notes.txt").write_text("3")
    assert stamp.digest(tmp_path) == first
    (tmp_path / "a.hpp").write_text("4")
    assert stamp.digest(tmp_path) != first


@pytest.mark.skipif(not native.built(), reason="the native back end was not built")
def test_the_build_has_the_digest_of_its_sources() -> None:
    assert stamp.digest(SOURCES) == native._native.SOURCES
    assert native.stale() == ""


def test_what_is_wrong() -> None:
    old = SimpleNamespace(__file__="/x/_native.so")
    found = stamp.stale(old, SOURCES)
    assert found.startswith("the native extension /x/_native.so was built from sources before it was stamped, but beside this Python are ")
    old.SOURCES = "0123456789012345"
    assert stamp.stale(old, SOURCES).startswith(TEXT)
    old.SOURCES = stamp.digest(SOURCES)
    assert stamp.stale(old, SOURCES) == ""
    assert stamp.stale(SimpleNamespace(__file__="/x/_native.so"), SOURCES / "none") == ""


@pytest.mark.skipif(not native.built(), reason="the native back end was not built")
def test_it_is_refused_and_can_be_switched_off(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(native, "_stale", TEXT)
    with mx.stream(mx.cpu), pytest.raises(BackendError) as caught:
        metal.turboquant_bit_pack(mx.zeros((64,), mx.uint8), 4)
    assert TEXT in str(caught.value) and caught.value.hint == stamp.REBUILD
    with native.without():
        assert metal.turboquant_bit_pack(mx.zeros((64,), mx.uint8), 4).size == 32
    report = examine()
    assert report["native"]["stale"] == TEXT and not report["native"]["in_use"] and report["native"]["levels"] == []
    assert f"{TEXT}: {stamp.REBUILD}" in report["advice"]
    assert run(["doctor"]) == 0
    assert "native     built from other sources, not in use" in capsys.readouterr().out
    assert run(["selftest", "--function", "turboquant_bit_pack"]) == BackendError.exit_code
    shown = capsys.readouterr().err
    assert f"error: {TEXT}" in shown and f"hint: {stamp.REBUILD}" in shown
