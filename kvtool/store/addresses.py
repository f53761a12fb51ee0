"""Where a store is: a folder, a service, an object store, a Valkey or Redis server; each with encryption or without; by its address."""

import importlib
import importlib.util
import os
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from blake3 import blake3

from formats.errors import BackendError
from kvtool.cache_folder import cache_folder
from kvtool.store.folder import Folder
from kvtool.store.key_files import read_key
from kvtool.store.local_copy import QUOTA, LocalCopy
from kvtool.store.objects import Objects

# scheme: module, class, the package it needs, the extra that installs it
_REMOTE = {
    **dict.fromkeys(("s3", "gs", "az"), ("kvtool.store.buckets", "Buckets", "obstore", "s3")),
    **dict.fromkeys(("http", "https"), ("kvtool.store.served", "Served", "urllib3", "remote")),
    **dict.fromkeys(("redis", "rediss", "valkey", "valkeys"), ("kvtool.store.valkey", "Valkey", "redis", "valkey")),
}


def open_objects(
    where: str | os.PathLike[str],
    *,
    key_file: str | os.PathLike[str] | None = None,
    local: str | os.PathLike[str] | None = None,
    local_quota: int = QUOTA,
) -> Objects:
    """The back end at an address.

    Args:
        where: a folder, http(s):// of `kvtool serve`, s3://, gs://, az://, redis(s):// or valkey(s):// (see `served`, `buckets`, `valkey`).
        key_file: encrypt with the key in this file; $KVTOOL_STORE_KEY where it is not given.
        local: folder for copies of what is elsewhere or encrypted, to be mapped. Where it is not given: one of this address in kvtool's
            cache folder, or of encrypted objects a private one that is gone when this process ends.
        local_quota: bytes that the copies may take.
    Raises:
        BackendError: the package that the address needs is not installed.
        ValueError: no such kind of address, or a key file that is none.
        OSError: as the system gives it.
    """
    text = os.fspath(where)
    if not text:
        raise ValueError("[store] must be a folder or an address, but got ''; . is the folder where you are.")
    scheme, found, _ = text.partition("://")
    if found and scheme not in _REMOTE:
        raise ValueError(f"[store] must be a folder or one of {', '.join(f'{s}://' for s in _REMOTE)}, but got {scheme}://.")
    if found:
        try:
            urlsplit(text)
        except ValueError as error:
            # What stands before an @ is not repeated.
            raise ValueError(f"[store] {scheme}:// must go on as an address does, but what follows is none ({error}).") from None
    key_file = key_file or os.environ.get("KVTOOL_STORE_KEY") or None
    objects: Objects = Folder(text)
    if found:
        module, name, needs, extra = _REMOTE[scheme]
        objects = _class(module, name, f"{scheme}://", needs, extra)(text)
    if key_file is not None:
        objects = _class("kvtool.store.sealed", "Sealed", "an encrypted store", "cryptography", "encryption")(objects, read_key(key_file))
    if not found and key_file is None:
        return objects
    if local is None and key_file is None:
        local = _copies_of(repr(objects))
    return LocalCopy(objects, local, quota=local_quota)


def _class(module: str, name: str, what: str, needs: str, extra: str) -> Any:
    if importlib.util.find_spec(needs) is None:
        raise BackendError(f"{what} needs {needs}, which is not installed", hint=f"pip install 'kvtool[{extra}]'")
    return getattr(importlib.import_module(module), name)


def _copies_of(address: str) -> Path:
    return cache_folder() / "copies" / blake3(address.encode()).hexdigest()[:32]
