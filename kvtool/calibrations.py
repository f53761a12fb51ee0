"""Calibrations as codecs need them: the tables of a layer, from a file, by digest, or the newest of a model."""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from formats.calibration import CalibrationFile, read_calibration
from formats.errors import IncompatibleError, ManifestError
from formats.manifest import ModelInfo
from kvtool import calibration_store as store
from veloxquant_mlx.allocators.additive import AdditiveTables
from veloxquant_mlx.allocators.predictors import TczTables
from veloxquant_mlx.allocators.transforms import TcTables
from veloxquant_mlx.codecs import Codec

AUTO, SELF = "auto", "self"
_DIGEST = re.compile(r"[0-9a-f]{8,64}")


# id of a calibrated codec -> the class of its tables. A kind is the id, or with several designs the id, a hyphen and the design's rate.
KINDS: dict[str, type[Any]] = {"tc": TcTables, "tcz": TczTables, "additive": AdditiveTables}
_DESIGNED = {"tcz", "additive"}  # with several designs


def is_calibrated(codec: Codec) -> bool:
    """Whether a codec takes tables of a calibration."""
    return codec.id in KINDS


class Calibration:
    """One calibration, its tables made when they are asked for.

    Attributes:
        file: what it holds; digest: its name; path: where it was read from, or None.

    Raises:
        ManifestError: a kind without a design's rate, or with one that it cannot have.
    """

    def __init__(self, file: CalibrationFile, digest: str, path: Path | None = None) -> None:
        self.file, self.digest, self.path = file, digest, path
        self._made: dict[tuple[str, str], Any] = {}
        for kind in file.tables:
            codec, hyphen, rate = kind.partition("-")
            if codec in KINDS and (bool(hyphen) != (codec in _DESIGNED) or (hyphen and not _is_rate(rate))):
                wanted = f"{codec}-RATE" if codec in _DESIGNED else codec
                raise ManifestError(f"$.kinds: must be {wanted} of this codec, but got {kind!r:.40}", path=self.source)

    @property
    def source(self) -> str | None:
        """The file's name, or None."""
        return None if self.path is None else str(self.path)

    @property
    def model(self) -> ModelInfo:
        return self.file.model

    def kinds(self, codec: str) -> tuple[str, ...]:
        """The kinds of a codec's id that it has tables of."""
        return tuple(kind for kind in self.file.tables if kind.partition("-")[0] == codec)

    def layers(self, kind: str) -> tuple[str, ...]:
        """Names of the layers that it has tables of a kind for."""
        return tuple(self.file.tables.get(kind, ()))

    def tables(self, kind: str, layer: str) -> Any:
        """The tables of a layer.

        Raises:
            IncompatibleError: it has none.
            ManifestError: arrays that are no tables.
        """
        if kind.partition("-")[0] not in KINDS or layer not in self.file.tables.get(kind, {}):
            what = f"calibration {self.digest[:12]} of {self.model.name} has no {kind} tables of layer {layer}"
            raise IncompatibleError(what, hint="calibrate the model again")
        if (kind, layer) not in self._made:
            try:
                made = KINDS[kind.partition("-")[0]].from_arrays(self.file.tables[kind][layer])
            except ValueError as error:
                raise ManifestError(f"{kind}:{layer}: {error}", path=self.source) from error
            if isinstance(made, TczTables) and f"{made.rate:g}" != kind.partition("-")[2]:
                raise ManifestError(f"{kind}:{layer}: must be of that design, but got rate {made.rate:g}", path=self.source)
            self._made[kind, layer] = made
        return self._made[kind, layer]


def _is_rate(text: str) -> bool:
    """Whether a design's rate is written as `kind_of` writes it, and not zero."""
    return re.fullmatch(r"\d{1,3}(\.\d{1,5})?", text) is not None and float(text) > 0 and f"{float(text):g}" == text


def kind_of(codec: Codec) -> str:
    """The kind of tables that a bound codec has."""
    design = getattr(codec, "design", None)
    return codec.id if design is None else f"{codec.id}-{design:g}"


def load(path: str | os.PathLike[str]) -> Calibration:
    """A calibration file.

    Raises:
        FormatError: what is wrong with it.
        OSError: it cannot be read.
    """
    file, digest = read_calibration(path)
    return Calibration(file, digest, Path(path))


def resolve(spec: str | os.PathLike[str] | Calibration | None, *weights: str | None) -> Calibration | None:
    """The calibration that a user names.

    Args:
        spec: a file, a digest (8 digits at least) of the store, "auto": the store's newest for the model, or "self": none, tables are to be
            learnt from the cache. None is "auto" where the store has one for the model, else "self".
        weights: digests of the model's effective weights, or of several that will do.
    Raises:
        IncompatibleError: there is none, or it is of another model.
        FormatError, OSError: what is wrong with the file.
    """
    if spec == SELF:
        return None
    if spec is None or spec == AUTO:
        newest = next((newest for w in weights if (newest := store.newest_for(w)) is not None), None)
        if newest is None and spec is None:
            return None
        if newest is None:
            what = f"{store.folder()} has no calibration of this model"
            raise IncompatibleError(what, hint="make one with kvtool calibrate, or name a file")
        found = Calibration(newest[0], newest[1].stem, newest[1])
    else:
        found = _named(spec)
    if found.model.weights is None or found.model.effective_weights not in weights:
        raise IncompatibleError(
            f"calibration {found.digest[:12]} is of {found.model.name}, whose weights {str(found.model.effective_weights)[:12]} are not "
            f"{str(weights[0])[:12]} of this model",
            path=None if found.path is None else str(found.path),
            hint="calibrate this model",
        )
    return found


def resolve_foreign(spec: str | os.PathLike[str] | Calibration | None, shapes: Mapping[str, tuple[int, int]]) -> Calibration:
    """The calibration that a user names, of whatever weights, for a model of these shapes.

    Args:
        spec: a file or a digest.
        shapes: layer name -> (heads, head_dim) of the model that it is for.
    Raises:
        ValueError: no file or digest.
        IncompatibleError: it has other layers than the model, or tables of another shape.
        FormatError, OSError: what is wrong with the file.
    """
    if spec is None or spec in (AUTO, SELF):
        raise ValueError(f"[calibration] a foreign one must be a file or a digest, but got {spec!r}.")
    found = _named(spec)
    about = f"calibration {found.digest[:12]} of {found.model.name}"
    held = [(kind, layer) for kind in found.file.tables if kind.partition("-")[0] in KINDS for layer in found.layers(kind)]
    for kind, layer in held:
        tables, live = found.tables(kind, layer), shapes.get(layer)
        if live != (tables.heads, tables.dim):
            here = "this model has no such keys and values" if live is None else f"this model has {live[0]} of {live[1]}"
            what = f"{about} has {kind} tables of layer {layer} for {tables.heads} heads of {tables.dim}, {here}"
            raise IncompatibleError(what, path=found.source, hint="take the calibration of a model of the same shape")
    known = {layer for _, layer in held} | set(found.file.skipped)
    missing = [layer for layer in shapes if layer not in known]
    if missing:
        raise IncompatibleError(f"{about} has no tables of layer {missing[0]}, which this model has", path=found.source)
    return found


def _named(spec: str | os.PathLike[str] | Calibration) -> Calibration:
    """A calibration, or that of a file or of a digest in the store."""
    if isinstance(spec, Calibration):
        return spec
    if not _DIGEST.fullmatch(str(spec)) or Path(spec).exists():
        return load(spec)
    digests = [digest for digest, _ in store.kept() if digest.startswith(str(spec))]
    if len(digests) != 1:
        raise IncompatibleError(f"{store.folder()} has {len(digests)} calibrations whose digest begins with {spec}", hint="name a file")
    return _kept(digests[0])


def _kept(digest: str) -> Calibration:
    found = store.get(digest)
    if found is None:
        raise IncompatibleError(f"{store.folder()} has no calibration {digest}")
    return Calibration(found[0], digest, found[1])


class Shelf:
    """The calibrations that a file may need: those given, else the store's."""

    def __init__(self, given: Iterable[Calibration] = ()) -> None:
        self._found = {calibration.digest: calibration for calibration in given}

    def get(self, digest: str, model: str) -> Calibration:
        """A calibration by its digest; `model` is named where it is not here."""
        if digest not in self._found:
            found = store.get(digest)
            if found is None:
                others = f" (given: {', '.join(d[:12] for d in self._found)})" if self._found else ""
                raise IncompatibleError(
                    f"coded with calibration {digest} of {model}, which is not here{others}",
                    hint=f"give --calibration FILE, or put the file into {store.folder()}",
                )
            self._found[digest] = Calibration(found[0], digest, found[1])
        return self._found[digest]

    def complete(self, codec: Codec, model: str) -> Codec:
        """A codec with its tables.

        Raises:
            IncompatibleError: its calibration is not here, or has no such tables.
            ValueError: the tables do not fit the codec's parameters.
        """
        assert codec.calibration is not None
        return codec.with_tables(self.get(codec.calibration, model).tables(kind_of(codec), codec.layer))  # type: ignore[attr-defined]


def shelf_of(calibration: str | os.PathLike[str] | Calibration | None) -> Shelf:
    """A shelf with a calibration, or that of a file, beside the store's; what else `resolve` takes is found there."""
    if isinstance(calibration, Calibration):
        return Shelf([calibration])
    if calibration in (None, AUTO, SELF) or (_DIGEST.fullmatch(str(calibration)) and not Path(str(calibration)).exists()):
        return Shelf()
    return Shelf([load(str(calibration))])
