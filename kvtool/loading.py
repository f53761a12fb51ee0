"""Bring a file's cache to life, as it is coded or as another codec has it."""

import os
import tempfile
from pathlib import Path

from kvtool.archive import Progress, Restored
from kvtool.archive import open as open_archive
from kvtool.calibrations import Calibration
from kvtool.encoding import codec_plan
from kvtool.model import LoadedModel
from kvtool.recoding import recode
from veloxquant_mlx.codecs import CodecPlan


def load(
    source: str | os.PathLike[str],
    model: LoadedModel,
    *,
    decode: bool = False,
    live: str | CodecPlan | None = None,
    mapped: bool = True,
    allow_mismatch: bool = False,
    calibration: str | os.PathLike[str] | Calibration | None = None,
    progress: Progress | None = None,
) -> Restored:
    """Open a file and bring its cache to life in `model`.

    Args:
        source: a kvtool file.
        model: the model that will go on.
        decode: give every layer mlx-lm's own cache of decoded rows.
        live: codec that rows are kept in while they live, instead of the file's own: for `tcz`, which attention cannot read, and for files
            kept exactly. The error that this adds is among the notes.
        mapped, allow_mismatch, progress: as in `Archive.load`.
        calibration: a calibration, or the file of one, that the file's codecs or `live` may need; others are looked for in the store.

    Raises:
        ValueError: decode and live both given, or a codec that does not exist.
        IncompatibleError, IntegrityError: as `Archive.load`.
    """
    if not isinstance(model, LoadedModel):
        raise TypeError(f"[load] model must come from kvtool.load_model, but got {type(model).__name__}.")
    if decode and live is not None:
        raise ValueError("[load] give decode or live, not both.")
    plan = None if live is None else codec_plan(live)
    if plan is not None and (plan.lossless or plan.k.eager or plan.v.eager):
        raise ValueError(f"[load] live must be a codec that attention reads (rvq-N, tc-N, affine-N ...), but got {plan.spec()!r}.")
    if plan is None:
        with open_archive(source, calibration=calibration, ahead=True) as archive:
            return archive.load(model, decode=decode, mapped=mapped, allow_mismatch=allow_mismatch, progress=progress)
    with open_archive(source, calibration=calibration) as archive:
        archive.check(model, allow_mismatch=allow_mismatch)
        # Where the file below is made this model's own, nothing is left to be said there.
        notes = () if allow_mismatch else archive.identity_notes(model)
    # By way of a file, layer by layer: at no time are all layers decoded.
    with tempfile.TemporaryDirectory(prefix="kvtool-") as folder:
        path = Path(folder) / "live.kv"
        report = recode(source, path, codec=plan, to_model=None if allow_mismatch else model, calibration=calibration)
        with open_archive(path, calibration=calibration) as archive:
            restored = archive.load(model, mapped=mapped, allow_mismatch=allow_mismatch, progress=progress)
    restored.notes = (*notes, *restored.notes)
    quality = report.quality or {}
    errors = [f"{role} {quality[f'{role}_relative_error']:.3g}" for role in "kv" if f"{role}_relative_error" in quality]
    if errors:
        restored.notes = (f"kept as {report.codec}: squared error / energy: {', '.join(errors)}", *restored.notes)
    return restored
