"""Seeded mutations of valid files: only KVErrors come out, and no changed byte goes unnoticed."""

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import blake3
import pytest

from formats.check import check
from formats.container import open_container
from formats.errors import KVError
from formats.manifest import parse, to_json
from tests.container_cases import forge, outer_text, seal, split
from tests.golden.make_container import FOLDER

ROOT = Path(__file__).parents[1]
ODD = [
    None, True, False, 0, 1, -1, 63, 64, 2**31, 2**48, 2**53, 2**63, 10**18, 0.5, -0.0, 1e300, "", "x", "none", "zstd", "F16", "BF16", "\0",
    "../x", "00" * 32, [], {}, [0], [0, 0], [1, 0], [[0, 1]], [None], {"x": 1}, [0] * 40, "layers.0.k.0.x", "full", "post",
]  # fmt: skip


def outcome(path) -> str:
    """Open, read and check the file. Anything but a KVError escapes and fails the test."""
    problems = check(path)
    assert all(problem.exit_code in (3, 4) and problem.text.startswith(f"{path}: ") for problem in problems)
    try:
        with open_container(path) as reader:
            assert parse(to_json(reader.manifest)) == reader.manifest
            defects = reader.verify()
            assert len(defects) == len(problems)
            return "damaged" if defects else "sound"
    except KVError as error:
        assert problems and problems[0].error == type(error).__name__
        return "refused"


@pytest.mark.parametrize("name", ["tiny", "raw", "zstd"])
def test_bytes(tmp_path, name):
    data = (FOLDER / f"{name}.kv").read_bytes()
    rng = random.Random(name)
    path = tmp_path / "a"
    for _ in range(400):
        mutated = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            at, size = rng.randrange(len(data)), rng.choice([1, 1, 2, 8, 64, 500])
            match rng.randrange(5):
                case 0:
                    mutated[at : at + size] = rng.randbytes(size)
                case 1:
                    del mutated[at : at + size]
                case 2:
                    mutated[at:at] = rng.randbytes(size)
                case 3:
                    start = rng.randrange(len(data))
                    mutated[at : at + size] = data[start : start + size]
                case 4:
                    del mutated[at:]
        path.write_bytes(mutated)
        assert (outcome(path) == "sound") == (bytes(mutated) == data)


def nodes(value, found: list) -> list:
    """Every (container, key) below a JSON value."""
    for key, child in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        found.append((value, key))
        nodes(child, found)
    return found


def mutate(value, rng: random.Random) -> None:
    found = nodes(value, [])
    if not found:
        return
    container, key = rng.choice(found)
    match rng.randrange(6):
        case 0 if isinstance(container, dict):
            del container[key]
        case 1 if isinstance(container, list):
            container.insert(key, rng.choice(ODD))
        case 2 if isinstance(container[key], int):
            container[key] += rng.choice([-64, -1, 1, 64, 2**62])
        case 3 if isinstance(container[key], str):
            container[key] = container[key][: rng.randrange(len(container[key]) + 1)]
        case 4:
            other, name = rng.choice(found)
            container[key] = json.loads(json.dumps(other[name]))
        case _:
            container[key] = rng.choice(ODD)


@pytest.mark.parametrize("name", ["tiny", "raw", "zstd"])
def test_json_values_with_the_right_digest(tmp_path, name):
    data = (FOLDER / f"{name}.kv").read_bytes()
    rng = random.Random(name)
    path = tmp_path / "a"
    seen = {"sound": 0, "damaged": 0, "refused": 0}
    for _ in range(450):
        outer, manifest, _ = split(data)
        tensors = {key: value for key, value in outer.items() if key != "__metadata__"}
        for _ in range(rng.randint(1, 2)):
            mutate(manifest if rng.random() < 0.75 else tensors, rng)
        path.write_bytes(forge(data, tensors, manifest))
        seen[outcome(path)] += 1
    # The deeper checks are reached, and harmless edits (a name, an unknown key) are not refused.
    assert seen["refused"] > 100 and seen["sound"] > 10


def test_json_text_with_the_right_digest(tmp_path):
    data = (FOLDER / "raw.kv").read_bytes()
    outer, manifest, tail = split(data)
    rng = random.Random(5)
    path = tmp_path / "a"
    pieces = [
        "[",
        "]",
        "{",
        "}",
        '"',
        "\\",
        ",",
        ":",
        "0",
        "9" * 19,
        "1e",
        "NaN",
        "null",
        "\\ud800",
        "\\u0000",
        "é",
        " ",
        "\n",
        "[" * 40,
        '"a":1,',
    ]
    for _ in range(400):
        text = json.dumps(manifest, separators=(",", ":"))
        inner = rng.random() < 0.5
        if not inner:
            text = outer_text(outer, manifest)
        # Behind the fixed beginning, which `seal` needs.
        at = rng.randrange(130, len(text))
        text = text[:at] + rng.choice(pieces) + text[at + rng.choice([0, 0, 1, 5]) :]
        path.write_bytes(seal(outer_text(outer, text) if inner else text, tail))
        outcome(path)


def test_tensor_bytes_with_the_right_digests(tmp_path):
    data = (FOLDER / "zstd.kv").read_bytes()
    outer, manifest, tail = split(data)
    name = next(name for name, info in manifest["tensors"].items() if info["encoding"] == "zstd")
    begin, end = outer[name]["data_offsets"]
    rng = random.Random(6)
    path = tmp_path / "a"
    seen = {"sound": 0, "damaged": 0, "refused": 0}
    for _ in range(300):
        mutated = bytearray(tail)
        for _ in range(rng.randint(1, 2)):
            mutated[rng.randrange(begin, begin + manifest["tensors"][name]["stored"])] = rng.randrange(256)
        manifest["tensors"][name]["blake3"] = blake3.blake3(mutated[begin:end]).hexdigest()
        path.write_bytes(forge(data, outer, manifest, bytes(mutated)))
        seen[outcome(path)] += 1
    assert seen["damaged"] > 100 and seen["refused"] == 0


def test_guided_by_coverage():
    """A few seconds of `tests.fuzz_parser`; KVTOOL_FUZZ_SECONDS=600 is its long form."""
    pytest.importorskip("atheris", reason="atheris is not installed")
    seconds = os.environ.get("KVTOOL_FUZZ_SECONDS", "4")
    command = [sys.executable, "-m", "tests.fuzz_parser", "--seconds", seconds, "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60 + int(seconds), check=False, cwd=ROOT)
    assert done.returncode == 0 and re.search(r"Done \d{3,} runs", done.stderr), done.stderr[-3000:]
