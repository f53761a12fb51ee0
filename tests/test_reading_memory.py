"""Reading takes at most twice the input and an allowance, here a tight one, whatever its JSON holds.

Objects in memory are up to 30 times their text.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from formats import strict_json
from formats.check import check
from formats.container import open_container, write_container
from formats.errors import HeaderError, ManifestError, Problems
from formats.examine import manifest_json
from formats.header import header_text, parse_entries, parse_json
from formats.manifest import to_json, tokens_digest
from formats.strict_json import MAX_ELEMENTS, Room, dumps, scan
from formats.token_ids import TokenIds
from tests.container_cases import seal, small_manifest
from tests.reading_memory import GIVES_BACK, TIGHT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the peak of a call is in Linux's /proc alone")
ROOT = Path(__file__).parents[1]
SMALL = ROOT / "tests/golden/container/v1/tiny.kv"
ELEMENTS = 24_000
# One element of a list that stands in a manifest's `extra`, which nothing looks at, or as the list of a field that is read.
PLAIN: dict[str, Any] = {
    "lists": [],
    "objects": {},
    "numbers": 123_456,
    "long-numbers": 10**18,
    "floats": 0.5,
    "letters": "ab",
    "wide-letters": "a\U0001f600",
    "nulls": None,
    "one-member": {"a": 1},
    "pairs": [1000, 2000],
}


def manifest(**fields: Any) -> dict[str, Any]:
    return {**to_json(small_manifest()), "tensors": {}, "layers": [], "length": 0, "layer_inputs": [], **fields}


def container(fields: dict[str, Any], data: int = 0) -> bytes:
    """A file whose header is right as far as its bytes go; its tensor of `data` bytes has a digest of zeros."""
    size = data // 64 * 64
    described = {"dtype": "U8", "shape": [size], "bytes": size, "stored": size, "encoding": "none", "blake3": "0" * 64}
    fields["tensors"] = {"x": described} if size else {}
    laid = f',"x":{{"dtype":"U8","shape":[{size}],"data_offsets":[0,{size}]}}' if size else ""
    text = f'{{"__metadata__":{{"format":"kvtool","header_blake3":"{"0" * 64}","kvtool":{dumps(dumps(fields))}}}{laid}}}'
    return seal(text.encode(), bytes(size))


def cases() -> dict[str, dict[str, Any]]:
    ids = [10_000 + i % 90_000 for i in range(ELEMENTS)]
    spans = [[i, i + 1] for i in range(ELEMENTS)]
    layer = {**manifest(layers=to_json(small_manifest())["layers"])["layers"][0], "positions": spans, "k": None, "v": None}
    return {
        **{name: manifest(extra={"x": [one] * ELEMENTS}) for name, one in PLAIN.items()},
        "keys": manifest(extra={str(i): 0 for i in range(ELEMENTS)}),
        "keys-of-many": manifest(extra={"x": [{str(i): 0} for i in range(ELEMENTS)]}),
        "one-string": manifest(extra={"x": "x" * 8 * ELEMENTS}),
        "one-wide-string": manifest(extra={"x": "x" * 8 * ELEMENTS + "\U0001f600"}),
        "tokens": manifest(tokens={"ids": ids, "blake3": tokens_digest(ids)}),
        "tokens-of-one-digit": manifest(tokens={"ids": [1] * ELEMENTS, "blake3": tokens_digest([1] * ELEMENTS)}),
        "positions": manifest(layers=[layer]),
        "layers": manifest(layers=[{**layer, "positions": [], "params": {"n": i}} for i in range(ELEMENTS // 16)]),
        "arrays": manifest(layers=[{**layer, "arrays": [{"dtype": "I8", "shape": [], "tensor": "x"}] * (ELEMENTS // 4)}]),
        "quality": manifest(quality=[{"step": "x"}] * (ELEMENTS // 2)),
        "producer": manifest(producer={str(i): "" for i in range(ELEMENTS)}),
        "bad-layers": manifest(layers=[0] * ELEMENTS),
    }


def measured(way: str, files: list[Path]) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tests.reading_memory", way, str(SMALL), *map(str, files)]
    child = subprocess.run(command, cwd=ROOT, env={**os.environ, **GIVES_BACK}, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    return [json.loads(line) for line in child.stdout.splitlines()]


@pytest.fixture(autouse=True)
def tight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strict_json, "ALLOWANCE", TIGHT)


def fits(raw: bytes, size: int) -> bool:
    """Whether a file of so many bytes may have this header."""
    room = Room(size)
    try:
        manifest_json(parse_entries(parse_json(header_text(raw, room), room), len(raw), Problems()), size)
    except HeaderError as error:
        assert "bytes of memory" in str(error)
        return False
    return True


def smallest(fields: dict[str, Any]) -> bytes:
    """A file that is just large enough for its header."""
    data = container(fields, 64)
    raw = data[: 8 + int.from_bytes(data[:8], "little")]
    low, high = len(raw) // 2, 64 * len(raw)
    while high - low > low / 50:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(raw, middle) else (middle, high)
    return container(fields, max(high + 1024 - len(raw), 0))


@pytest.mark.parametrize(("way", "enough"), [("container", False), ("container", True), ("check", True)])
def test_a_header(tmp_path: Path, way: str, enough: bool) -> None:
    """Of each kind, in a file of nothing else, and in one that is just large enough for it to be read."""
    sizes: dict[str, int] = {}
    for name, fields in cases().items():
        data = smallest(fields) if enough else container(fields)
        sizes[name] = len(data)
        (tmp_path / f"{name}.kv").write_bytes(data)
    for name, found in zip(sizes, measured(way, [tmp_path / f"{name}.kv" for name in sizes]), strict=True):
        # Pages of the mapped file are the system's; they are all read where digests are compared.
        mapped = sizes[name] if way == "check" and "reading it may take" not in found["said"] else 0
        assert found["peak"] - mapped <= 2 * sizes[name] + TIGHT, (name, sizes[name], found)
        assert not enough or "reading it may take" not in found["said"], (name, sizes[name], found)


def test_token_ids_of_a_file_that_is_little_else() -> None:
    """As of a recurrent model: 200 000 tokens and 300 KB of state, where six bytes of text stand for each token."""
    ids = [10_000 + i % 90_000 for i in range(200_000)]
    plain = {"codecs": [], "extra": {}, "model": {**manifest()["model"], "name": "m"}}  # wide characters make all of a text wide
    data = container(manifest(tokens={"ids": ids, "blake3": tokens_digest(ids)}, **plain), 300_000)
    assert fits(data[: 8 + int.from_bytes(data[:8], "little")], len(data))


def test_ids_elsewhere_are_not_the_tokens(tmp_path: Path) -> None:
    other = {"blake3": tokens_digest([1, 2]), "ids": [1, 2]}
    for ids in ([], [3, 4]):
        fields = manifest(extra={"tokens": other}, tokens={"ids": ids, "blake3": tokens_digest(ids)})
        (tmp_path / "a.kv").write_bytes(container(fields))
        with open_container(tmp_path / "a.kv") as reader:
            assert reader.manifest.tokens is not None and reader.manifest.tokens.ids == ids
            assert reader.manifest.extra["tokens"] == other
    fields = manifest(extra={"tokens": other}, tokens=None)
    (tmp_path / "b.kv").write_bytes(container(fields))
    with open_container(tmp_path / "b.kv") as reader:
        assert reader.manifest.tokens is None and reader.manifest.extra["tokens"] == other


def test_tokens_in_what_is_no_object(tmp_path: Path) -> None:
    listed = dumps(dumps([{"tokens": {"blake3": tokens_digest([1]), "ids": [1]}}]))
    text = f'{{"__metadata__":{{"format":"kvtool","header_blake3":"{"0" * 64}","kvtool":{listed}}}}}'
    (tmp_path / "a.kv").write_bytes(seal(text.encode(), b""))
    with pytest.raises(ManifestError, match="must be an object, but is a list of 1"):
        open_container(tmp_path / "a.kv")


@pytest.mark.parametrize("text", ["1,,2", ",1", "1,", "01", "1e3", "-1", "1, 2", "2147483648", "99999999999"])
def test_ids_that_are_not_read_apart(text: str) -> None:
    assert TokenIds.parse(text.encode()) is None


def test_ids_are_a_sequence() -> None:
    ids = TokenIds.parse(b"5,0,2147483647")
    assert ids is not None and ids == (5, 0, 2**31 - 1) and ids == [5, 0, 2**31 - 1] and ids != (5, 0)
    assert list(ids) == [*ids] and ids[1:] == (0, 2**31 - 1) and ids[-1] == 2**31 - 1 and 5 in ids and len({ids, tuple(ids)}) == 1
    long = list(range(99_990, 199_990))
    assert TokenIds.parse(",".join(map(str, long)).encode()) == long and TokenIds.parse(b"") == ()


def test_what_a_reader_would_refuse_is_not_written(tmp_path: Path) -> None:
    wide = small_manifest()
    layers = tuple(replace(wide.layers[0], k=None, v=None, positions=((0, 5),)) for _ in range(20_000))
    with pytest.raises(ValueError, match=r"a reader would refuse this header: .* bytes of memory"):
        write_container(tmp_path / "a.kv", replace(wide, layers=layers, layer_inputs=()), [])
    assert not list(tmp_path.iterdir())


def test_elements_are_bounded_whatever_the_size() -> None:
    with pytest.raises(HeaderError, match="4194306 elements, more than 4194304"):
        scan("[" + "0," * (MAX_ELEMENTS + 1) + "0]", "header", Room(1 << 40))


def test_problems_hold_no_frames() -> None:
    """Nor does an error that was met before them, and that "from None" only hides."""
    problems = Problems()
    for how in ("hidden", "cause"):
        try:
            try:
                int(how)
            except ValueError as error:
                raise HeaderError("no number") from (None if how == "hidden" else error)
        except HeaderError as error:
            problems.append(error)
    assert all(problem.__traceback__ is problem.__context__ is problem.__cause__ is None for problem in problems)


def test_problems_without_end(tmp_path: Path) -> None:
    """Two hundred are named; an error that is kept takes more than what it is about."""
    laid = "".join(f',"{i}":0' for i in range(2000))
    text = f'{{"__metadata__":{{"format":"kvtool","header_blake3":"{"0" * 64}","kvtool":{dumps(dumps(manifest()))}}}{laid}}}'
    (tmp_path / "a.kv").write_bytes(seal(text.encode(), b""))
    problems = check(tmp_path / "a.kv")
    assert len(problems) == Problems.MOST + 1 and problems[-1].text.endswith("and more: the first 200 problems are named")
