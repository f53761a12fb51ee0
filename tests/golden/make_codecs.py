"""Write the frozen codec cases: input, parameters, parts and decoded values. Run it once per version: `python -m tests.golden.make_codecs`.

A file that exists is never overwritten: what was written once must decode for ever.
"""

import json
from itertools import product
from pathlib import Path

import mlx.core as mx
import numpy as np

from veloxquant_mlx.allocators.codebooks import gaussian_codebook, residual_codebook
from veloxquant_mlx.codecs import CODECS, Codec, parse_codec

HERE = Path(__file__).parent
CODEBOOKS = HERE / "rvq" / "v1" / "codebooks.json"
STAGES: list[tuple[int, ...]] = [(a,) for a in range(1, 9)] + [(a, b) for a, b in product(range(1, 8), repeat=2) if a + b <= 8]
CASES = {
    "raw/v1/f32-d6": "k=raw,v=raw",
    "raw/v1/bf16-d64": "k=raw,v=raw",
    "raw/v1/f16-d80": "k=raw,v=raw",
    "rvq/v1/2+2-ls-center-f32-d64": "k=rvq-2+2:ls:center,v=raw",
    "rvq/v1/2+2-unbiased-center-bf16-d128": "k=rvq-2+2:unbiased:center,v=raw",
    "rvq/v1/3+1-unbiased-f16-d80": "k=rvq-3+1:unbiased:nocenter,v=raw",
    "rvq/v1/5-norm-seed7-f32-d36": "k=rvq-5:norm:nocenter:seed=7,v=raw",
    "rvq/v1/8-ls-f32-d62": "k=rvq-8:ls:nocenter,v=raw",
    "rabitq/v1/ls-center-f32-d96": "k=rabitq:ls:center,v=raw",
    "rabitq/v1/unbiased-f16-d64": "k=rabitq:unbiased:nocenter,v=raw",
    "rabitq/v1/2-ls-center-f32-d64": "k=rabitq-2:ls:center,v=raw",
    "rabitq/v1/4-unbiased-center-bf16-d80": "k=rabitq-4:unbiased:center,v=raw",
    "rabitq/v1/8-norm-seed7-f16-d36": "k=rabitq-8:norm:nocenter:seed=7,v=raw",
    "affine/v1/4-channel-f32-d64": "k=affine-4:channel,v=raw",
    "affine/v1/2-token-bf16-d80": "k=affine-2:token,v=raw",
    "affine/v1/3-channel-group4-f16-d36": "k=affine-3:channel:group=4,v=raw",
    "commvq/v1/1-f32-d64": "k=commvq-1,v=raw",
    "commvq/v1/2.25-bf16-d80": "k=commvq-2.25,v=raw",
    "commvq/v1/2-first4-dims8-f16-d36": "k=commvq-2:first=4:dims=8,v=raw",
    "vecinfer/v1/1.5-f32-d64": "k=vecinfer-1.5,v=raw",
    "vecinfer/v1/2-bf16-d32": "k=vecinfer-2,v=raw",
    "vecinfer/v1/1-nosmooth-f16-d80": "k=vecinfer-1:nosmooth,v=raw",
    "qjl/v1/1-center-f32-d64": "k=qjl,v=raw",
    "qjl/v1/3-nocenter-seed7-bf16-d36": "k=qjl-3:nocenter:seed=7,v=raw",
    "commvq-product/v1/2-f32-d64": "k=commvq-2:product,v=raw",
    "commvq-product/v1/1-bf16-d80": "k=commvq-1:product,v=raw",
    "commvq-product/v1/2-first4-dims8-f16-d36": "k=commvq-2:product:first=4:dims=8,v=raw",
}
DTYPES = {"f32": mx.float32, "f16": mx.float16, "bf16": mx.bfloat16}


def codec_of(name: str) -> Codec:
    return parse_codec(CASES[name]).k


def shape_and_dtype(name: str) -> tuple[tuple[int, int, int], mx.Dtype]:
    *_, dtype, dim = name.replace("/", "-").split("-")
    return (2, 9, int(dim[1:])), DTYPES[dtype]


def as_numpy(x: mx.array) -> np.ndarray:
    return np.array(x.view(mx.uint16) if x.dtype == mx.bfloat16 else x)


def codebooks() -> dict[str, list[float]]:
    """The last table of every number of bits: N's, and the second of A+B."""
    tables = {}
    for first, *second in STAGES:
        stage = gaussian_codebook(first)
        tables["+".join(map(str, (first, *second)))] = list(residual_codebook(second[0], stage) if second else stage)
    return tables


def main() -> None:
    if not CODEBOOKS.exists():
        CODEBOOKS.parent.mkdir(parents=True, exist_ok=True)
        CODEBOOKS.write_text(json.dumps(codebooks(), indent=0) + "\n")
    for case, name in enumerate(CASES):
        path = HERE / f"{name}.npz"
        if path.exists():
            continue
        shape, dtype = shape_and_dtype(name)
        rng = np.random.default_rng(case)
        values = rng.standard_normal(shape) + 2 * rng.standard_normal((shape[0], 1, shape[2]))
        values[:, 0] *= 0.01  # a row nearer to zero than to the mean
        values[1, 3] = 0.0
        x = mx.array(values.astype(np.float32)).astype(dtype)
        codec = codec_of(name)
        parts = codec.encode(x)
        decoded = CODECS[codec.id].from_params(codec.to_params()).decode(parts, shape, dtype)
        path.parent.mkdir(parents=True, exist_ok=True)
        arrays = {f"part_{part}": as_numpy(array) for part, array in parts.items()}
        np.savez_compressed(path, x=as_numpy(x), decoded=as_numpy(decoded), params=json.dumps(codec.to_params(), sort_keys=True), **arrays)
        print(path)


if __name__ == "__main__":
    main()
