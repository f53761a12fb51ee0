"""The array as it is, in the cache's own dtype: bit-exact, NaN payloads and signed zeros included.

Part: data (H, S, D), F16, BF16 or F32. A kernel reads D values per token and needs nothing else.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Self

import mlx.core as mx

from veloxquant_mlx import native
from veloxquant_mlx.codecs._base import FLOATS, Codec, Frame, Given, Layout, RoleName, Shape
from veloxquant_mlx.codecs._reading import RowReader, Tile
from veloxquant_mlx.metal._coded_operand import CodedOperand


@dataclass(frozen=True)
class Raw(Codec):
    """No compression."""

    id: ClassVar[str] = "raw"
    maps: ClassVar[bool] = True

    @classmethod
    def parse(cls, text: str, role: RoleName) -> "Raw | None":
        return cls() if text == cls.id else None

    def spec(self, role: RoleName | None = None) -> str:
        return self.id

    def to_params(self) -> dict:
        return {}

    @classmethod
    def from_params(cls, params: dict) -> Self:
        return cls()

    def default_frame(self, role: RoleName) -> Frame:
        return "post"

    def layout(self, shape: Shape, dtype: mx.Dtype) -> Layout:
        return {"data": (FLOATS[dtype], tuple(shape))}

    def encode(self, x: mx.array) -> dict[str, mx.array]:
        self._check_input(x)
        data = mx.contiguous(x)
        mx.eval(data)
        return {"data": data}

    def decode(self, parts: dict[str, mx.array], shape: Shape, dtype: mx.Dtype) -> mx.array:
        """Rebuild the array: the stored bits where dtype is the stored one, else one cast. See `Codec.decode`."""
        stored = parts["data"].dtype if "data" in parts else dtype
        stored = mx.bfloat16 if stored == mx.uint16 else stored
        return self._checked_parts(parts, self.layout(shape, stored if stored in FLOATS else dtype))["data"].astype(dtype)

    def unfused(self, dim: int, rotated: bool) -> str | None:
        return None

    def row_reader(self, parts: dict[str, mx.array], shape: Shape) -> RowReader:
        stored = parts["data"].dtype if "data" in parts else mx.float32
        return _RawReader(self, self._checked_parts(parts, self.layout(shape, mx.bfloat16 if stored == mx.uint16 else stored)), shape)


class _RawReader(RowReader):
    def tile(self, start: int, stop: int, given: Given | None = None, after: mx.array | None = None) -> Tile:
        return Tile(self.sliced(start, stop, after)["data"].astype(mx.float32))

    @cached_property
    def stored(self) -> Any:
        if self.shape[2] > native.max_dim():
            return None
        rows, data = native.stored(self.shape), self.parts["data"]
        rows.floats(native.shared(data), data.dtype == mx.bfloat16)
        return rows

    @cached_property
    def operand(self) -> CodedOperand:
        data = self.parts["data"]
        return CodedOperand("plain", self.shape, (data,), (("TYPE", data.dtype),))
