"""What each tenant's objects take, and what is on its way to them: together never more than its quota."""

import asyncio
import time
from collections.abc import Callable

from starlette.concurrency import run_in_threadpool

from kvtool.service.errors import Refused
from kvtool.service.partition import Partition
from kvtool.store.room import AGAIN, FRESH
from kvtool.store.store import Store

SPARE = 100  # this share of a quota is freed at once
HINT = "remove or unpin something, or ask for a larger quota"


class Account:
    """One tenant's bytes. Its methods run in the event loop's thread alone, so that no sum needs a lock.

    A count serves for a second, with what this service kept and removed since: what another service on the same store took in meanwhile
    is seen then.

    Args:
        objects: the tenant's.
        quota: bytes that they, and what is on its way, may take together.
        most: objects that there may be.
        evicted: told how many objects went for others.
    """

    def __init__(self, objects: Partition, quota: int, most: int, evicted: Callable[[int], None]) -> None:
        self.quota, self.most = quota, most
        self._evicted = evicted
        self._store = Store(objects, quota=quota)
        self._making_room = asyncio.Lock()
        self._bytes = self._objects = self._reserved = 0
        # Which count this is, whether it is under way, and the bytes that were kept meanwhile.
        self.counts, self._counting, self._late = 0, False, 0
        self._counted = -FRESH

    async def reserve(self, name: str, size: int) -> None:
        """Set room aside for an object; the least worth goes for it.

        Raises:
            Refused: 507, with the numbers.
        """
        async with self._making_room:
            if time.monotonic() - self._counted > FRESH:
                await self._count()
            over = self._over(size)
            for _ in range(AGAIN):
                if over > 0:
                    await self._count()
                    over = self._over(size)
                if over > 0:
                    over -= await self._free(over, name)
            if over > 0:
                there = f"{self._bytes} bytes are there and may not go, {self._reserved} are on their way"
                raise Refused(507, f"no room for {size} bytes in a quota of {self.quota}: {there}", hint=HINT, cause="quota")
            if self._objects >= self.most:
                raise Refused(507, f"{self._objects} objects are there, and no more than {self.most} may be", hint=HINT, cause="quota")
            self._reserved += size

    def _over(self, size: int) -> int:
        """Bytes that lack for `size` more."""
        return self._bytes + self._reserved + size - self.quota

    async def _free(self, need: int, name: str) -> int:
        """Let the least worth go, and a little more at once, so that not every object asks for a listing; the bytes freed."""
        before = self._store.room.evicted
        freed = await run_in_threadpool(self._store.room.free, need, name, spare=self.quota // SPARE)
        self._evicted(self._store.room.evicted - before)
        self._bytes -= freed
        return freed

    def release(self, size: int) -> None:
        """Give back room that was set aside."""
        self._reserved -= size

    async def _count(self) -> None:
        def counted() -> tuple[int, int]:
            sizes = [entry.size for entry in self._store.objects.names()]
            return sum(sizes), len(sizes)

        self.counts, self._counting, self._late = self.counts + 1, True, 0
        try:
            found, self._objects = await run_in_threadpool(counted)
        finally:
            self._counting = False
        # What was kept meanwhile may have been counted or not: here it counts twice rather than never, and the next one asks again.
        self._bytes = found + self._late
        self._counted = -FRESH if self._late else time.monotonic()

    def kept(self, size: int, mark: int) -> None:
        """Take note of an object that was made; `mark` is what `counts` was before."""
        self._bytes, self._objects = self._bytes + size, self._objects + 1
        if self._counting:
            self._late += size
        elif mark != self.counts:
            self._counted = -FRESH


class Reserved:
    """Room for one object that is on its way.

    Args:
        account: whose it is; None where there is no quota.
        name: of the object.
    Attributes:
        size: bytes set aside for it.
    """

    def __init__(self, account: Account | None, name: str) -> None:
        self._account, self._name = account, name
        self.size = 0

    async def open(self, size: int) -> None:
        """Have room for `size` bytes, and for one object more."""
        if self._account is not None:
            await self._account.reserve(self._name, size)
            self.size = size

    async def grow(self, size: int) -> None:
        """Have room for at least `size` bytes."""
        if self._account is not None and size > self.size:
            await self._account.reserve(self._name, size - self.size)
            self.size = size

    def mark(self) -> int:
        """To be taken before the object is made, and given to `kept` after it."""
        return 0 if self._account is None else self._account.counts

    def kept(self, size: int, mark: int) -> None:
        """Take note that it was made."""
        if self._account is not None:
            self._account.kept(size, mark)

    def end(self) -> None:
        """Give the room back."""
        if self._account is not None:
            self._account.release(self.size)
        self.size = 0
