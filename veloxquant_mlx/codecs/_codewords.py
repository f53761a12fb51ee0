"""Rows whose codes stand for codewords, as the native back end reads them."""

from functools import cached_property
from typing import Any, Literal

import mlx.core as mx
import numpy as np

from veloxquant_mlx import native
from veloxquant_mlx.codecs._reading import RowReader
from veloxquant_mlx.native.mapped import Mapped

Form = Literal["runs", "planes", "parts"]
FORMS: tuple[Form, ...] = ("runs", "planes", "parts")


class NativeReader(RowReader):
    """Reads the rows of a codec that says itself what the native back end is to know of them (`native_rows`)."""

    @cached_property
    def stored(self) -> Any:
        return None if self.shape[2] > native.max_dim() else self.codec.native_rows(self.parts, self.shape)


def codewords(
    shape: tuple[int, int, int],
    form: Form,
    codes: Any,
    size: int,
    place: np.ndarray,
    bits: Any,
    table: np.ndarray,
    values: np.ndarray,
    order: np.ndarray | None = None,
    exact: np.ndarray | None = None,
) -> Any:
    """Rows (H, S, D) of n codes each.

    Args:
        form: what a code stands for: `runs`, `size` neighbouring entries; `planes`, entries i and i + D / 2 of n = D / 2; `parts`, one
            component of n = D, for the caller to give their basis.
        codes: (H, S, bytes) uint8, or (1, S, bytes) of all heads.
        place, bits: of each code, up to (H, n): the bit of a row at which it begins, and how many it has, 0 to 8.
        table: up to (H, n): where the 2^bits codewords of each begin in `values`, each of `size` numbers; of a plane real parts, then
            imaginary ones, each repeated to at least 16.
        values: float32, or float16 of `runs`.
        order: (D,), the entry of a row that each of those entries is; None for as they are.
        exact: (H, D) float32, the row in place of those whose bit 0 is set.
    """
    heads, _, dim = shape
    count = dim // size
    rows = native.stored(shape)

    def every(x: Any, dtype: type) -> np.ndarray:
        return np.ascontiguousarray(np.broadcast_to(np.asarray(x, dtype), (heads, count)))

    how = (every(place, np.int32), every(bits, np.int32), every(table, np.int64), np.ascontiguousarray(values.reshape(-1)))
    plain = order is None or np.array_equal(order, np.arange(dim))
    rows.codewords(FORMS.index(form), native.packed(codes), size, *how, None if plain else np.asarray(order, np.int32), exact)
    return rows


def float32(part: mx.array | Mapped) -> np.ndarray:
    """A part of floats as a float32 array of its own."""
    return np.array(part.astype(mx.float32))
