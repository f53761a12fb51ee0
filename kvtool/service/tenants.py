"""Who may use a service. A token belongs to one tenant; the file of tenants holds digests of tokens, never the tokens.

    {"version": 1, "tenants": [{"name": "ana", "token": "<SHA-256 of the token, hex>", "salt": "<64 hex>", "rights": ["read", "write"]}]}

A tenant's objects lie under a name that its salt gives, and the salt goes into the keys of its prompts: two tenants with the same prompt
share nothing, so that neither finds out by content or by time what the other keeps. The file is read again when it changes: who is taken
out of it is refused from the next request on. A token has 256 random bits, which is why a plain digest of it is enough.
"""

import base64
import fcntl
import hashlib
import hmac
import json
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from formats.atomic import atomic_write
from formats.errors import FormatError
from kvtool.store.catalogue import TENANTS

VERSION = 1
RIGHTS = ("read", "write", "operate")
PREFIX = "kvt_"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_HEX = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Tenant:
    """Who a token belongs to.

    Attributes:
        name: for people and logs.
        token: SHA-256 of the token, hex.
        salt: 64 hex digits, of the keys of its prompts.
        rights: of RIGHTS: read and write its own objects; operate: see figures of the whole service.
    """

    name: str
    token: str
    salt: str
    rights: tuple[str, ...] = ("read", "write")

    @property
    def folder(self) -> str:
        """Where its objects lie; nobody learns the salt from it."""
        return TENANTS + hashlib.sha256(b"kvtool tenant folder" + bytes.fromhex(self.salt)).hexdigest()[:32]


# Whoever reaches a service that was started without tenants.
ANYONE = Tenant("anyone", "0" * 64, "0" * 64, RIGHTS)


def made(name: str, rights: Sequence[str] = ("read", "write")) -> tuple[Tenant, str]:
    """A new tenant and its token.

    Raises:
        ValueError: a name or a right that there is not.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"[tenants] name must be 1 to 64 of A-Z a-z 0-9 . _ @ - and begin with a letter or digit, but got {name!r}.")
    unknown = [right for right in rights if right not in RIGHTS]
    if unknown or not rights:
        raise ValueError(f"[tenants] rights must be of {', '.join(RIGHTS)}, but got {', '.join(rights) or 'none'}.")
    token = PREFIX + base64.urlsafe_b64encode(secrets.token_bytes(32)).decode().rstrip("=")
    return Tenant(name, _digest(token), secrets.token_hex(32), tuple(r for r in RIGHTS if r in rights)), token


class Tenants:
    """Tenants by token.

    Args:
        tenants: the tenants, fixed; or
        file: the file that has them, followed as it changes.
    """

    def __init__(self, tenants: Sequence[Tenant] = (), *, file: Path | None = None) -> None:
        self._file = file
        self._seen: tuple[int, int, int] | None = None
        self._all = tuple(tenants)
        if file is not None:
            self._refresh()

    def of(self, token: str) -> Tenant | None:
        """The tenant with this token. The time that it takes depends on the number of tenants alone."""
        self._refresh()
        digest = _digest(token)
        found = None
        for tenant in self._all:
            if hmac.compare_digest(tenant.token, digest):
                found = tenant
        return found

    def all(self) -> tuple[Tenant, ...]:
        """All tenants there are now."""
        self._refresh()
        return self._all

    def _refresh(self) -> None:
        if self._file is None:
            return
        status = os.stat(self._file)
        seen = (status.st_ino, status.st_size, status.st_mtime_ns)
        if seen != self._seen:
            self._all, self._seen = tuple(read(self._file)), seen


def read(path: Path) -> list[Tenant]:
    """The tenants of a file.

    Raises:
        FormatError: it is no such file.
    """
    try:
        data = json.loads(path.read_bytes())
        if data["version"] != VERSION:
            raise ValueError(f"version {data['version']!r} where {VERSION} is known")
        tenants = [Tenant(t["name"], t["token"], t["salt"], tuple(t["rights"])) for t in data["tenants"]]
        for tenant in tenants:
            if not (_NAME.fullmatch(tenant.name) and _HEX.fullmatch(tenant.token) and _HEX.fullmatch(tenant.salt)):
                raise ValueError(f"tenant {tenant.name!r} has a field of the wrong form")
            if not tenant.rights or set(tenant.rights) - set(RIGHTS):
                raise ValueError(f"tenant {tenant.name!r} has rights {list(tenant.rights)}")
        if len({t.name for t in tenants}) != len(tenants):
            raise ValueError("two tenants of one name")
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(
            f"not a file of tenants ({error})", path=str(path), hint="make one with `kvtool tenants add NAME --file FILE`"
        ) from error
    return tenants


@contextmanager
def changing(path: Path) -> Iterator[list[Tenant]]:
    """Context manager: the tenants of a file, none where there is no file; as the block leaves them they are written back, atomically.

    Nobody else changes the file meanwhile: whoever wants to waits for the lock of `FILE.lock`, which stays (flock).

    Raises:
        FormatError: it is no such file.
    """
    fd = os.open(f"{os.path.realpath(path)}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        tenants = read(path) if path.exists() else []
        yield tenants
        write(path, tenants)
    finally:
        os.close(fd)


def write(path: Path, tenants: Sequence[Tenant]) -> None:
    """Replace the file of tenants, atomically; only its owner may read it."""
    body = {"version": VERSION, "tenants": [asdict(tenant) for tenant in tenants]}
    with atomic_write(str(path)) as file:
        os.fchmod(file.fd, 0o600)
        file.write(json.dumps(body, indent=1).encode() + b"\n")


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()
