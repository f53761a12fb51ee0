"""Bring what a lookup found to life: objects mapped, checked against their digests and names, and joined."""

import gc
import os
import resource
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from formats.alike import Outline
from formats.container import Reader
from formats.errors import DigestError, FormatError, IncompatibleError, IntegrityError, KVError
from kvtool.archive import Archive, Restored
from kvtool.calibrations import Shelf
from kvtool.model import LoadedModel
from kvtool.recoding import check_recode, recode
from kvtool.store.arriving import Arriving, Coming
from kvtool.store.described import Descriptions
from kvtool.store.finding import Match
from kvtool.store.joined import Joined
from kvtool.store.keys import Node, Space
from kvtool.store.local_copy import LocalCopy
from kvtool.store.objects import Missing, Objects
from veloxquant_mlx.caches.coded import CodedKVCache
from veloxquant_mlx.codecs import RECENT

BLOCK = 1 << 22  # bytes asked for at once of what is elsewhere
SPARE = 64  # files that whoever loads may open besides
READ = 1 << 18  # of what is here; as much memory stays with the process afterwards


class Lost(KVError):
    """An object of a match cannot be used.

    Attributes:
        name: of the object, or of the space where all of it does not fit.
        note: why, None where the object is simply gone.
        damaged: whether its bytes are not those that were written.
    """

    def __init__(self, name: str, note: str | None = None, damaged: bool = False) -> None:
        super().__init__(f"{name}: {note or 'it is gone'}", hint="try again: what is damaged or gone is not found any more")
        self.name, self.note, self.damaged = name, note, damaged


def alive(objects: Objects, known: Descriptions, match: Match, ids: Sequence[int], model: LoadedModel, **how: Any) -> Restored:
    """A match as live caches, as `Archive.load` gives them; `usable` is the match's.

    Args:
        ids: the tokens that were looked up.
        how: as `Archive.load` takes it.
    Raises:
        Lost: an object is gone, damaged or cannot be read, or the space does not fit.
    """
    with _without_collections(), joined(objects, match, ids, model) as whole:
        try:
            restored = _restored(objects, known, match, whole, model, **how)
        except IncompatibleError as error:
            raise Lost(match.space.name, f"{match.space.codec} chunks do not fit: {error}") from error
        except Missing as gone:
            raise Lost(str(gone.args[0])) from None
        except (KVError, OSError) as error:
            if whole.failed is None:
                raise Lost(match.space.name, f"{match.space.codec} chunks cannot be joined: {error}") from error
            raise _lost(match.nodes[whole.failed], error) from error
    if restored.usable == len(ids):
        # A model gives the logits of what it runs: the last token's are its own to compute.
        restored.pending()
    restored.tokens = tuple(ids)
    for cache in restored.cache:
        if isinstance(cache, CodedKVCache) and cache.growth is not None and not cache.growth.recent:
            # A chunk has no exact newest rows to take the number from.
            cache.growth = replace(cache.growth, recent=RECENT)
    return restored


@contextmanager
def _without_collections() -> Iterator[None]:
    """Within the block Python looks for no cycles: it would over and over, for many chunks are many objects, which all stay."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _restored(objects: Objects, known: Descriptions, match: Match, whole: Joined, model: LoadedModel, **how: Any) -> Restored:
    shelf = Shelf(known.calibrations(match.space.calibration))
    if not match.recode:
        return Archive(whole, shelf).load(model, **how)
    turned = objects.scratch / f"{secrets.token_hex(8)}.kv"
    try:
        _write(objects, known, match, whole, model, turned)
        with Archive(Reader(turned), shelf) as archive:
            restored = archive.load(model, **how)
    finally:
        turned.unlink(missing_ok=True)
    restored.notes = ("keys are turned to the rotation of this model", *restored.notes)
    return restored


def write(
    objects: Objects, known: Descriptions, match: Match, ids: Sequence[int], model: LoadedModel, path: str | os.PathLike[str]
) -> None:
    """A match as one file, turned for the model where it has to be.

    Raises:
        IncompatibleError: it cannot be turned.
        Lost: as `alive`.
    """
    with joined(objects, match, ids, model) as whole:
        try:
            _write(objects, known, match, whole, model, path)
        except Missing as gone:
            raise Lost(str(gone.args[0])) from None
        except (KVError, OSError) as error:
            if whole.failed is None:
                raise
            raise _lost(match.nodes[whole.failed], error) from error


def _write(objects: Objects, known: Descriptions, match: Match, whole: Joined, model: LoadedModel, path: str | os.PathLike[str]) -> None:
    if not match.recode:
        whole.write(path)
        return
    tables = known.calibrations(match.space.calibration)
    check_recode(Archive(whole, Shelf(tables)), model)
    source = objects.scratch / f"{secrets.token_hex(8)}.kv"
    try:
        whole.write(source)
        recode(source, path, to_model=model, calibration=next(iter(tables), None))
    finally:
        source.unlink(missing_ok=True)


@contextmanager
def joined(objects: Objects, match: Match, ids: Sequence[int], model: LoadedModel) -> Iterator[Joined]:
    """Context manager: the objects of a match as one reader, their headers read and compared with their names. What is elsewhere comes
    while it is read; once the block has ended well, copies of it stay.

    Raises:
        Lost: as `alive`.
    """
    copies = objects if isinstance(objects, LocalCopy) else None
    fetched = None
    with suppress(OSError):  # met again, and said, by whoever opens the first object
        fetched = None if copies is None else copies.fetching([node.name for node in match.nodes])
    try:
        with ExitStack() as parts:
            yield _joined(objects, match, ids, model, {} if fetched is None else fetched.files, parts)
    except BaseException:
        if copies is not None and fetched is not None:
            copies.discard(fetched)
        raise
    if copies is not None and fetched is not None:
        copies.keep(fetched)


def _joined(
    objects: Objects, match: Match, ids: Sequence[int], model: LoadedModel, coming: Mapping[str, Coming], stack: ExitStack
) -> Joined:
    parts: list[Reader] = []
    _allow_files(len(match.nodes))
    outline = None  # of the last header that was like none before it
    for node in match.nodes:
        try:
            part = Arriving(coming[node.name], outline) if node.name in coming else opened(objects, node.name, outline)
            parts.append(stack.enter_context(part))
            if not part.alike:
                outline = part.outline()
            check_content(part, node, ids[node.start : node.stop], match.space)
        except (Missing, FileNotFoundError):
            raise Lost(node.name) from None
        except (KVError, OSError) as error:
            raise _lost(node, error) from error
    who = replace(model.info, dtype=match.space.about["model"]["dtype"])
    try:
        whole = Joined(parts, who, f"{objects}: {match.id[:12]}")
    except KVError as error:
        raise Lost(match.space.name, f"{match.space.codec} chunks cannot be joined: {error}") from error
    return stack.enter_context(whole)


def _allow_files(count: int) -> None:
    """Let this process have so many more files open, as far as it may: each mapped object is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + len(os.listdir("/dev/fd")) + SPARE
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):  # what is met then is said when a file is opened
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


def opened(objects: Objects, name: str, like: Outline | None = None) -> Reader:
    """An object's file, mapped. One that is elsewhere is fetched, and its copy is gone with the reader.

    Args:
        like: as of a `Reader`.
    Raises:
        Missing: no such object.
        OSError: the medium cannot give it. What is here is read once for that: once it is mapped, a bad disk ends the process.
    """
    path = objects.path(name)
    if path is not None:
        with open(path, "rb", buffering=0) as file:
            buffer = bytearray(READ)
            while file.readinto(buffer):
                pass
        return Reader(path, like)
    copy = objects.scratch / f"{secrets.token_hex(8)}.kv"
    try:
        _fetch(objects, name, copy)
        return Reader(copy, like)
    finally:
        copy.unlink(missing_ok=True)


def _fetch(objects: Objects, name: str, copy: Path) -> None:
    with open(copy, "xb", buffering=0) as file:
        at = 0
        while block := objects.read(name, at, BLOCK):
            file.write(block)
            at += len(block)


def check_content(part: Reader, node: Node, ids: Sequence[int], space: Space) -> None:
    """Raise DigestError unless a file holds what its name says."""
    held = part.manifest.tokens
    if held is None or held.ids != tuple(ids):
        raise DigestError(f"holds other tokens than {node.start} to {node.stop} of its prompt", path=part.path)
    if part.manifest.model.weights != space.weights:
        raise DigestError("is of other weights than its space", path=part.path)


def _lost(node: Node, error: KVError | OSError) -> Lost:
    damaged = isinstance(error, IntegrityError | FormatError)
    what = "damaged" if damaged else "not readable"
    return Lost(node.name, f"tokens {node.start} to {node.stop} are {what}: {error}", damaged)
