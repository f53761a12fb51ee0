"""One segment of rows, encoded when the first of its tensors is asked for, and the error that its codec makes, counted in the same pass."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from veloxquant_mlx import native
from veloxquant_mlx.codecs import Codec, token_blocks
from veloxquant_mlx.codecs._base import FLOAT16_MAX, Given
from veloxquant_mlx.codecs._reading import RowReader
from veloxquant_mlx.codecs.raw import Raw
from veloxquant_mlx.metal._backend import backend
from veloxquant_mlx.native import converting
from veloxquant_mlx.transfer.rope import rotate
from veloxquant_mlx.transfer.rope_angles import undoing
from veloxquant_mlx.transfer.rope_spec import RopeSpec, unrotated

KEPT_BYTES = 1 << 24  # of freed buffers


@dataclass
class Tally:
    """Squared error and energy of one role of one layer, summed over its lossy segments."""

    error: float = 0.0
    energy: float = 0.0

    def add(self, exact: mx.array, decoded: mx.array) -> None:
        """Count a block of float32 rows."""
        self.error += energy(exact - decoded)
        self.energy += energy(exact)

    def add_rows(self, exact: np.ndarray, decoded: np.ndarray) -> None:
        """Count a block of float32 rows; `decoded` is overwritten."""
        self.energy += energy_of(exact)
        self.error += energy_of(np.subtract(exact, decoded, out=decoded))

    def relative(self) -> float:
        return self.error / self.energy if self.energy else 0.0


@dataclass
class SegmentWork:
    """One segment to encode: when the first of its tensors is asked for, and each tensor is given out once.

    Attributes:
        fetch: gives the rows as cached, (H, rows, D).
        shape: (H, rows, D).
        positions: gives those of the rows, int64 (rows,).
        rope: rotation of the rows as cached, or None.
        codec, frame: how they are stored.
        dtype: of raw rows; a narrowing that would overflow is an error.
        tally: where the error is added, or None.
        given: gives the decoded rows that the codec is predicted from, or None.
        keep: takes the decoded rows, as they were coded, float32, or None.
    """

    fetch: Callable[[], mx.array]
    shape: tuple[int, int, int]
    positions: Callable[[], np.ndarray]
    rope: RopeSpec | None
    codec: Codec
    frame: str
    dtype: mx.Dtype
    tally: Tally | None = None
    given: Callable[[], dict[str, mx.array]] | None = None
    keep: Callable[[mx.array], None] | None = None
    parts: dict[str, mx.array] | None = None

    def give(self, part: str) -> np.ndarray:
        return to_numpy(self.encoded().pop(part))

    def encoded(self) -> dict[str, mx.array]:
        """The parts that were not given out yet."""
        if self.parts is None:
            self.parts = self._encode()
            # MLX keeps freed buffers; a few blocks' temporaries would outweigh the file. Pages of a few are soon used again.
            if mx.get_cache_memory() > KEPT_BYTES:
                mx.clear_cache()
        return self.parts

    def _encode(self) -> dict[str, mx.array]:
        rows = self.fetch()
        if isinstance(self.codec, Raw):
            if self.dtype == mx.float16 and rows.dtype == mx.float32 and rows.size and not scalar(mx.max(mx.abs(rows))) <= FLOAT16_MAX:
                at = self.positions()
                raise ValueError(
                    f"[save] rows at positions {at[0]} to {at[-1]} hold values beyond float16 ({FLOAT16_MAX:g}) "
                    "or not finite, and would be kept exact in float16; use --codec raw, or --sink 0 --recent 0."
                )
            return self.codec.encode(rows.astype(self.dtype))
        given = None if self.given is None else self.given()
        if given is None and self.keep is None and rows.size and converting.in_use(self.shape[2]):
            found = self.codec.encode_measured(rows, undoing(self.rope, self.positions()) if self.frame == "pre" else None)
            if found is not None:
                parts, loss = found
                if self.tally is not None:
                    self.tally.error += loss.error
                    self.tally.energy += loss.energy
                return parts
        if self.frame == "pre":
            rows = stripped(rows, self.positions(), self.rope)
        parts = self.codec.encode(rows) if given is None else self.codec.encode(rows, given)
        mx.eval(parts)
        kept = None if self.keep is None else mx.zeros(self.shape, mx.float32)
        stored = native_rows(self.codec, parts, self.shape) if kept is None and given is None else None
        if self.tally is not None and stored is not None:
            for tokens in token_blocks(self.shape):
                decoded_rows = native.decoded(stored, tokens.start, tokens.stop)
                self.tally.add_rows(native.shared(rows[:, tokens].astype(mx.float32)), decoded_rows)
        elif self.tally is not None or kept is not None:
            for start, stop, decoded in decode_blocks(self.codec, parts, self.shape, given):
                if self.tally is not None:
                    self.tally.add(rows[:, start:stop].astype(mx.float32), decoded)
                if kept is not None:
                    kept[:, start:stop] = decoded
                    mx.eval(kept)
        if self.keep is not None and kept is not None:
            self.keep(kept)
        return parts


def stripped(rows: mx.array, positions: np.ndarray, rope: RopeSpec | None) -> mx.array:
    """Rows (H, S, D) as cached at these positions, before RoPE and in half-split order, float32."""
    heads, count, dim = rows.shape
    whole = mx.zeros(rows.shape, mx.float32)
    for tokens in token_blocks((heads, count, dim)):
        whole[:, tokens] = rotate(rows[:, tokens].astype(mx.float32), positions[tokens], rope, unrotated(rope))
        mx.eval(whole)
    return whole


def native_rows(codec: Codec, parts: dict[str, mx.array], shape: tuple[int, int, int]) -> Any:
    """Encoded rows as the native back end reads them, or None where it does not."""
    if codec.eager or not shape[1] or not native.available() or backend() != "cpu":
        return None
    return codec.row_reader(parts, shape).stored


def decode_blocks(
    codec: Codec, parts: dict[str, mx.array], shape: tuple[int, int, int], given: Given | None = None
) -> Iterator[tuple[int, int, mx.array]]:
    """(start, stop, float32 rows) of an encoded array, a block of tokens at a time; all at once of an eager codec."""
    if codec.eager:
        yield 0, shape[1], codec.decode(parts, shape, mx.float32, *(() if given is None else (given,)))
        return
    reader = RowReader(codec, parts, shape)
    for tokens in token_blocks(shape, codec.tokens_together):
        near = None if given is None else {name: x[:, tokens] for name, x in given.items()}
        yield tokens.start, tokens.stop, reader.decoded(tokens.start, tokens.stop, near)


def energy(x: mx.array) -> float:
    """Sum of squares of a float32 array; beyond float32's range too, where the largest value is taken out first."""
    total = scalar(mx.sum(mx.square(x)))
    if math.isfinite(total):
        return total
    peak = scalar(mx.max(mx.abs(x)))
    return scalar(mx.sum(mx.square(x / peak))) * peak**2


def energy_of(x: np.ndarray) -> float:
    """`energy` of an array in memory."""
    total = float(np.vdot(x, x))
    return total if math.isfinite(total) else float(np.square(x.astype(np.float64)).sum())


def scalar(value: mx.array) -> float:
    """A real 0-d array as a Python float."""
    number = value.item()
    assert isinstance(number, int | float)
    return float(number)


def to_numpy(value: mx.array) -> np.ndarray:
    """The bytes of an MLX array as NumPy (bfloat16 as uint16), evaluated and row-contiguous."""
    return np.ascontiguousarray(native.shared(value))
