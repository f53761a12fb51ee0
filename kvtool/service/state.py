"""What a service holds while it runs."""

import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from kvtool.service.figures import Figures
from kvtool.service.partition import Partition
from kvtool.service.settings import Limits
from kvtool.service.tenants import Tenant, Tenants
from kvtool.store.objects import Objects

ANYONE = Tenant("anyone", "0" * 64, "0" * 64, ("read", "write", "operate"))


@dataclass
class State:
    """One service.

    Attributes:
        objects: of all tenants.
        tenants: who may use it; None: whoever reaches it.
        quota: bytes that each tenant's objects may take; None for no end.
    """

    objects: Objects
    tenants: Tenants | None
    limits: Limits = field(default_factory=Limits)
    quota: int | None = None
    figures: Figures = field(default_factory=Figures)
    anyone: Tenant = ANYONE
    started: float = field(default_factory=time.monotonic)
    _counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    _counting: threading.Lock = field(default_factory=threading.Lock)

    def partition(self, tenant: Tenant) -> Partition:
        """A tenant's objects."""
        return Partition(self.objects, tenant.folder, bytes.fromhex(tenant.salt))

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
