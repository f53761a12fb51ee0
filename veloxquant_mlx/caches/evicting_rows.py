"""What an evicting cache holds: rows as they are, or codes between the exact first and newest rows; each head rows of its own.

Rows are in the order of the text. `add` takes new ones behind the others, `keep` lets some go.
"""

from collections.abc import Callable, Iterator

import mlx.core as mx
import numpy as np

from veloxquant_mlx.caches.blocks import Block, CodedRows, tile_tokens
from veloxquant_mlx.caches.coded import Fetched
from veloxquant_mlx.codecs import CodecPlan
from veloxquant_mlx.codecs._base import Codec, RoleName
from veloxquant_mlx.codecs._rotated import encode_centred
from veloxquant_mlx.codecs.raw import Raw
from veloxquant_mlx.transfer.rope import rotate
from veloxquant_mlx.transfer.rope_angles import mlx_rope
from veloxquant_mlx.transfer.rope_spec import RopeSpec, unrotated

Tiles = Callable[[], Iterator[mx.array]]  # keys (H, t, D) of the rows held, as rotated now, a tile at a time


class HeldRows:
    """Keys and values as they are.

    Args:
        rope: rotation of a cache that renumbers; None: rows keep their keys.
    """

    def __init__(self, rope: RopeSpec | None) -> None:
        self.rope = rope
        self.stripped = False  # whether keys are held before RoPE
        self.arrays: dict[str, mx.array] = {}

    def size(self) -> int:
        return self.arrays["keys"].shape[1] if self.arrays else 0

    def add(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array, Tiles]:
        """Take rows (H, S, D), (H, S, Dv); what attention gets, and the keys held before."""
        if not self.arrays:
            self.arrays = {"keys": keys, "values": values}
            return keys[None], values[None], lambda: iter(())
        held, before = self.arrays["keys"], self.size()
        seen = self._turned(held) if self.stripped else held
        all_keys = mx.concatenate([seen, keys], axis=1)
        stored = mx.concatenate([held, self._turned(keys, before, inverse=True)], axis=1) if self.stripped else all_keys
        self.arrays = {"keys": stored, "values": mx.concatenate([self.arrays["values"], values], axis=1)}
        return all_keys[None], self.arrays["values"][None], lambda: iter((seen,))

    def movable(self) -> tuple[mx.array, mx.array]:
        """What an eviction kernel moves: keys, values."""
        # From the first eviction on: until then a cache is bit for bit one that never evicts.
        if self.rope is not None and not self.stripped:
            self.arrays["keys"] = self._turned(self.arrays["keys"], inverse=True)
            self.stripped = True
        return self.arrays["keys"], self.arrays["values"]

    def moved(self, keys: mx.array, values: mx.array) -> None:
        """Take back what a kernel made of it."""
        self.arrays = {"keys": keys, "values": values}

    def keep(self, kept: mx.array) -> None:
        """Let all rows but `kept` (H, n) go, ascending numbers."""
        self.moved(*(taken(array, kept) for array in self.movable()))

    def _turned(self, keys: mx.array, first: int = 0, *, inverse: bool = False) -> mx.array:
        """Keys (H, n, D) rotated for positions from `first` on, or back. The magnitude of a rope stays in the keys all the time."""
        assert self.rope is not None
        at = np.arange(first, first + keys.shape[1])
        return mlx_rope(keys.astype(mx.float32), at, self.rope, inverse=inverse).astype(keys.dtype)


class HeldCodes:
    """[ head: the first rows, exact ][ codes ][ tail: the newest rows, exact ], heads alike in how many rows each part has.

    Exact rows are protected from eviction, so that it happens among the codes alone.

    Args:
        plan: codecs, and how many rows of head and tail.
        rope: as in `HeldRows`; all keys are held before it.
    """

    stripped = True

    def __init__(self, plan: CodecPlan, rope: RopeSpec | None) -> None:
        self.plan, self.rope = plan, rope
        self.arrays: dict[str, mx.array] = {}  # of k and v each: k_head, k_tail, the codec's parts (k_codes ...)

    def size(self) -> int:
        return self._exact("head") + self._codes() + self._exact("tail")

    def _exact(self, part: str) -> int:
        return self.arrays[f"k_{part}"].shape[1] if self.arrays else 0

    def _codes(self) -> int:
        return next((self.arrays[name].shape[1] for name in self._by_row("k")), 0)

    def _by_row(self, role: RoleName) -> list[str]:
        """Names of the codec's arrays that have a row on axis 1."""
        return [name for name in self.arrays if name[0] == role and name[2:] not in ("head", "tail", "mean")]

    def add(self, keys: mx.array, values: mx.array) -> tuple[Fetched, Fetched, Tiles]:
        """As `HeldRows.add`."""
        blocks, before = self.blocks(), self.size()
        if self.rope is None:
            stored = keys
        else:
            at = np.arange(before, before + keys.shape[1])
            stored = rotate(keys.astype(mx.float32), at, self.rope, unrotated(self.rope)).astype(keys.dtype)
        # Both or neither: a codec may refuse values.
        self.arrays = self._added("k", stored) | self._added("v", values)
        fetched = Fetched(blocks, keys, values, 0)
        step = tile_tokens(keys.shape[0], keys.shape[2])

        def tiles() -> Iterator[mx.array]:
            for block in blocks:
                yield from (block.rows(a, min(a + step, block.count))[0] for a in range(0, block.count, step))

        return fetched, fetched, tiles

    def _added(self, role: RoleName, rows: mx.array) -> dict[str, mx.array]:
        """The arrays of a role with new rows (H, S, D) behind the others."""
        held = {name: array for name, array in self.arrays.items() if name[0] == role}
        head, tail = (held.get(f"{role}_{part}", rows[:, :0]) for part in ("head", "tail"))
        exact = mx.concatenate([tail, rows], axis=1)
        first = min(self.plan.sink - head.shape[1], exact.shape[1])
        head, exact = mx.concatenate([head, exact[:, :first]], axis=1), exact[:, first:]
        leaving = max(0, exact.shape[1] - self.plan.recent)
        codes = self._encoded(role, held, exact, leaving) if leaving else {}
        # Not views, which would hold all of the rows that they are from.
        return held | codes | {f"{role}_head": mx.contiguous(head), f"{role}_tail": mx.contiguous(exact[:, leaving:])}

    def _encoded(self, role: RoleName, held: dict[str, mx.array], exact: mx.array, leaving: int) -> dict[str, mx.array]:
        """The codec's arrays, `leaving` of the exact rows (H, n, D) encoded behind the others."""
        codec, rows = self._codec(role), exact[:, :leaving]
        if "mean" not in codec.layout((1, 1, rows.shape[2]), rows.dtype):
            parts, joined = codec.encode(rows), {}
        else:
            mean = held[f"{role}_mean"] if f"{role}_mean" in held else codec.encode(exact)["mean"]
            parts, joined = encode_centred(codec, rows, False, lambda block, _: codec._encode_block(block, mean)), {f"{role}_mean": mean}
        for part, array in parts.items():
            name = f"{role}_{part}"
            joined[name] = mx.concatenate([held[name], array], axis=1) if name in held else array
        return joined

    def _codec(self, role: RoleName) -> Codec:
        return self.plan.k if role == "k" else self.plan.v

    def blocks(self) -> tuple[Block, ...]:
        """The rows held, for attention; positions count rows where survivors move, else nothing asks for them."""
        blocks: list[Block] = []
        for part, count in (("head", self._exact("head")), ("codes", self._codes()), ("tail", self._exact("tail"))):
            if count:
                k, v = (self._rows_of(role, part, count) for role in ("k", "v"))
                blocks.append(Block(k, v, count, blocks[-1].stop if blocks else 0))
        return tuple(blocks)

    def _rows_of(self, role: RoleName, part: str, count: int) -> CodedRows:
        exact = self.arrays[f"{role}_{'head' if part == 'codes' else part}"]
        shape, rope = (exact.shape[0], count, exact.shape[2]), self.rope if role == "k" else None
        if part != "codes":
            return CodedRows(Raw(), {"data": exact}, shape, exact.dtype, rope)
        names = [*self._by_row(role), *([f"{role}_mean"] if f"{role}_mean" in self.arrays else [])]
        return CodedRows(self._codec(role), {name[2:]: self.arrays[name] for name in names}, shape, exact.dtype, rope)

    def movable(self) -> tuple[mx.array, mx.array]:
        """A kernel moves row numbers in place of values, and keys of nothing: it moves no codes."""
        heads, rows = self.arrays["k_head"].shape[0], self.size()
        return mx.zeros((heads, rows, 2)), mx.broadcast_to(mx.arange(rows, dtype=mx.float32)[None, :, None], (heads, rows, 1))

    def moved(self, _: mx.array, numbers: mx.array) -> None:
        self.keep(numbers[..., 0].astype(mx.int32))

    def keep(self, kept: mx.array) -> None:
        """As `HeldRows.keep`; all exact rows are among those kept."""
        head = self._exact("head")
        index = kept[:, head : kept.shape[1] - self._exact("tail")] - head
        for role in ("k", "v"):
            self.arrays |= {name: taken(self.arrays[name], index) for name in self._by_row(role)}


def taken(array: mx.array, rows: mx.array) -> mx.array:
    """Rows (H, n) of an array (H, N, ...)."""
    return mx.take_along_axis(array, rows.reshape(*rows.shape, *[1] * (array.ndim - 2)), axis=1)
