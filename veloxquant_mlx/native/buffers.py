"""Memory for results: an MLX array that nothing has written yet.

`mx.empty` writes zeros, with one thread and a page fault for every 4 KiB: for a large result that takes longer than computing it. MLX has
no other way to make an array on a CPU but loading one, which allocates it and hands its memory to the file's `readinto`; the file here
leaves that memory as it is.
"""

import io
import math

import mlx.core as mx
import numpy as np

LEAST_BYTES = 1 << 20  # below it zeros take no longer
_NUMPY = {mx.uint8: "|u1", mx.uint16: "<u2", mx.float16: "<f2", mx.float32: "<f4"}


class _Unread(io.RawIOBase):
    """An .npy file of a header alone: what is read beyond it changes nothing."""

    def __init__(self, header: bytes) -> None:
        self.header, self.at = header, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = offset + (self.at if whence == io.SEEK_CUR else 0)
        return self.at

    def tell(self) -> int:
        return self.at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        held = self.header[self.at : self.at + len(buffer)]
        buffer[: len(held)] = held
        self.at += len(buffer)
        return len(buffer)


def empty(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """An array of any values, evaluated, for the caller to write through `native.shared`. MLX must compute on the CPU.

    Args:
        dtype: uint8, uint16, float16 or float32.
    """
    if math.prod(shape) * dtype.size < LEAST_BYTES:
        out = mx.zeros(shape, dtype)
    else:
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(header, {"descr": _NUMPY[dtype], "fortran_order": False, "shape": shape})
        out = mx.load(_Unread(header.getvalue()), format="npy")
    mx.eval(out)
    return out
