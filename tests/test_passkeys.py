"""The table of passkeys: intervals, blocks of prompts that are kept, and what stands in the cells."""

import functools
from pathlib import Path

import pytest

from kvtool.model import LoadedModel
from kvtool.passkeys import Answers, ask, passkey_trials
from kvtool.roundtrip import Roundtrip, parse_roundtrip
from tests import passkeys
from tests.passkeys import interval, markdown, measured, specs_for, total


@pytest.mark.parametrize(
    ("right", "asked", "low", "high"), [(0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (10, 10, 0.7225, 1.0), (81, 263, 0.2553, 0.3662)]
)
def test_interval(right: int, asked: int, low: float, high: float) -> None:
    """Published values (Newcombe, 1998: 81 of 263), and those of the formula by hand."""
    assert interval(right, asked) == pytest.approx((low, high), abs=6e-5)


def test_specs() -> None:
    specs = specs_for(["raw", "vecinfer-2", "k=rvq-4,v=rvq-2"])
    assert list(specs.values()) == [passkeys.ALL, passkeys.SLOW["vecinfer-2"], passkeys.SLOW["vecinfer-2"], passkeys.ALL, passkeys.ALL]
    assert [(p.plan.sink, p.plan.recent) for p in map(parse_roundtrip, specs)] == [(0, 0), (4, 32), (0, 0), (4, 32), (0, 0)]


def test_an_interrupted_run_goes_on(tiny_a: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = passkey_trials(tiny_a, 5, prompt_tokens=150)
    monkeypatch.setattr(passkeys, "passkey_trials", lambda model, n: trials)
    ran: list[tuple[int, int]] = []

    def counting(model: LoadedModel, trips: list, trials: list, **options: object) -> list[Answers]:
        ran.append((len(trips), len(trials)))
        if len(ran) == 3:
            raise KeyboardInterrupt
        return ask(model, trips, trials, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(passkeys, "ask", counting)
    specs = {"rvq-1:norm:nocenter,sink=0,recent=0": 5, "raw": 5, "fp8": 2}
    with pytest.raises(KeyboardInterrupt):
        measured(tiny_a, specs, 5, None, tmp_path, block=2)
    found = measured(tiny_a, specs, 5, None, tmp_path, block=2)
    assert ran == [(3, 2), (2, 2), (2, 1), (2, 1)]
    whole = ask(tiny_a, [functools.partial(parse_roundtrip, spec) for spec in list(specs)[:2]], trials)
    assert [found[spec] for spec in specs] == [*whole, ask(tiny_a, [functools.partial(parse_roundtrip, "fp8")], trials[:2])[0]]
    assert found["raw"].share != whole[0].share


def test_the_table() -> None:
    spec, raw = parse_roundtrip("rvq-4").spec, parse_roundtrip("raw").spec
    half = Answers(asked=10, right=5, coded_bytes=53, coded_values=100, exact_bytes=20, exact_values=10)
    refused = Roundtrip("", parse_roundtrip("raw").plan, failed=True, problems=["[rvq] no."])
    bad = Answers()
    bad.add(refused, False)
    by_model = {"a": {raw: total([half, half]), spec: half}, "b": {raw: half, spec: total([half, bad])}}
    lines = markdown(by_model, "make it").splitlines()
    assert "| `rvq-4` | 4 + 32 | 4.24 | 5.31 | 50.0 % [23.7, 76.3], 10 prompts | refused |" in lines
    assert any(line.startswith("| `raw` | all | 4.24 | 5.31 | 50.0 % [29.9, 70.1] | 50.0 % [23.7, 76.3], 10 prompts |") for line in lines)
    assert lines[-1] == f"- `{spec}`: [rvq] no."
