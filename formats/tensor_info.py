"""One tensor of a kvtool file, as its header has it."""

from typing import NamedTuple


class TensorInfo(NamedTuple):
    """Logical dtype, shape and `bytes`; `stored` payload bytes at `offset` in the file, zero padded to `padded`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    stored: int
    padded: int
    offset: int
    encoding: str
    blake3: str
