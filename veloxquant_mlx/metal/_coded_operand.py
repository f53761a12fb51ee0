"""Keys or values as live caches hold them, for the kernels that attend to them on a GPU."""

import math
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx


@dataclass(frozen=True, eq=False)
class CodedOperand:
    """Keys or values of one layer as the kernel reads them: row = (stored row) matrix, times smooth.

    Fields:
        form: "table", "affine", "plain", "words" (one table of vectors), "places" (one for every place in a row), or, in place of keys,
            "scores", which (H R, S) float32 in log2 are there already.
        shape: (H, S, D).
        arrays: codes, and the form's other arrays; scales and zeros as bits of bfloat16.
        constants: (name without the role's prefix, value) of the form.
        staged: table that is copied to threadgroup memory, float32, or None.
        mean: (H, D) float32 in the frame of the stored rows, added where a scale has no sign; or None.
        matrix: (D, D) float32, or None.
        signs: (D,) float32 where matrix is a Walsh-Hadamard transform and these signs, over sqrt(D).
        smooth: (H, D) float32, or None.
    """

    form: str
    shape: tuple[int, int, int]
    arrays: tuple[mx.array, ...]
    constants: tuple[tuple[str, bool | int | mx.Dtype], ...] = ()
    staged: mx.array | None = None
    mean: mx.array | None = None
    matrix: mx.array | None = None
    signs: mx.array | None = None
    smooth: mx.array | None = None

    @cached_property
    def pair_signs(self) -> mx.array | None:
        """Of channels that RoPE turns together, the product of both signs, (D / 2,)."""
        if self.signs is None:
            return None
        half = self.shape[2] // 2
        product = self.signs[:half] * self.signs[half:]
        mx.eval(product)
        return product

    @cached_property
    def query_signs(self) -> mx.array:
        """What takes queries to the frame before the transform, for scores in log2, (D,)."""
        assert self.signs is not None
        made = self.signs * (math.log2(math.e) / math.sqrt(self.shape[2]))
        mx.eval(made)
        return made

    @cached_property
    def query_matrix(self) -> mx.array:
        """What takes queries, as rows, to the frame of the stored rows, for scores in log2, (D, D)."""
        assert self.matrix is not None
        made = mx.contiguous(self.matrix.swapaxes(0, 1) * math.log2(math.e))
        mx.eval(made)
        return made

    @cached_property
    def stage_mean(self) -> mx.array | None:
        """The mean after all stages of the transform but the last, not normalised."""
        if self.mean is None:
            return None
        heads, dim = self.mean.shape
        found = mx.hadamard_transform(self.mean.reshape(heads, 2, dim // 2), scale=1.0).reshape(heads, dim)
        mx.eval(found)
        return found

    @cached_property
    def sizes(self) -> dict[str, bool | int | mx.Dtype]:
        return dict(self.constants)

    @cached_property
    def largest_scale(self) -> float:
        """Of the rows, whatever its sign; 1 where rows have none."""
        at = {"table": 2, "affine": 1}.get(self.form)
        return 1.0 if at is None else _largest(self.arrays[at])

    @cached_property
    def largest_zero(self) -> float:
        """Of affine rows, whatever its sign."""
        return _largest(self.arrays[2])

    @cached_property
    def bound(self) -> float:
        """What no entry of rows of a table exceeds, once their Walsh-Hadamard transform is undone but not normalised."""
        assert self.form == "table" and self.staged is not None
        entry = sum(mx.max(mx.abs(part)).item() for part in mx.split(self.staged, [1 << self.sizes["BITS"]]) if part.size)
        return self.shape[2] * (self.largest_scale * entry + (0.0 if self.mean is None else mx.max(mx.abs(self.mean)).item()))


def _largest(bits: mx.array) -> float:
    """The largest of bfloat16 numbers without their signs."""
    return mx.max(bits & 0x7FFF).astype(mx.uint16).view(mx.bfloat16).item()
