"""Faults planted in the CUDA text of the kernels: at least one per function, each must fail at least one of the cases named for it.

None changes a loop's end, a barrier or a place that is written, and none reads outside an array: a planted fault gives wrong results
and cannot hang or damage anything else on the GPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any
from unittest.mock import patch

from tests.cuda_attend_cases import DECODE_CASES
from tests.cuda_prefill_cases import PREFILL_CASES
from veloxquant_mlx.metal._kernel import Kernel, Language, _build
from veloxquant_mlx.selftest.case import Case, Mutation
from veloxquant_mlx.selftest.cases import CASES

# fmt: off
CUDA_MUTATIONS = (
    Mutation("vecinfer_quantize_metal", "ties go to the highest index", "if (distance < least)", "if (distance <= least)", ("ties",)),
    Mutation(
        "vecinfer_dequant_metal", "first value of a codeword is repeated", "codebook[index * sub_dim + i % sub_dim]",
        "codebook[index * sub_dim]", ("int32 out of range",),
    ),
    Mutation(
        "vecinfer_encode_decode_metal", "not multiplied by the factor", "turned[r] * factor", "turned[r] + 0.0f * factor",
        ("head of 32, factors per head",),
    ),
    Mutation(
        "vecinfer_encode_decode_simple_metal", "first value of a codeword is repeated", "float(codebook[index * SUB_DIM + j])",
        "float(codebook[index * SUB_DIM])", ("ties",),
    ),
    Mutation("rabitq_hamming_score", "and for xor", "(a + i) ^ *reinterpret_cast", "(a + i) & *reinterpret_cast", ("d64",)),
    Mutation("rabitq_fused_attend", "hamming without xor", "x[w] ^ key.x[w]", "x[w] & key.x[w]", ("prime",)),
    Mutation(
        "rabitq_fused_attend", "decode: hamming of one side", "decode_count(c, ~a[2 * tile], ~a[2 * tile + 1], sign);", "",
        ("decode: one step",),
    ),
    Mutation(
        "rabitq_fused_attend", "decode: not rescaled", "scale(keep[0], keep[1]);", "scale(1.0f, 1.0f);", ("decode: scores that grow",),
    ),
    Mutation("rabitq_fused_attend", "decode: splits overlap", "min(each * (int", "min(each + each * (int", ("decode: three splits",)),
    Mutation("rabitq_pack_values", "nibbles swapped", "code << (bit - start)", "code << (4 - (bit - start))", ("two", "in-range")),
    Mutation("rabitq_encode", "zero is negative", "v[c][e] >= 0.0f", "v[c][e] > 0.0f", ("d128-integers",)),
    Mutation("rabitq_prefill_attend", "highest bit first", "(byte >> e) & 1", "(byte >> (7 - e)) & 1", ("one-query",)),
    Mutation(
        "rabitq_prefill_attend", "tiles: signs of other bits", "plus << (15 - 2 * e)", "plus << (14 - 2 * e)", ("tiles: two tiles",),
    ),
    Mutation(
        "rabitq_prefill_attend", "tiles: nibbles swapped", "tile_pair(low * inverse, high * inverse, T())",
        "tile_pair(high * inverse, low * inverse, T())", ("tiles: two tiles",),
    ),
    Mutation("rabitq_prefill_attend", "tiles: factors of other keys", "factors[x / (D / 8)]", "factors[0]", ("tiles: factors",)),
    Mutation(
        "rabitq_prefill_attend", "tiles: not rescaled", "scale(keep[0], keep[1]);", "scale(1.0f, 1.0f);", ("tiles: scores that grow",),
    ),
    Mutation("scalar_fused_decode_attend", "zero subtracted", "scale[e], zero[e])", "scale[e], -zero[e])", ("prime",)),
    Mutation(
        "scalar_fused_decode_attend", "decode: weights twice", "if (rest != 0) {", "if (false) {",
        ("decode: one step",),
    ),
    Mutation(
        "scalar_fused_decode_attend", "decode: zeros of keys twice", "(0.5f * zero_unit)", "zero_unit", ("decode: one step",),
    ),
    Mutation("kivi_group_quant_dequant", "halves away from zero", "rintf(", "roundf(", ("keys, halves to even",)),
    Mutation(
        "comm_vq_decode_metal", "turned the other way", "__fsub_rn(__fmul_rn(a, turn.cosine)", "__fadd_rn(__fmul_rn(a, turn.cosine)",
        ("head of 32",),
    ),
    Mutation("crosskv_rope_recode", "table of one row", "{cosines[i], sines[i]}", "{cosines[i % HALF], sines[i % HALF]}", ("head of 32",)),
    Mutation("turboquant_scalar_quantize", "signed gap", "fabsf(x - float(centroids[i]))", "(x - float(centroids[i]))", ("seven",)),
    Mutation("turboquant_scalar_dequantize", "next centroid", "unsigned(codes[i]),", "unsigned(codes[i]) + 1u,", ("seven", "prime")),
    Mutation("turboquant_hadamard_quantize", "signs dropped", "__fmul_rn(run[t][c][e], sign[c][e])", "run[t][c][e]", ("d64",)),
    Mutation("turboquant_fused_rvq_decode_attend", "second stage subtracted", "x[e] += y[e];", "x[e] -= y[e];", ("prime",)),
    Mutation(
        "turboquant_fused_rvq_decode_attend", "decode: stages swapped", "decode_choose(one >> 2, two, LOW)",
        "decode_choose(two >> 2, one, LOW)", ("decode: one step",),
    ),
    Mutation(
        "turboquant_fused_rvq_decode_attend", "decode: pairs swapped", "decode_choose(word[0], word[1] << 4, LOW)",
        "decode_choose(word[1], word[0] << 4, LOW)", ("decode: one step",),
    ),
    Mutation(
        "turboquant_fused_rvq_decode_attend", "decode: factors of other tokens", "own, at.place + 8 * r)", "own, at.g + 8 * r)",
        ("decode: factors",),
    ),
    Mutation(
        "rvq_quant_pack", "most significant first", "scalar_place(at1, k * BITS)", "scalar_place(at1, (PER - 1 - k) * BITS)",
        ("b2-d64",),
    ),
    Mutation("flash_prefill_attend", "own key not visible", "dims[PREFILL_CAUSAL] ? at + 1", "dims[PREFILL_CAUSAL] ? at", ("two-tiles",)),
    Mutation("flash_prefill_attend", "tiles: no window", "range.low <= j && j < range.high ?", "j < range.high ?", ("tiles: window",)),
    Mutation("flash_prefill_attend", "tiles: lift stays in lse", "(sums[m].top[h] - TILE_LIFT)", "sums[m].top[h]", ("tiles: window",)),
    Mutation(
        "flash_prefill_attend", "tiles: units of factors mixed", "return before * inverse;", "return 1.0f;",
        ("tiles: factors that grow",),
    ),
    Mutation(
        "flash_prefill_attend", "tiles: infinite values dropped", "if (!isfinite(value)) {", "if (value != value) {",
        ("tiles: infinite value",),
    ),
    Mutation("streaming_prefill_attend", "not rescaled", "sum[r][e] *= keep", "sum[r][e] *= 1.0f", ("one-query",)),
    Mutation("h2o_fused_evict", "gap off by one", "row >= out ? 1 : 0", "row > out ? 1 : 0", ("three-rows", "d32")),
    Mutation("keyformer_fused_evict", "noise subtracted", "__fadd_rn(scores[i],", "__fsub_rn(scores[i],", ("noise-outweighs",)),
    Mutation("qfilters_score", "sinks off by one", "row < dims[2]", "row <= dims[2]", ("d32",)),
    Mutation("qfilters_fused_evict", "first rows gathered", "dims[0] + kept[to]", "dims[0] + row", ("ties", "d80")),
    Mutation("metal_fused_sdpa", "window off by one", "at - dims[ATTEND_WINDOW] + 1", "at - dims[ATTEND_WINDOW] + 2", ("window",)),
    Mutation("turboquant_bit_pack", "bit order", "code << (bit - start)", "code << (8 - BITS - (bit - start))", ("b2-one",)),
    Mutation("turboquant_bit_unpack", "words from the highest bit", "(i % per * BITS)", "((per - 1 - i % per) * BITS)", ("lsb32-b4-37",)),
    Mutation("qjl_encode", "strictly positive", "sums[r] >= 0.0f", "sums[r] > 0.0f", ("zero-projections",)),
    Mutation("qjl_inner_product", "most significant first", "byte >> t & 1", "byte >> (7 - t) & 1", ("m32",)),
)
# fmt: on
_cases = {case.id: case for case in (*CASES, *DECODE_CASES, *PREFILL_CASES)}


@dataclass(frozen=True)
class MutatedKernel(Kernel):
    """A kernel in whose text `old` is `new`; its registered name differs from the sound one's by the hash of the text."""

    old: str
    new: str

    def header(self, language: Language) -> str:
        return super().header(language).replace(self.old, self.new)

    def included(self) -> str:
        return self.header("cuda")

    def body(self, language: Language) -> str:
        return super().body(language).replace(self.old, self.new)


def mutated(kernel: Kernel, mutation: Mutation) -> MutatedKernel:
    return MutatedKernel(**{f.name: getattr(kernel, f.name) for f in fields(kernel)}, old=mutation.old, new=mutation.new)


def reaches(mutation: Mutation, kernel: Kernel) -> bool:
    """Whether the CUDA text of the kernel has the place."""
    return mutation.old in kernel.header("cuda") or mutation.old in kernel.body("cuda")


def cases_of(mutation: Mutation) -> list[Case]:
    return [_cases[f"{mutation.function}-{name}"] for name in mutation.cases]


@contextmanager
def planted(mutation: Mutation) -> Iterator[None]:
    """Within the block, kernels are built from the mutated text."""

    def build(kernel: Kernel, language: Language, shared_memory: int = 0) -> Any:
        return _build(mutated(kernel, mutation), language, shared_memory)

    with patch.object(Kernel, "build", build):
        yield
