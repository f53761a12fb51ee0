"""Token ids in four bytes each: a Python integer takes 36 in a tuple, six times what its digits take in a file."""

import re
from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np

_IDS = re.compile(rb"(?:0|[1-9][0-9]{0,9})(?:,(?:0|[1-9][0-9]{0,9}))*+")
_BLOCK = 1 << 16  # characters whose numbers are read at a time


class TokenIds(Sequence[int]):
    """Integers 0 to 2**31 - 1, read-only; equal to a tuple or list of the same numbers, a slice is a tuple. `array` is int32."""

    __slots__ = ("array",)

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.array.flags.writeable = False

    @classmethod
    def of(cls, ids: "Sequence[int] | np.ndarray") -> "TokenIds":
        """Ids out of integers.

        Raises:
            ValueError: one is outside 0 .. 2**31 - 1.
        """
        if isinstance(ids, TokenIds):
            return ids
        if len(ids) and not (min(ids) >= 0 and max(ids) < 1 << 31):
            raise ValueError(f"[TokenIds.of] token ids must be in 0 .. 2**31 - 1, but got {min(ids)} .. {max(ids)}.")
        return cls(np.array(ids, dtype="<i4"))

    @classmethod
    def parse(cls, text: bytes) -> "TokenIds | None":
        """Ids out of what stands between the brackets of a JSON list without spaces; None where that is anything else, or out of range."""
        if not text:
            return cls(np.zeros(0, "<i4"))
        if not _IDS.fullmatch(text):
            return None
        ids, at, done = np.empty(text.count(b",") + 1, "<i4"), 0, 0
        while at < len(text):
            stop = text.find(b",", at + _BLOCK) + 1 or len(text)
            numbers = np.fromstring(text[at:stop].rstrip(b",").decode("ascii"), np.int64, sep=",")
            if numbers.max() >= 1 << 31:
                return None
            ids[done : done + len(numbers)] = numbers
            at, done = stop, done + len(numbers)
        return cls(ids)

    def __len__(self) -> int:
        return len(self.array)

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[int, ...]: ...
    def __getitem__(self, at: int | slice) -> int | tuple[int, ...]:
        return tuple(self.array[at].tolist()) if isinstance(at, slice) else int(self.array[at])

    def __iter__(self) -> Iterator[int]:
        return iter(self.array.data)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TokenIds):
            return np.array_equal(self.array, other.array)
        return isinstance(other, tuple | list) and len(other) == len(self) and all(a == b for a, b in zip(self, other, strict=True))

    def __hash__(self) -> int:
        return hash(tuple(self))  # what is equal has the same

    def __repr__(self) -> str:
        shown = ", ".join(map(str, self[:8]))
        return f"TokenIds([{shown}{', ...' if len(self) > 8 else ''}], {len(self)})"
