"""What the objects beside a store's chunks say: spaces, models and calibrations."""

import json
import logging
import re
from collections.abc import Callable
from typing import Any

from mlx.utils import tree_reduce

from formats.calibration import from_bytes, to_bytes
from formats.errors import DigestError, FormatError, IncompatibleError, IntegrityError, KVError
from formats.strict_json import Room, loads
from formats.tables import digest_of
from kvtool.calibrations import Calibration
from kvtool.capturing import Snapshot
from kvtool.model import LoadedModel
from kvtool.store.key_files import MAGIC
from kvtool.store.keys import SHORT, Space
from kvtool.store.objects import Missing, Objects

logger = logging.getLogger(__name__)

LONGEST = 1 << 20
LONGEST_TABLES = 1 << 30
LONGEST_NAME, MOST = 200, 1 << 50  # of what somebody says of a model
_SPACE = re.compile(r"spaces/[0-9a-f]{64}\.json")


class Descriptions:
    """Reads them, each once, for they never change."""

    def __init__(self, objects: Objects) -> None:
        self.objects = objects
        self._spaces: dict[str, Space] = {}
        self._models: dict[str, dict[str, Any]] = {}
        self._passed_over: set[str] = set()  # said already: every lookup reads them again

    def spaces(self) -> list[Space]:
        """All spaces that are there now, in the order of their names; one that cannot be read is passed over with a logged warning.

        Raises:
            IncompatibleError: they are encrypted, with another key or none given.
        """
        names = {entry.name for entry in self.objects.names("spaces/") if _SPACE.fullmatch(entry.name)}
        self._spaces = {name: space for name, space in self._spaces.items() if name in names}
        for name in names - set(self._spaces):
            try:
                self._spaces[name] = self._space(name)
            except IncompatibleError:
                raise
            except Missing:
                continue
            except (KVError, OSError) as error:
                if name not in self._passed_over:
                    self._passed_over.add(name)
                    logger.warning("%s is passed over: %s", name, error)
        return [self._spaces[name] for name in sorted(self._spaces)]

    def _space(self, name: str) -> Space:
        data = read_short(self.objects, name)
        if data.startswith(MAGIC):
            raise IncompatibleError("the store is encrypted", path=str(self.objects), hint="give its key file in KVTOOL_STORE_KEY")
        return Space.parse(data, name.removeprefix("spaces/").removesuffix(".json"), self.objects.name_key)

    def model(self, weights: str) -> dict[str, Any]:
        """What is known of a model, empty where nothing is."""
        if weights not in self._models:
            try:
                data = read_short(self.objects, f"models/{weights}.json")
                about = loads(data.decode("utf-8", "replace"), "model", Room(len(data)))
                counts = {name: min(max(int(about[name] or 0), 0), MOST) for name in ("parameters", "row")}
                known = {"name": str(about["name"])[:LONGEST_NAME], **counts}
            except (Missing, KVError, OSError, ValueError, TypeError, KeyError):
                # It is of use to people, and to what goes first, and to nothing else.
                return {}
            self._models[weights] = known
        return self._models[weights]

    def model_name(self, weights: str) -> str:
        return str(self.model(weights).get("name", "unknown"))

    def calibrations(self, digest: str | None) -> list[Calibration]:
        """The calibration of that digest, where the store has it. A damaged one counts as absent, and is removed for a put to write it."""
        if digest is None:
            return []
        try:
            data = read_short(self.objects, tables_name(digest), LONGEST_TABLES)
        except Missing:
            return []
        except (FormatError, IntegrityError):
            data = b""
        if digest_of(data) != digest:
            logger.warning("%s is damaged", tables_name(digest))
            try:
                self.objects.remove(tables_name(digest))
            except OSError as error:
                logger.warning("it cannot be removed: %s", error)
            return []
        return [Calibration(from_bytes(data), digest)]

    def write(
        self,
        put: Callable[[str, bytes], int],
        space: Space,
        snapshot: Snapshot,
        tables: Calibration | None,
        model: LoadedModel | None,
    ) -> int:
        """Have `put` write what says whose chunks will follow, where that is not there yet; the bytes written."""
        about: dict[str, Any] = {"name": snapshot.model.name, "parameters": None if model is None else parameters(model)}
        roles = [role for probe in snapshot.probes for role in (probe.k, probe.v) if role is not None]
        about["row"] = sum(role.heads * role.dim for role in roles)
        objects = {f"models/{space.weights}.json": json.dumps(about, sort_keys=True).encode()}
        if tables is not None:
            objects[tables_name(tables.digest)] = _bytes_of(tables)
        objects[space.name] = space.data
        if space.name not in self._spaces:
            self._remove_damaged(space)
        written = 0
        for name, data in objects.items():
            if self.objects.size(name) is None:
                written += put(name, data)
            else:
                self.objects.touch(name)
        return written

    def _remove_damaged(self, space: Space) -> None:
        """Make way for a space that stands there but is not what its name says: nothing under it would ever be found again."""
        try:
            held = read_short(self.objects, space.name)
        except Missing:
            return
        except (FormatError, IntegrityError):
            held = b""
        if held != space.data:
            logger.warning("%s is damaged, and written anew", space.name)
            self.objects.remove(space.name)

    def cost(self, root: str | None, start: int, tokens: int) -> float:
        """FLOPs of a prefill of some tokens after `start` others: two a parameter and token, and attention to what stands before.

        Of a model whose parameters are not known, twelve times the square of a token's keys and values stand for them.

        Args:
            root: first digits of a space's key, None of an unknown one.
        """
        space = next((space for space in self._spaces.values() if space.key[:SHORT] == root), None)
        about = {} if space is None else self.model(space.weights)
        row = float(about.get("row") or 1)
        return tokens * (2 * float(about.get("parameters") or 12 * row * row) + 2 * row * (start + tokens / 2))


def read_short(objects: Objects, name: str, longest: int = LONGEST) -> bytes:
    """An object of at most `longest` bytes, whatever a stranger has put there.

    Raises:
        Missing: no such object.
        FormatError: it is longer.
    """
    data = objects.read(name, 0, longest + 1)
    if len(data) > longest:
        raise FormatError(f"has more than {longest} bytes", path=name)
    return data


def tables_name(digest: str) -> str:
    """Of the object that holds a calibration."""
    return f"calibrations/{digest}.safetensors"


def parameters(model: LoadedModel) -> int:
    """Parameters of a model."""
    return int(tree_reduce(lambda total, weight: total + weight.size, model.model.parameters(), 0))


def _bytes_of(tables: Calibration) -> bytes:
    data = to_bytes(tables.file) if tables.path is None else tables.path.read_bytes()
    if digest_of(data) != tables.digest:
        raise DigestError(f"calibration {tables.digest[:12]} has digest {digest_of(data)[:12]} now", path=tables.source)
    return data
