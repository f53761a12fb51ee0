"""Objects of a `kvtool serve` on this machine or another: http:// and https://.

The token comes from $KVTOOL_TOKEN, or from the file that $KVTOOL_TOKEN_FILE names; never from the address, which ends in logs. Requests are
repeated a few times where the connection fails or the service says 503, which is safe: objects never change.
"""

import errno
import os
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import urllib3
from blake3 import blake3

from kvtool.store.objects import Entry, Missing, StoreFullError, check_name
from kvtool.store.scratch import Scratch

CONNECT_SECONDS, IDLE_SECONDS = 5.0, 60.0
RETRIES = 3
PAGE = 1000  # entries of a listing in one answer
_SALT = re.compile(r"[0-9a-f]{64}")
_TOKEN = re.compile(r"[!-~]*")


class Served:
    """See `Objects`.

    Args:
        address: http://HOST:PORT or https://HOST[:PORT], perhaps with a path in front of the service's own.
        token: for the service; None: from the environment.

    Raises:
        ValueError: an address of another form, or one that carries a user or a query.
    """

    def __init__(self, address: str, token: str | None = None) -> None:
        parts = urlsplit(address)
        try:
            port = parts.port
        except ValueError:
            port = 0
        if port == 0 or parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query or parts.fragment:
            raise ValueError(
                f"[store] a service's address must be http(s)://HOST[:PORT], without user or query, but got {_shown(address)!r}."
            )
        self._base = address.rstrip("/") + "/v1"
        self._token = token if token is not None else _token_of_environment()
        retries = urllib3.Retry(
            total=RETRIES,
            backoff_factor=0.2,
            status_forcelist=(502, 503, 504),
            allowed_methods=None,
            raise_on_status=False,
            redirect=0,
        )
        self._pool = urllib3.PoolManager(
            timeout=urllib3.Timeout(connect=CONNECT_SECONDS, read=IDLE_SECONDS),
            retries=retries,
            maxsize=8,
            ca_certs=os.environ.get("SSL_CERT_FILE"),
        )
        self._scratch = Scratch()
        self._asking = threading.Lock()
        self._name_key: bytes | None = None

    def __repr__(self) -> str:
        return f"Served({self._base.removesuffix('/v1')!r})"

    def __str__(self) -> str:
        return self._base.removesuffix("/v1")

    @property
    def name_key(self) -> bytes:
        """The tenant's salt: what its prompts' keys are made with."""
        with self._asking:
            if self._name_key is None:
                salt = self._json("GET", "/tenant", "salt")["salt"]
                if not (isinstance(salt, str) and _SALT.fullmatch(salt)):
                    raise OSError(f"{self._base}: /tenant gives no salt of 64 hex digits; is it a kvtool serve?")
                self._name_key = bytes.fromhex(salt)
            return self._name_key

    @property
    def scratch(self) -> Path:
        return self._scratch.folder()

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        if length == 0:
            if self.size(name) is None:
                raise Missing(name)
            return b""
        headers = {} if start == 0 and length is None else {"Range": f"bytes={start}-{'' if length is None else start + length - 1}"}
        answer = self._ask("GET", _path(name), headers=headers, ok=(200, 206, 404, 416))
        if answer.status == 404:
            raise Missing(name)
        if answer.status == 416:
            return b""
        # A proxy may take the range away and give all.
        return bytes(answer.data[start : None if length is None else start + length] if answer.status == 200 else answer.data)

    def path(self, name: str) -> Path | None:
        check_name(name)
        return None

    def write(self, name: str, source: Path | bytes) -> bool:
        own = isinstance(source, Path) and source.parent == self.scratch
        if isinstance(source, bytes):
            made = self._put(name, source, blake3(source).hexdigest(), len(source))
        else:
            with open(source, "rb") as file:
                digest = blake3(max_threads=blake3.AUTO).update_mmap(source).hexdigest()
                made = self._put(name, file, digest, os.fstat(file.fileno()).st_size)
        if own:
            assert isinstance(source, Path)
            source.unlink(missing_ok=True)
        return made

    def _put(self, name: str, body: Any, digest: str, size: int) -> bool:
        headers = {"X-Content-Blake3": digest, "Content-Length": str(size), "Content-Type": "application/octet-stream"}
        return self._ask("PUT", _path(name), headers=headers, body=body, ok=(200, 201)).status == 201

    def size(self, name: str) -> int | None:
        answer = self._ask("HEAD", _path(name), ok=(200, 404))
        return None if answer.status == 404 else int(answer.headers["content-length"])

    def sizes(self, names: Sequence[str], lookup: bool = False) -> list[int | None]:
        if not names:
            return []
        body = {"names": [check_name(name) for name in names], **({"lookup": True} if lookup else {})}
        found = self._json("POST", "/objects/sizes", "sizes", body=body)["sizes"]
        if not isinstance(found, list) or len(found) != len(names) or any(s is not None and type(s) is not int for s in found):
            raise self._strange("POST", "/objects/sizes", "a size for each name")
        return found

    def names(self, prefix: str = "") -> Iterator[Entry]:
        after: str | None = ""
        while after is not None:
            entries, after = self._page(prefix, after)
            yield from entries

    def page(self, prefix: str, after: str, count: int) -> list[Entry]:
        found: list[Entry] = []
        following: str | None = after
        while following is not None and len(found) < count:
            entries, following = self._page(prefix, following, count - len(found))
            found += entries
        return found

    def _page(self, prefix: str, after: str, count: int = PAGE) -> tuple[list[Entry], str | None]:
        """Entries, and after which name the next ones come."""
        asked = f"prefix={quote(prefix, safe='')}&after={quote(after, safe='')}&limit={min(count, PAGE)}"
        page = self._json("GET", f"/objects?{asked}", "objects", "next")
        try:
            # Names that are none are left to the catalogue, as those of a folder are.
            found, following = [Entry(str(one["name"]), int(one["size"]), float(one["used"])) for one in page["objects"]], page["next"]
        except (ValueError, TypeError, KeyError, OverflowError):
            raise self._strange("GET", "/objects", "names, sizes and dates") from None
        if following is not None and not (isinstance(following, str) and following > after):
            raise self._strange("GET", "/objects", "a next page that comes after this one")
        return found, following

    def remove(self, name: str) -> bool:
        return self._ask("DELETE", _path(name), ok=(204, 404)).status == 204

    def touch(self, *names: str) -> None:
        if names:
            self._json("POST", "/objects/used", body={"names": [check_name(name) for name in names]})

    def now(self) -> float:
        now = self._json("GET", "/now", "now")["now"]
        if type(now) not in (int, float):
            raise self._strange("GET", "/now", "seconds since 1970")
        return float(now)

    def unfinished(self) -> int:
        return 0  # the service's own affair

    def sweep(self) -> int:
        return 0

    def close(self) -> None:
        self._pool.clear()

    def _json(self, method: str, path: str, *fields: str, body: Any = None) -> Any:
        answer = self._ask(method, path, ok=(200, 204), **({} if body is None else {"json": body}))
        try:
            found = answer.json() if answer.data else None
        except ValueError:
            found = None
        if fields and not (isinstance(found, dict) and set(fields) <= set(found)):
            raise self._strange(method, path.split("?")[0], " and ".join(fields))
        return found

    def _strange(self, method: str, path: str, what: str) -> OSError:
        return OSError(f"{self._base}: {method} {path} was not answered with {what}; is it a kvtool serve?")

    def _ask(self, method: str, path: str, *, ok: tuple[int, ...], headers: dict[str, str] | None = None, **more: Any) -> Any:
        head = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        try:
            answer = self._pool.request(method, self._base + path, headers=head | (headers or {}), **more)
        except urllib3.exceptions.HTTPError as error:
            cause = getattr(error, "reason", None) or error
            raise ConnectionError(f"{self} cannot be reached or broke off: {cause}") from error
        if answer.status in ok:
            return answer
        said = _said(answer)
        if answer.status in (401, 403):
            raise PermissionError(f"{self._base}: {said} (the token is $KVTOOL_TOKEN or in the file that $KVTOOL_TOKEN_FILE names)")
        if answer.status == 507 and _error_of(answer).get("cause") == "quota":
            # The service let go what could go: nothing that this side removes would help.
            raise StoreFullError(said, path=self._base)
        if answer.status == 507:
            raise OSError(errno.ENOSPC, said, self._base)
        raise OSError(f"{self._base}: {method} {path.split('?')[0]} was answered {answer.status}: {said}")


def _path(name: str) -> str:
    return "/objects/" + check_name(name)


def _said(answer: Any) -> str:
    """What an error's body says."""
    error = _error_of(answer)
    if "what" not in error:
        # An answer to HEAD has no body.
        return {401: "a known bearer token is needed", 403: "this token may not read"}.get(answer.status, f"status {answer.status}")
    return f"{error['what']}{'; ' + error['hint'] if error.get('hint') else ''}"


def _error_of(answer: Any) -> dict[str, str]:
    """The error that a body holds, empty where it is of another form."""
    try:
        error = answer.json()["error"]
    except (ValueError, KeyError, TypeError):
        return {}
    return {str(name): str(value) for name, value in error.items() if value is not None} if isinstance(error, dict) else {}


def _shown(address: str) -> str:
    """An address without a password that it may carry."""
    return re.sub(r"//[^/]*@", "//...@", address)


def _token_of_environment() -> str | None:
    """Raises ValueError, without the token, where it is none."""
    file = os.environ.get("KVTOOL_TOKEN_FILE")
    # Bytes of any kind, so that no error shows them.
    token = Path(file).read_bytes().decode("latin-1").strip() if file else os.environ.get("KVTOOL_TOKEN", "").strip()
    if not _TOKEN.fullmatch(token):
        raise ValueError(f"[store] the token of {file or '$KVTOOL_TOKEN'} must be one line of visible ASCII (not shown here).")
    return token or None
