"""Parts in memory that MLX does not own: pages of a file, which every process that maps it shares.

MLX cannot take such memory as an array without a copy; the extension reads it where it is.
"""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np


@dataclass(frozen=True, eq=False, slots=True)
class Mapped:
    """A part as a read-only view. What MLX computes with is copied each time, rows that are asked for alone, and never kept.

    Attributes:
        view: contiguous; bfloat16 as uint16.
        dtype: of the values.
        source: the file, for messages.
    """

    view: np.ndarray
    dtype: mx.Dtype
    source: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.view.shape

    @property
    def size(self) -> int:
        return self.view.size

    @property
    def nbytes(self) -> int:
        return self.view.nbytes

    def __getitem__(self, index: Any) -> mx.array:
        """The values at an index, copied."""
        array = mx.array(self.view[index])
        return array.view(mx.bfloat16) if self.dtype == mx.bfloat16 else array

    def astype(self, dtype: mx.Dtype) -> mx.array:
        """All values, copied."""
        return self[...].astype(dtype)

    def __str__(self) -> str:
        # mlx-lm's save_prompt_cache puts it into its message.
        return f"{self.nbytes} bytes of codes are mapped from {self.source}: save with kvtool.save, or load with mapped=False"
