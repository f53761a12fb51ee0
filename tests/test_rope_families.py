"""The table of RoPE families: every model file of mlx-lm is recoded exactly or refused with a reason, and the table says so."""

import re

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest

from kvtool.probe import STATE_PROBLEM
from tests import rope_families
from tests.families import uncompiled
from tests.rope_families import RESULT, first_cells, measure, recoded, render, scalings
from tests.tiny_random import build, build_file, model_files
from veloxquant_mlx.caches import families

FILES = model_files()
TEXT = RESULT.read_text(encoding="utf-8")
same_version = pytest.mark.skipif(mlx_lm.__version__ != families.MLX_LM, reason=f"the table is that of mlx-lm {families.MLX_LM}")


def statuses(text: str) -> str:
    """The text without the digits of its errors."""
    return re.sub(r"\d(\.\d)?e-\d\d", "#", text)


@pytest.mark.parametrize("name", FILES)
@same_version
def test_a_file_is_as_its_line_says(name: str) -> None:
    with uncompiled():
        row = measure(name)
    assert row.status in ("exact", "refused", "none", "unbuilt")
    assert bool(row.reason) == (row.status in ("refused", "unbuilt"))
    (line,) = (line for line in TEXT.splitlines() if line.startswith(f"| {name} |"))
    assert statuses(line).startswith(statuses(first_cells(name, row))), "python -m tests.rope_families"


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "internlm3", "phi3", "falcon_h1"])
@same_version
def test_a_files_scalings_are_as_its_line_says(name: str) -> None:
    with uncompiled():
        text = render({name: measure(name)}, {name: scalings(name)})
    (line,) = (line for line in text.splitlines() if line.startswith(f"| {name} |"))
    assert statuses(line) in statuses(TEXT)


@pytest.mark.slow
@same_version
def test_the_table_is_as_written() -> None:
    with uncompiled():
        rows = {name: measure(name) for name in FILES}
        text = render(rows, {name: scalings(name) for name in FILES})
    assert "WRONG" not in text
    assert statuses(text) == statuses(TEXT), "python -m tests.rope_families"


def test_a_rotation_that_is_overlooked_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The source's keys handed over unturned, or turned by half, are wrong by far more than the limit."""
    rotate = rope_families.kvtool.recoding.rotate
    monkeypatch.setattr("kvtool.recoding.rotate", lambda keys, *rest, **options: keys)
    assert measure("llama").status == "wrong"
    monkeypatch.setattr("kvtool.recoding.rotate", lambda keys, at, source, target, **options: rotate(keys, at, source, None))
    assert measure("llama").status == "wrong"


def test_a_recurrent_state_of_rotated_keys_stays_where_it_is() -> None:
    model = build_file("bailing_moe_linear")
    assert [probe.state_problem for probe in rope_families.probe_model(model)] == [STATE_PROBLEM, None]
    assert all(probe.state_problem is None for probe in rope_families.probe_model(build("mamba")))
    row = recoded(model, build_file("bailing_moe_linear"))
    assert row.status == "refused" and STATE_PROBLEM in row.reason


def test_one_set_of_weights_has_one_pairing() -> None:
    row = recoded(build("llama", rope_traditional=True), build("llama"))
    assert row.status == "refused" and "pairs are interleaved, the model's half" in row.reason


def test_a_twin_differs_in_every_rope_module() -> None:
    model = build("gpt_oss")
    before = [(module.mscale, module._freqs) for _, module in model.named_modules() if hasattr(module, "mscale")]
    rope_families.altered(model)
    after = [(module.mscale, module._freqs) for _, module in model.named_modules() if hasattr(module, "mscale")]
    assert len(before) == 2 and all(a != b and not mx.any(x == y).item() for (a, x), (b, y) in zip(before, after, strict=True))
    model = build("llama")
    assert {m.base for _, m in rope_families.altered(model).named_modules() if isinstance(m, nn.RoPE)} == {7e4}
