"""What a running service does on the side: what nobody needs, and what dead writers left, removed; a quota that has shrunk kept."""

import logging
import threading
from types import TracebackType

from formats.errors import KVError
from kvtool.service import grants
from kvtool.service.state import State
from kvtool.service.tenants import Tenant
from kvtool.store.store import Store

logger = logging.getLogger("kvtool.service")

EVERY = 30.0  # seconds


class Keeping:
    """A context in which a thread keeps house. Several services on one store may do so at once: removals are of single objects.

    Args:
        state: the service.
        every: seconds between two rounds.
    """

    def __init__(self, state: State, every: float = EVERY) -> None:
        self._state, self._every = state, every
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvtool-keeping", daemon=True)

    def __enter__(self) -> "Keeping":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._every):
            self.round()

    def round(self) -> None:
        """Once for every tenant; what fails is logged, and the next round tries again."""
        try:
            self._state.objects.sweep()
            grants.sweep(self._state.objects)
            tenants = (self._state.anyone,) if self._state.tenants is None else self._state.tenants.all()
        except (OSError, KVError) as error:
            logger.error("keeping house: %s", error)
            return
        for tenant in tenants:
            if self._stop.is_set():
                return
            try:
                self._keep(tenant)
            except (OSError, KVError) as error:
                logger.error("keeping house for %s: %s", tenant.name, error)

    def _keep(self, tenant: Tenant) -> None:
        store = Store(self._state.partition(tenant), quota=self._state.quota)
        freed = store.gc()
        evicted = store.room.evicted
        self._state.evicted(tenant, evicted)
        if freed:
            logger.info('{"event": "kept", "tenant": "%s", "freed": %d, "evicted": %d}', tenant.name, freed, evicted)
