"""What each tenant's objects take, and what is on its way to them: together never more than its quota, whichever services take it in."""

import asyncio
import logging
import random
import time
from collections.abc import Callable

from starlette.concurrency import run_in_threadpool

from formats.errors import KVError
from kvtool.service.errors import Refused
from kvtool.service.grants import HOLD, Grants
from kvtool.service.partition import Partition
from kvtool.store.room import AGAIN
from kvtool.store.store import Store

logger = logging.getLogger("kvtool.service")

SPARE = 100  # this share of a quota is freed, and granted, at once
IDLE = 1.0  # seconds without anything on its way after which a grant is given back
PATIENCE = 3.0  # seconds to wait for what other services hold: they give it back when they are idle
HINT = "remove or unpin something, or ask for a larger quota"


class Account:
    """One tenant's bytes. Its methods run in the event loop's thread alone, so that no sum needs a lock.

    What it takes in is within a grant that every service on the store sees (`grants`): one listing serves for a hundredth of the quota.

    Args:
        objects: the tenant's.
        grants: this service's to the tenant.
        quota: bytes that they, and what is on its way, may take together.
        most: objects that there may be.
        evicted: told how many objects went for others.
    """

    def __init__(self, objects: Partition, grants: Grants, quota: int, most: int, evicted: Callable[[int], None]) -> None:
        self.quota, self.most = quota, most
        self._grants, self._evicted = grants, evicted
        self._store = Store(objects, quota=quota)
        self._asking = asyncio.Lock()
        self._objects = self._reserved = 0
        # Bytes granted, until when, and those of them that are objects by now; bytes that were kept since the last count began.
        self._granted, self._until, self._kept, self._late = 0, 0.0, 0, 0
        self._idle: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[None] | None = None

    async def reserve(self, name: str, size: int) -> None:
        """Set room aside for an object; the least worth goes for it.

        Raises:
            Refused: 507, with the numbers.
        """
        async with self._asking:
            if not self._holds(size):
                await self._ask(name, size)
            if self._objects >= self.most:
                raise Refused(507, f"{self._objects} objects are there, and no more than {self.most} may be", hint=HINT, cause="quota")
            self._reserved += size

    async def renew(self, name: str) -> None:
        """Have a grant for what is on its way still, before it is kept. Errors as `reserve`."""
        if not self._holds(0):
            async with self._asking:
                if not self._holds(0):
                    await self._ask(name, 0)

    def _holds(self, size: int) -> bool:
        """Whether there is a grant for `size` bytes more."""
        return time.monotonic() < self._until and self._kept + self._reserved + size <= self._granted

    async def _ask(self, name: str, size: int) -> None:
        """Get a grant for what is on its way and `size` bytes more."""
        spare, end, again = self.quota // SPARE, time.monotonic() + PATIENCE, 0
        while True:
            # Room is made before others see that it is wanted: they would make it too.
            there, others = await self._count()
            over, unsure = there + others + self._reserved + size - self.quota, self._late
            if over > 0 and over <= unsure and again < AGAIN:
                again += 1  # what was kept meanwhile may have been counted twice
                continue
            if over > 0:
                over -= await self._free(over, name)
            if over <= 0 and await self._grant(size, min(spare, -over)):
                return
            if over > others + unsure or time.monotonic() > end:
                way = self._reserved + others
                what = f"{there} bytes are there and may not go, {way} are on their way"
                raise Refused(507, f"no room for {size} bytes in a quota of {self.quota}: {what}", hint=HINT, cause="quota")
            # Two that found each other's grants in their way come back at different times.
            await asyncio.sleep(random.uniform(0.01, 0.1))

    async def _grant(self, size: int, spare: int) -> bool:
        """Grant what is on its way, `size` bytes and some to spare; False where others were quicker."""
        before, began = self._kept, time.monotonic()
        wanted = self._reserved + size + spare
        await run_in_threadpool(self._grants.make, wanted)
        there, others = await self._count()
        over = there + others + wanted - self.quota
        # What was kept since `before` was taken is within this grant, or was counted: it is taken to be both.
        kept = self._kept - before
        granted = wanted - max(over, 0) if over <= spare else self._reserved + kept
        if granted != wanted:
            await run_in_threadpool(self._grants.make, granted)
        self._granted, self._kept, self._until = granted, self._kept - before, began + HOLD
        return over <= spare

    async def _free(self, need: int, name: str) -> int:
        """Let the least worth go, and a little more at once, so that not every object asks for a listing; the bytes freed."""
        before = self._store.room.evicted
        freed = await run_in_threadpool(self._store.room.free, need, name, spare=self.quota // SPARE)
        self._evicted(self._store.room.evicted - before)
        return freed

    async def _count(self) -> tuple[int, int]:
        """Bytes that are there, and those that other services have granted."""

        def counted() -> tuple[int, int, int]:
            # In this order: what another keeps meanwhile is seen as its grant, as an object, or as both.
            others = self._grants.others()
            sizes = [entry.size for entry in self._store.objects.names()]
            return sum(sizes), len(sizes), others

        self._late = 0
        found, self._objects, others = await run_in_threadpool(counted)
        return found, others

    def kept(self, size: int) -> None:
        """Take note of an object that was made."""
        self._kept, self._late, self._objects = self._kept + size, self._late + size, self._objects + 1

    def release(self, size: int) -> None:
        """Give back room that was set aside."""
        self._reserved -= size
        if self._idle is not None:
            self._idle.cancel()
        self._idle = asyncio.get_running_loop().call_later(IDLE, self._rest)

    def _rest(self) -> None:
        self._ending = asyncio.ensure_future(self._end())

    async def _end(self) -> None:
        """Give the grant back where nothing is on its way: other services may want the room."""
        async with self._asking:
            if self._reserved or not self._granted:
                return
            self._granted, self._until = 0, 0.0
            try:
                await run_in_threadpool(self._grants.make, 0)
            except (OSError, KVError) as error:
                logger.error("a grant was not given back, and counts for a while: %s", error)


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

    async def renew(self) -> None:
        """Have the room still, however long it took to come: to be asked before the object is made."""
        if self._account is not None:
            await self._account.renew(self._name)

    def kept(self, size: int) -> None:
        """Take note that it was made."""
        if self._account is not None:
            self._account.kept(size)

    def end(self) -> None:
        """Give the room back."""
        if self._account is not None:
            self._account.release(self.size)
        self.size = 0
