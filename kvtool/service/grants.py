"""Bytes that services on one store have promised to a tenant's writers, as objects that all of them see.

    grants/<folder of the tenant>/<service>-<grant>-<bytes>

A service makes a grant before it takes bytes in, and counts after that: the grants of others first, then what is there. Of two that do so
at once at least one sees the other's, and what a service keeps is seen as long as its grant is, or as an object: so that objects and
grants together never pass the quota. A grant whose service has died counts for LEASE seconds.
"""

import re
import secrets

from kvtool.store.catalogue import GRANTS
from kvtool.store.objects import Objects

LEASE = 40.0  # seconds that a grant counts
HOLD = 10.0  # seconds that its own service takes bytes in for it; the rest is for the last of them to be written
_GRANT = re.compile(r"([0-9a-f]{16})-[0-9a-f]{8}-([0-9]{1,18})")


class Grants:
    """One service's grants to one tenant, of which one counts at a time.

    Args:
        objects: of all tenants.
        folder: the tenant's.
        service: 16 hex digits that are this service's.
    """

    def __init__(self, objects: Objects, folder: str, service: str) -> None:
        self._objects, self._service = objects, service
        self._prefix = f"{GRANTS}{folder.rpartition('/')[2]}/"
        self._own = ""

    def make(self, size: int) -> None:
        """Grant so many bytes, in place of what was granted before: between the two, others see both."""
        before, self._own = self._own, f"{self._prefix}{self._service}-{secrets.token_hex(4)}-{size}" if size else ""
        if self._own:
            self._objects.write(self._own, b"")
        if before:
            self._objects.remove(before)

    def others(self) -> int:
        """Bytes that other services have granted to this tenant."""
        found = [entry for entry in self._objects.names(self._prefix) if self._service not in entry.name]
        now = self._objects.now() if found else 0.0
        return sum(_bytes(entry.name) for entry in found if now - entry.used <= LEASE)


def sweep(objects: Objects) -> None:
    """Remove grants that count no more."""
    found = list(objects.names(GRANTS))
    now = objects.now() if found else 0.0
    for entry in found:
        if now - entry.used > LEASE:
            objects.remove(entry.name)


def _bytes(name: str) -> int:
    found = _GRANT.fullmatch(name.rpartition("/")[2])
    return 0 if found is None else int(found[2])
