"""What tenants leave behind in a store, and its end."""

from collections import Counter
from pathlib import Path

from kvtool.service.tenants import ANYONE, read
from kvtool.store.catalogue import TENANTS
from kvtool.store.objects import Objects, is_name


def clear(objects: Objects, folder: str) -> tuple[int, int]:
    """Remove all objects of a tenant's folder; (objects removed, bytes freed)."""
    count = freed = 0
    for entry in list(objects.names(f"{folder}/")):
        # A file that no object can be is nobody's to remove here.
        if is_name(entry.name) and objects.remove(entry.name):
            count, freed = count + 1, freed + entry.size
    return count, freed


def orphans(objects: Objects, file: Path) -> dict[str, int]:
    """Folders of tenants that a file of tenants does not have, and their bytes; that of services without tenants is never one."""
    taken: Counter[str] = Counter()
    for entry in objects.names(TENANTS):
        taken["/".join(entry.name.split("/")[:2])] += entry.size
    # Read after the listing: whoever was added before it is known.
    known = {ANYONE.folder, *(tenant.folder for tenant in read(file))}
    return {folder: size for folder, size in sorted(taken.items()) if folder not in known}
