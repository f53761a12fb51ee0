"""What every codec promises: an (H, S, D) array in, named parts out, and back.

A codec is a small frozen dataclass. All that decoding needs, besides the parts themselves, is in `to_params`, as JSON, so that a file
decodes without this package's defaults or tables. Parts are stored as they are: row-major, little-endian, the packed axis last.

A calibrated codec has tables that were learnt for one layer and role before. `parse` gives it without them, unbound; it is bound to a
layer's tables before it encodes. Its params name the calibration they are from (`calibration`), unless they are carried as parts, and
`with_tables` completes what `from_params` read. It may also predict its rows from decoded ones (`needs`, `given`).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, ClassVar, Literal, Self

import mlx.core as mx
import numpy as np

from veloxquant_mlx import native
from veloxquant_mlx.codecs._reading import RowReader
from veloxquant_mlx.metal._backend import backend
from veloxquant_mlx.native.encoding import Loss, Undo
from veloxquant_mlx.native.mapped import Mapped

Shape = tuple[int, int, int]  # H, S, D
RoleName = Literal["k", "v"]
Frame = Literal["post", "pre"]
Layout = dict[str, tuple[str, tuple[int, ...]]]
Given = Mapping[str, mx.array]
Parts = Mapping[str, mx.array | Mapped]

DTYPES = {
    "U8": mx.uint8,
    "I8": mx.int8,
    "U16": mx.uint16,
    "U32": mx.uint32,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
    "F32": mx.float32,
}  # safetensors name -> dtype of a part
FLOATS = {mx.float16: "F16", mx.bfloat16: "BF16", mx.float32: "F32"}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
LARGEST = 1e36  # beyond it a float32 sum over a row could overflow
SMALLEST = 2.0**-120  # below it a row's values, or a group's step, count as zero
FLOAT16_MAX = 65504.0
BLOCK_VALUES = 1 << 18  # values per block: about 1 MiB for each float32 temporary
_SHOWN = 3  # places named when values are refused


class Codec(ABC):
    """One way to store the keys or the values of a layer. Instances are equal when they encode and decode alike."""

    id: ClassVar[str]
    maps: ClassVar[bool] = False  # whether its reader takes `Mapped` parts, for the native back end to read
    read_natively: ClassVar[bool] = True  # whether the native back end attends to its codes

    @property
    def tokens_together(self) -> int:
        """Tokens that share an entry of a part: blocks of rows start at multiples of it."""
        return 1

    @property
    def needs(self) -> tuple[str, ...]:
        """Decoded rows that encode and decode take as `given`: "k", this layer's keys; "k-" and "v-", keys and values of layer `after`."""
        return ()

    @property
    def after(self) -> str | None:
        """Name of the layer that "k-" and "v-" come from, or None."""
        return None

    @property
    def eager(self) -> bool:
        """Whether the sizes of the parts are known only once they are encoded: the layout then has -1 in their place."""
        return False

    @property
    def grows(self) -> bool:
        """Whether further rows of the layer can be encoded at no cost of their own: no tables learnt from the rows go with the parts."""
        return not self.eager

    @property
    def calibration(self) -> str | None:
        """blake3 of the calibration file whose tables this codec lacks, or None where it lacks none."""
        return None

    def with_tables(self, tables: Any) -> "Codec":
        """The codec with the tables of its layer and role from the calibration `calibration`.

        Raises:
            ValueError: tables of another kind or shape than the codec's parameters say.
        """
        raise ValueError(f"[{self.id}] takes no tables.")

    @classmethod
    @abstractmethod
    def parse(cls, text: str, role: RoleName) -> "Codec | None":
        """The codec that a spec string names for a role, defaults filled in; None if the string is not this codec's.

        Raises:
            ValueError: the string is this codec's, but its options are wrong.
        """

    @abstractmethod
    def spec(self, role: RoleName | None = None) -> str:
        """Spec string, which `parse` reads back.

        Args:
            role: leave out what is the default for this role; None spells out every option, so that the string means this codec anywhere.
        """

    @abstractmethod
    def to_params(self) -> dict:
        """JSON object with everything that decoding needs besides the parts."""

    @classmethod
    @abstractmethod
    def from_params(cls, params: dict) -> Self:
        """The codec that `to_params` described.

        Raises:
            formats.errors.ManifestError: a field is missing or impossible.
        """

    @abstractmethod
    def default_frame(self, role: RoleName) -> Frame:
        """Which keys it codes best: as cached ("post" RoPE), or with the rotation undone ("pre")."""

    def takes(self, dim: int) -> bool:
        """Whether rows of D = dim can be coded."""
        return True

    def for_rotary(self, first: int, dims: int, dim: int) -> "Codec":
        """The codec for rows of which RoPE turns entries first to first + dims, of D = dim."""
        return self

    @abstractmethod
    def layout(self, shape: Shape, dtype: mx.Dtype) -> Layout:
        """Safetensors dtype and shape of every part that `encode` returns for such an array.

        Args:
            shape: (H, S, D).
            dtype: float16, bfloat16 or float32.

        Returns:
            Part name -> (dtype, shape); a size of -1 is any, of an `eager` codec alone.
        """

    @abstractmethod
    def encode(self, x: mx.array, given: Given | None = None) -> dict[str, mx.array]:
        """Compress an array.

        Args:
            x: (H, S, D), float16, bfloat16 or float32; S may be 0.
            given: each of `needs` -> float32 (H, S, D), keys before RoPE, of the same tokens as x. A codec without needs takes none.

        Returns:
            The parts of `layout(x.shape, x.dtype)`, evaluated. Temporaries take a few times BLOCK_VALUES.

        Raises:
            TypeError: x is not floating-point.
            ValueError: x is not 3-D, or has values the codec cannot hold; the message says how many and where.
        """

    def encode_measured(self, x: mx.array, undo: Undo | None) -> tuple[dict[str, mx.array], Loss] | None:
        """`encode` with a rotary embedding undone first, and what was lost, in one pass over the rows: None where that has no way to.

        Args:
            x: as of `encode`; values that it would refuse give None.
            undo: the rotary embedding, or None.
        """
        return None

    @abstractmethod
    def decode(self, parts: Parts, shape: Shape, dtype: mx.Dtype, given: Given | None = None) -> mx.array:
        """Rebuild the array.

        Args:
            parts: what `encode` returned, or the same read from a file (`Mapped` where the codec `maps`); a BF16 part may
                come as its uint16 bits.
            shape: (H, S, D) of the array that was encoded.
            dtype: of the result.
            given: as in `encode`; what encode saw and decode sees must be the same bits.

        Raises:
            ValueError: a part is missing, or has another dtype or shape than `layout` says.
        """

    def row_reader(self, parts: Parts, shape: Shape) -> RowReader:
        """What reads tiles of rows from their parts, as attention wants them.

        Args:
            parts: what `encode` returned, or the same read from a file (`Mapped` where the codec `maps`).
            shape: (H, S, D) of the array that was encoded; S may be 0.

        Raises:
            ValueError: an eager codec, or parts that `layout` does not describe.
        """
        if self.eager:
            raise ValueError(f"[{self.id}] rows are decoded all at once; they cannot be read tile by tile.")
        return RowReader(self, self._checked_parts(parts, self.layout(shape, mx.float32)), shape)

    def unfused(self, dim: int, rotated: bool) -> str | None:
        """Why a GPU's kernel has no way to read rows of D = dim as they are stored, or None where it has (`RowReader.operand`).

        Args:
            rotated: whether RoPE has yet to turn the decoded rows.
        """
        return f"there is no kernel for the codes of {self.id}"

    def nbytes(self, shape: Shape, dtype: mx.Dtype) -> int:
        """Bytes of all parts, side information included, before any padding of the container.

        Raises:
            ValueError: an eager codec, whose sizes the shape does not tell.
        """
        if self.eager:
            raise ValueError(f"[{self.id}] sizes are known only once the rows are encoded.")
        return sum(DTYPES[part_dtype].size * prod(part_shape) for part_dtype, part_shape in self.layout(shape, dtype).values())

    def _check_input(self, x: mx.array) -> None:
        if x.dtype not in FLOATS:
            raise TypeError(f"[{self.id}] x must be float16, bfloat16 or float32, but got {x.dtype}.")
        if x.ndim != 3:
            raise ValueError(f"[{self.id}] x must be (H, S, D), but got {tuple(x.shape)}.")

    def _check_finite(self, x: mx.array) -> None:
        if x.size == 0 or all(within(x[:, tokens], LARGEST) for tokens in token_blocks(x.shape)):
            return
        bad = np.argwhere(~(np.array(mx.abs(x.astype(mx.float32))) <= LARGEST))
        shown = ", ".join(f"(head {h}, token {s}, dim {d}): {x[int(h), int(s), int(d)].item()}" for h, s, d in bad[:_SHOWN])
        more = f", and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
        raise ValueError(
            f"[{self.id}] {len(bad)} of {x.size} values are NaN, infinite or beyond {LARGEST:g}: {shown}{more}; --codec raw stores them."
        )

    def _checked_given(self, given: Given | None, shape: Shape) -> dict[str, mx.array]:
        """The rows that `needs` names."""
        checked = {}
        for name in self.needs:
            if given is None or name not in given:
                raise ValueError(f"[{self.id}] needs the decoded rows {name!r}; got {sorted(given or ())}.")
            rows = given[name]
            if rows.dtype != mx.float32 or rows.ndim != 3 or rows.shape[1] != shape[1]:
                raise ValueError(
                    f"[{self.id}] given {name!r} must be float32 (H, {shape[1]}, D), but got {rows.dtype} {tuple(rows.shape)}."
                )
            checked[name] = rows
        return checked

    def _checked_parts(self, parts: Parts, layout: Layout) -> dict[str, mx.array]:
        """The parts of a layout, BF16 ones as bfloat16 arrays."""
        checked = {}
        for name, (dtype, shape) in layout.items():
            if name not in parts:
                raise ValueError(f"[{self.id}] part {name!r} is missing; got {sorted(parts)}.")
            part = parts[name]
            if dtype == "BF16" and part.dtype == mx.uint16:
                part = part.view(mx.bfloat16)
            got = _NAMES.get(part.dtype, str(part.dtype))
            if got != dtype or not fits(tuple(part.shape), shape):
                raise ValueError(f"[{self.id}] part {name!r} must be {dtype} {shape}, but got {got} {tuple(part.shape)}.")
            checked[name] = part
        return checked


def within(x: mx.array, limit: float) -> bool:
    """Whether all floats of a non-empty array are finite and at most `limit` in size."""
    if backend() != "cpu":
        return mx.max(mx.abs(x)).item() <= limit  # a NaN fails any comparison
    # Without their sign floats are in the order of their bits, and NaN is above all; MLX's CPU build takes ten times as long.
    bits = native.shared(x).view(np.uint32 if x.dtype == mx.float32 else np.uint16)
    if x.dtype == mx.float16:
        most = int(np.array(min(limit, FLOAT16_MAX), np.float16).view(np.uint16))
    else:
        most = int(np.array(limit, np.float32).view(np.uint32)) >> (0 if x.dtype == mx.float32 else 16)
    return int((bits & bits.dtype.type(-1 & (1 << 8 * bits.itemsize - 1) - 1)).max()) <= most


def peaks_of(x: mx.array) -> np.ndarray:
    """Largest |x| of each channel of rows (H, S, D), S at least 1, in MLX's memory of a CPU: (H, D) float32, NaN where there is one."""
    # As in `within`, by bits: MLX's CPU build takes some 20 times as long.
    bits = native.shared(x).view(np.uint32 if x.dtype == mx.float32 else np.uint16)
    magnitude = bits.dtype.type((1 << 8 * bits.itemsize - 1) - 1)
    peaks = np.zeros((x.shape[0], x.shape[2]), bits.dtype)
    for tokens in token_blocks(x.shape):
        np.maximum(peaks, (bits[:, tokens] & magnitude).max(axis=1), out=peaks)
    if x.dtype == mx.float16:
        return peaks.view(np.float16).astype(np.float32)
    return (peaks if x.dtype == mx.float32 else peaks.astype(np.uint32) << np.uint32(16)).view(np.float32)


def fits(shape: tuple[int, ...], laid_out: tuple[int, ...]) -> bool:
    """Whether an array of this shape is what a layout says, in which -1 is any size."""
    if shape == laid_out:
        return True
    return len(shape) == len(laid_out) and all(want in (-1, size) for size, want in zip(shape, laid_out, strict=True))


def reciprocal(size: mx.array) -> mx.array:
    """1 / size, 0 where that could overflow."""
    return mx.where(size >= SMALLEST, 1 / size, 0.0)


def token_blocks(shape: Shape, multiple: int = 1) -> Iterator[slice]:
    """Slices of the token axis with about BLOCK_VALUES values each; all but the last hold a multiple of `multiple` tokens."""
    heads, tokens, dim = shape
    step = max(1, BLOCK_VALUES // max(1, heads * dim * multiple)) * multiple
    return (slice(start, min(start + step, tokens)) for start in range(0, tokens, step))
