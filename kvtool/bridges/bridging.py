"""Files of one model for another that has other weights or other shapes: written again, or brought to life."""

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from formats.files import naming
from formats.profile import Row, read_profile
from formats.transfer_map import MapFile, read_map
from kvtool.archive import Archive, Restored, SaveReport, save
from kvtool.archive import open as open_archive
from kvtool.bridges.alignment import OVERLAP
from kvtool.bridges.profiling import choose
from kvtool.bridges.recompute import Recompute
from kvtool.bridges.transferring import realigned, source_of, transfer
from kvtool.calibrations import Calibration, is_calibrated
from kvtool.capturing import Snapshot
from kvtool.compat import tokenizer_difference
from kvtool.encoding import codec_plan
from kvtool.hidden import inputs_left_out
from kvtool.live import Placement
from kvtool.model import LoadedModel
from kvtool.snapshot import build_caches
from veloxquant_mlx.codecs import CodecPlan

Progress = Callable[[int, int], None]
Map = str | os.PathLike[str] | MapFile


def transferred(
    source: str | os.PathLike[str],
    model: LoadedModel,
    *,
    mapping: Map | None = None,
    recompute: str | Recompute | None = None,
    calibration: str | os.PathLike[str] | Calibration | None = None,
    from_model: LoadedModel | None = None,
    overlap: float = OVERLAP,
    progress: Progress | None = None,
) -> tuple[Snapshot, str | None, tuple[str, ...]]:
    """A file's cache as `model`'s, decoded, the spec of the codec that the file was encoded with, None where it does not say, and remarks.

    The history's last step has the seconds that it took: `load` (opening file and map), `map` (decoding, mapping, rotating), `recompute`.

    Args:
        source: a kvtool file of another model, of the same tokenizer or with `from_model`.
        model: the model that will go on.
        mapping: a map from that model to this one, or its file; None takes rows over as they are.
        recompute: what the model computes itself, such as "first=4,newest=20%".
        calibration: as in `load`.
        from_model: that computed the file, where its tokenizer is another: the file's tokens become those of `model` at the same places.
        overlap: as in `realigned`.
        progress: called with (layers done, layers in all).

    Raises:
        ValueError: nothing to do.
        IncompatibleError: as `transfer`.
    """
    if mapping is None and recompute is None:
        raise ValueError("[transfer] give a map, what to recompute, or both; kvtool recode --to-model alone rotates the keys.")
    begun = time.perf_counter()
    with open_archive(source, calibration=calibration) as archive:
        given = source_of(archive)
        unlike = tokenizer_difference(given.model, model.info) is not None
        if unlike and from_model is not None:
            given = realigned(given, from_model, model, overlap)
        elif not unlike:
            archive.check_tokens(model)
        plan = Recompute.parse(recompute, given.length) if isinstance(recompute, str) else recompute
        remarks = () if not given.inputs else (inputs_left_out(given.inputs, given.model.name, f"it is not {model.info.name}'s"),)
        chosen = mapping if isinstance(mapping, MapFile) or mapping is None else read_map(mapping)[0]
        own = coded_by(archive)
        opened = time.perf_counter()
        snapshot = transfer(given, model, mapping=chosen, recompute=plan, progress=progress)
    step = snapshot.history[-1]
    step["seconds"] = {"load": round(opened - begun, 4), **step["seconds"]}
    return snapshot, own, remarks


def coded_by(archive: Archive) -> str | None:
    """The codec of a file's last lossy step, None where there was none."""
    steps = [step["codec"] for step in archive.manifest.quality if isinstance(step.get("codec"), str)]
    return next((spec for spec in reversed(steps) if spec != "as stored"), None)


def planned(
    source: str | os.PathLike[str],
    model: LoadedModel,
    profile: str | os.PathLike[str],
    *,
    mapping: str | os.PathLike[str] | None = None,
    share: float | None = None,
    kl: float | None = None,
    calibration: str | os.PathLike[str] | Calibration | None = None,
) -> tuple[Row, float, str | None]:
    """What to recompute of a file, by a profile of the pair: the row, and its share for this file. Arguments and errors as `choose`.

    The third is a remark where a layer input that the file does not hold would allow a better plan.
    """
    with open_archive(source, calibration=calibration) as archive:
        used, digest = (None, None) if mapping is None else read_map(mapping)
        with naming(os.fspath(profile)):
            found, given = read_profile(profile)[0], source_of(archive)
            row, part = choose(found, given, model, mapping=used, digest=digest, share=share, kl=kl)
            every = {layer: partial(given.layer_input, layer) for layer in range(len(given.shapes))}
            best, least = choose(found, replace(given, inputs=every), model, mapping=used, digest=digest, share=share, kl=kl)
    layer = Recompute.parse(best.plan, given.length).needs_input if best.plan else None
    if best == row or layer is None or layer in given.inputs:
        return row, part, None
    return row, part, f"kvtool export --layer-input {layer} would allow {best.plan}: {least:.1%} of a prefill, KL {best.kl:.4g}"


def recode_across(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    to_model: LoadedModel,
    *,
    mapping: Map | None = None,
    recompute: str | Recompute | None = None,
    codec: str | CodecPlan | None = None,
    sink: int | None = None,
    recent: int | None = None,
    frame: str | None = None,
    calibration: str | os.PathLike[str] | Calibration | None = None,
    details: dict[str, Any] | None = None,
    from_model: LoadedModel | None = None,
    overlap: float = OVERLAP,
    progress: Progress | None = None,
) -> SaveReport:
    """Write `source` again as a file of `to_model`, by a map, by recomputing a part, or both.

    Args:
        source: a kvtool file. It may be the target as well.
        target: the file to write, atomically.
        to_model, mapping, recompute, from_model, overlap: as in `transferred`.
        codec: encode with this codec; None is that of `source`.
        sink, recent, frame, calibration, details: as in `save`.
        progress: called with (bytes written, bytes in all).
    """
    more: dict[str, Any] = {"calibration": calibration, "from_model": from_model, "overlap": overlap}
    snapshot, own, remarks = transferred(source, to_model, mapping=mapping, recompute=recompute, **more)
    chosen = codec if codec is not None else own or "raw"
    report = save(
        snapshot,
        target,
        codec=chosen,
        sink=sink,
        recent=recent,
        frame=frame,
        calibration=calibration if _takes_calibration(chosen) else None,
        model=to_model,
        details=details,
        progress=progress,
    )
    return replace(report, notes=(snapshot.history[-1]["note"], *report.notes, *remarks))


def _takes_calibration(codec: str | CodecPlan) -> bool:
    plan = codec_plan(codec)
    return is_calibrated(plan.k) or is_calibrated(plan.v)


def load_across(
    source: str | os.PathLike[str],
    model: LoadedModel,
    *,
    mapping: Map | None = None,
    recompute: str | Recompute | None = None,
    live: str | CodecPlan | None = None,
    calibration: str | os.PathLike[str] | Calibration | None = None,
    from_model: LoadedModel | None = None,
    overlap: float = OVERLAP,
    progress: Progress | None = None,
) -> Restored:
    """Bring a file of another model to life in `model`, by a map, by recomputing a part, or both.

    Args:
        source, model, mapping, recompute, calibration, from_model, overlap: as in `transferred`.
        live: codec that rows are kept in while they live; None decodes them.
        progress: called with (layers done, layers in all).

    Raises:
        IncompatibleError: as `transfer`.
    """
    how: dict[str, Any] = {"mapping": mapping, "recompute": recompute, "calibration": calibration}
    how |= {"from_model": from_model, "overlap": overlap}
    if live is None:
        snapshot, _, _ = transferred(source, model, **how, progress=progress)
        placed = tuple(Placement(False, "transferred", lossy=True, sharable=True) for _ in snapshot.states)
        return Restored(build_caches(snapshot.states), snapshot.tokens, snapshot.length, (snapshot.history[-1]["note"],), placed)
    with tempfile.TemporaryDirectory(prefix="kvtool-") as folder:
        path = Path(folder) / "live.kv"
        report = recode_across(source, path, model, **how, codec=live)
        with open_archive(path, calibration=calibration) as archive:
            restored = archive.load(model, progress=progress)
            done = next(step["note"] for step in reversed(archive.manifest.quality) if step["step"] == "transfer")
    restored.notes = (done, f"kept as {report.codec}", *restored.notes)
    return restored
