"""What a service holds while it runs."""

import secrets
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvtool.service.accounts import Account, Reserved
from kvtool.service.figures import Figures
from kvtool.service.grants import Grants
from kvtool.service.listings import Listings
from kvtool.service.partition import Partition
from kvtool.service.settings import Limits
from kvtool.service.tenants import ANYONE, Tenant, Tenants
from kvtool.store.described import Descriptions
from kvtool.store.folder import Folder
from kvtool.store.objects import Objects


@dataclass
class State:
    """One service.

    Attributes:
        objects: of all tenants.
        tenants: who may use it; None: whoever reaches it.
        quota: bytes that each tenant's objects may take; None for no end.
        id: 16 hex digits, by which services on one store know each other's grants.
    """

    objects: Objects
    tenants: Tenants | None
    limits: Limits = field(default_factory=Limits)
    quota: int | None = None
    figures: Figures = field(default_factory=Figures)
    listings: Listings = field(default_factory=Listings)
    anyone: Tenant = ANYONE
    started: float = field(default_factory=time.monotonic)
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    _accounts: dict[str, Account] = field(default_factory=dict)
    _counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    _counting: threading.Lock = field(default_factory=threading.Lock)

    @property
    def files(self) -> bool:
        """Whether objects are files of this machine, as they are."""
        return isinstance(self.objects, Folder)

    def begin(self) -> None:
        """Raise unless the key that was given, or none, is the store's, as far as the objects of the tenants tell.

        Raises:
            IncompatibleError: it is another's.
            OSError: as the back end gives it.
        """
        for tenant in (self.anyone,) if self.tenants is None else self.tenants.all():
            objects = self.partition(tenant)
            if objects.page("spaces/", "", 1):
                Descriptions(objects).spaces()
                return

    def partition(self, tenant: Tenant) -> Partition:
        """A tenant's objects."""
        return Partition(self.objects, tenant.folder, bytes.fromhex(tenant.salt), partial(self.listings.changed, tenant.folder))

    def knows(self, tenant: Tenant) -> bool:
        """Whether a tenant is still one."""
        return self.tenants is None or tenant in self.tenants.all()

    @asynccontextmanager
    async def reserved(self, tenant: Tenant, name: str, size: int) -> AsyncIterator[Reserved]:
        """Context manager: room for an object of a tenant within its quota, made where there is none, and given back at the end.

        Raises:
            Refused: 507, with the numbers.
        """
        if self.quota is not None and (tenant.folder not in self._accounts or self._accounts[tenant.folder].quota != self.quota):
            objects, grants = self.partition(tenant), Grants(self.objects, tenant.folder, self.id)
            self._accounts[tenant.folder] = Account(objects, grants, self.quota, self.limits.objects, partial(self.evicted, tenant))
        room = Reserved(None if self.quota is None else self._accounts[tenant.folder], name)
        try:
            await room.open(size)
            yield room
        finally:
            room.end()

    def evicted(self, tenant: Tenant, objects: int) -> None:
        """Count what went for the quota."""
        if objects:
            self.count(tenant, "evicted", objects)
            self.figures.removed.labels("quota").inc(objects)

    def asked(self, tenant: Tenant, found: int, tokens: int) -> None:
        """Count a look-up of a prompt."""
        self.figures.lookups.labels("yes" if found else "no").inc()
        self.figures.found_tokens.labels("yes").inc(found)
        self.figures.found_tokens.labels("no").inc(tokens - found)
        self.count(tenant, "hits" if found else "misses")

    def count(self, tenant: Tenant, what: str, by: int = 1) -> None:
        """Count for one tenant alone: hits, misses, evicted."""
        with self._counting:
            self._counts[tenant.folder, what] += by

    def answered(self, tenant: Tenant) -> dict[str, Any]:
        """What was counted for a tenant since the service started."""
        with self._counting:
            counts = {what: self._counts[tenant.folder, what] for what in ("hits", "misses", "evicted")}
        return {**counts, "uptime_seconds": round(time.monotonic() - self.started, 1)}
