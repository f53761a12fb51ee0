"""Rows of files: a cache saved and loaded, by kvtool and by mlx-lm; and a first token by prefill or by load.

    files        synthetic rows in the layers of a model (`--model`), `--mb` of them in the dtype that it runs in
    first-token  a prompt of `--tokens` random tokens: its logits by prefill, and by loading the cache of all but its last token

kvtool writes a file through fsync and a rename; mlx-lm's save is timed as it is and with an fsync behind it. A load ends with every array
evaluated; kvtool checks digests and rotations meanwhile. `cold` loads come after the file's pages were dropped (`posix_fadvise`), where
the system has that and `mincore` shows it; `warm` ones right after the file was read. Bytes are those of the file.

`attend` rows load, warm, and attend with one query a head to every layer. Rows of `processes` start that many, each of which loads the
file and attends (`kvtool.bench.sharing`): their time is until all are done, and bytes are what it took of memory in all of them together.
"""

import ctypes
import mmap
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

from kvtool.archive import save
from kvtool.bench import sharing
from kvtool.bench.coding import allowed
from kvtool.bench.measuring import Case, Checked, Prepared
from kvtool.bench.oracle import to_numpy
from kvtool.bench.rows import Law
from kvtool.capturing import Snapshot, capture, prefill, vocabulary
from kvtool.loading import load
from kvtool.model import LoadedModel
from kvtool.probe import CacheProbe, probe_model
from kvtool.snapshot import build_caches
from kvtool.states import CacheState
from veloxquant_mlx.codecs import parse_codec

CODECS = ("raw", "rvq-4")
DROPS = 5
KL_LIMIT = 0.5  # nats, of a lossy cache's next token


def files(
    model: LoadedModel, megabytes: float, codecs: tuple[str, ...], folder: Path, seed: int, name: str = "", processes: int = 0
) -> Iterator[Case]:
    """Rows of `files`. The folder is the run's own; each row leaves it empty.

    Args:
        name: of the model, as `--model` has it, for `processes`: how many share a file; 0 for no such rows.

    Raises:
        ValueError: a model with layers that rows cannot be made for, or a codec that needs tables.
    """
    probes = probe_model(model.model)
    _check_model(model, probes, codecs)
    tokens = tokens_of(probes, megabytes)

    snapshot = partial(synthetic, model, probes, tokens, seed)
    save_fsync, load_warm, load_cold = (f"mlx-lm: {what}" for what in ("save, fsync", "load, warm", "load, cold"))
    yield Case("files", "mlx-lm: save", partial(_mlx_lm_save, snapshot, folder, fsync=False))
    yield Case("files", save_fsync, partial(_mlx_lm_save, snapshot, folder, fsync=True))
    for spec in codecs:
        yield Case("files", f"{spec}: save", partial(_save, model, snapshot, spec, folder), save_fsync, spec)
    for cold, reference in ((False, load_warm), (True, load_cold)):
        needs = undroppable(folder) if cold else None
        yield Case("files", reference, partial(_mlx_lm_load, snapshot, folder, cold), needs=needs)
        for spec in codecs:
            row = f"{spec}: load, {'cold' if cold else 'warm'}"
            prepare = partial(_load, model, snapshot, spec, folder, cold)
            yield Case("files", row, prepare, reference, spec, needs=needs)
    for spec in (spec for spec in codecs if not parse_codec(spec).lossless):
        yield Case("files", f"{spec}: load, attend", partial(_attend, model, snapshot, spec, folder), load_warm, spec)
        if processes:
            needs = None if sharing.SMAPS.exists() else "this system does not say which memory processes share (/proc/self/smaps)"
            prepare = partial(_processes, model, snapshot, spec, folder, name, processes)
            yield Case("files", f"{spec}: {processes} processes", prepare, None, spec, needs=needs)


def first_token(model: LoadedModel, tokens: int, codecs: tuple[str, ...], folder: Path, seed: int) -> Iterator[Case]:
    """Rows of `first-token`."""
    _check_model(model, probe_model(model.model), codecs)
    if tokens < 2:
        raise ValueError(f"[bench] tokens must be at least 2, but got {tokens}.")
    ids = np.random.default_rng(seed).integers(0, vocabulary(model), tokens).tolist()
    yield Case("first-token", "prefill", lambda: _prefill(model, ids))
    for spec in codecs:
        yield Case("first-token", f"{spec}: load", partial(_first_token, model, ids, spec, folder), "prefill", spec)


def _check_model(model: LoadedModel, probes: Sequence[CacheProbe], codecs: Sequence[str]) -> None:
    odd = next((i for i, probe in enumerate(probes) if probe.attention != "full" or probe.k is None or probe.v is None), None)
    if odd is not None:
        raise ValueError(
            f"[bench] model must have full attention in every layer, but layer {odd} of {model.info.name} is {probes[odd].cls}."
        )
    for spec in codecs:
        for codec in (parse_codec(spec).k, parse_codec(spec).v):
            if codec.id in ("tc", "tcz", "additive"):
                raise ValueError(f"[bench] {spec} takes tables of the model, which this command does not make: give another codec.")


def tokens_of(probes: Sequence[CacheProbe], megabytes: float) -> int:
    """Tokens whose keys and values take that many megabytes (1e6 bytes), at least one."""
    each = sum(role.heads * role.dim * role.dtype.size for probe in probes for role in (probe.k, probe.v) if role is not None)
    return max(1, round(megabytes * 1e6 / each))


def synthetic(model: LoadedModel, probes: Sequence[CacheProbe], tokens: int, seed: int) -> Snapshot:
    """A cache of a model's shape, of seeded rows."""
    states = []
    for i, probe in enumerate(probes):
        assert probe.k is not None and probe.v is not None
        k, _ = Law.of(probe.k.heads, probe.k.dim, seed).drawn(np.random.default_rng([seed, i, 0]), tokens)
        _, v = Law.of(probe.v.heads, probe.v.dim, seed).drawn(np.random.default_rng([seed, i, 1]), tokens)
        keys, values = mx.array(k).astype(probe.k.dtype), mx.array(v).astype(probe.v.dtype)
        mx.eval(keys, values)
        states.append(CacheState("KVCache", "full", offset=tokens, positions=((0, tokens),), k=keys, v=values))
    ids = tuple(np.random.default_rng(seed).integers(0, vocabulary(model), tokens).tolist())
    return Snapshot(model.info, ids, tokens, tuple(states), tuple(probes))


# --- the page cache


def drop(path: Path) -> None:
    """Ask the system to forget a file's pages, which must be on disk for that."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def dropped(path: Path) -> float:
    """Share of a file's pages that are in memory still after DROPS attempts: one that is just being read stays."""
    share = 1.0
    for _ in range(DROPS):
        drop(path)
        share = cached(path)
        if share == 0:
            break
    return share


def cached(path: Path) -> float:
    """Share of a file's pages that are in memory. (Asking by reads that do not wait would start reading ahead.)"""
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        pages = -(-len(mapped) // mmap.PAGESIZE)
        found, start = (ctypes.c_ubyte * pages)(), ctypes.c_char.from_buffer(mapped)
        code = mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(len(mapped)), found)
        del start  # else the mapping could not be closed
    if code:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
    return sum(page & 1 for page in found) / pages


def undroppable(folder: Path) -> str | None:
    """Why a file's pages cannot be dropped there, or None."""
    if not sys.platform.startswith("linux"):
        return "this system cannot drop a file's pages and show that they are gone"
    probe = folder / "pages"
    probe.write_bytes(bytes(1 << 22))
    try:
        share = dropped(probe)
    except OSError as error:
        return f"the system cannot say which pages of a file are in memory ({error.strerror})"
    finally:
        probe.unlink()
    return None if share == 0 else f"{share:.0%} of a file's pages stay in memory when they are dropped"


# --- files


def _emptied(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def _size(folder: Path) -> int:
    (path,) = folder.iterdir()
    return path.stat().st_size


def _values(snapshot: Snapshot) -> int:
    return sum(x.size for state in snapshot.states for x in (state.k, state.v) if isinstance(x, mx.array))


def _written(run: Callable[[], Any], check: Callable[[Any], Checked], folder: Path, snapshot: Snapshot) -> Prepared:
    """A row that writes the folder's one file, which is not there before."""
    _emptied(folder)
    run()
    size, values = _size(folder), _values(snapshot)
    return Prepared(run, check, size, values, 8 * size / values, lambda: _emptied(folder))


def _mlx_lm_save(make: Callable[[], Snapshot], folder: Path, *, fsync: bool) -> Prepared:
    snapshot = make()
    path, caches = folder / "cache.safetensors", build_caches(snapshot.states)

    def run() -> None:
        save_prompt_cache(str(path), caches)
        if fsync:
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)

    return _written(run, lambda _: _exact(load_prompt_cache(str(path)), snapshot), folder, snapshot)


def _save(model: LoadedModel, make: Callable[[], Snapshot], spec: str, folder: Path) -> Prepared:
    path, snapshot = folder / "cache.kv", make()
    return _written(
        lambda: save(snapshot, path, codec=spec), lambda _: _restored(load(path, model).cache, snapshot, spec), folder, snapshot
    )


def _mlx_lm_load(make: Callable[[], Snapshot], folder: Path, cold: bool) -> Prepared:
    path, snapshot = folder / "cache.safetensors", make()
    _emptied(folder)
    save_prompt_cache(str(path), build_caches(snapshot.states))

    def run() -> list[Any]:
        caches = load_prompt_cache(str(path))
        mx.eval([[cache.keys, cache.values] for cache in caches])
        return caches

    return _read(run, lambda caches: _exact(caches, snapshot), path, cold, snapshot)


def _load(model: LoadedModel, make: Callable[[], Snapshot], spec: str, folder: Path, cold: bool) -> Prepared:
    path, snapshot = folder / "cache.kv", make()
    _emptied(folder)
    save(snapshot, path, codec=spec)
    return _read(lambda: load(path, model).cache, lambda cache: _restored(cache, snapshot, spec), path, cold, snapshot)


def _attend(model: LoadedModel, make: Callable[[], Snapshot], spec: str, folder: Path) -> Prepared:
    """Against the attention of the same codes copied out of the file, to the bit."""
    path, snapshot = folder / "cache.kv", make()
    _emptied(folder)
    save(snapshot, path, codec=spec)
    want = sharing.attended(load(path, model, mapped=False).cache)

    def check(got: str) -> Checked:
        return Checked("attention to copied codes, exactly", float(got != want), 0.0)

    return _read(lambda: sharing.attended(load(path, model).cache), check, path, False, snapshot)


def _processes(model: LoadedModel, make: Callable[[], Snapshot], spec: str, folder: Path, name: str, count: int) -> Prepared:
    path, snapshot = folder / "cache.kv", make()
    _emptied(folder)
    save(snapshot, path, codec=spec)
    want = sharing.attended(load(path, model, mapped=False).cache)
    values = _values(snapshot)
    del snapshot
    _, memory = sharing.in_processes(name, path, count)
    total = sum(one.file + one.own for one in memory)

    def check(digests: list[str]) -> Checked:
        return Checked("attention in this process, exactly", float(sum(digest != want for digest in digests)), 0.0)

    return Prepared(lambda: sharing.in_processes(name, path, count)[0], check, total, count * values, 8 * total / values)


def _read(run: Callable[[], Any], check: Callable[[Any], Checked], path: Path, cold: bool, snapshot: Snapshot) -> Prepared:
    size, values = path.stat().st_size, _values(snapshot)

    def before() -> None:
        if cold:
            if (share := dropped(path)) > 0:
                raise RuntimeError(f"[bench] {share:.0%} of the file's pages are in memory although they were dropped.")
        else:
            path.read_bytes()

    return Prepared(run, check, size, values, 8 * size / values, before)


def _exact(caches: Sequence[Any], snapshot: Snapshot) -> Checked:
    """How many values of keys and values are other bits than those saved."""
    wrong = 0
    for cache, state in zip(caches, snapshot.states, strict=True):
        for got, want in zip((cache.keys, cache.values), (state.k, state.v), strict=True):
            assert isinstance(want, mx.array)
            got = got[0, :, : want.shape[1]]
            wrong += want.size if got.shape != want.shape else int(np.array(mx.sum(got != want)))
    return Checked("the rows that were saved, exactly", float(wrong), 0.0)


def _restored(caches: Sequence[Any], snapshot: Snapshot, spec: str) -> Checked:
    """Values of a lossless file must be those saved; of a lossy one, lose no more energy than `coding` allows codes of as many bits."""
    plan = parse_codec(spec)
    if plan.lossless:
        return _exact(caches, snapshot)
    worst = 0.0
    for cache, state in zip(caches, snapshot.states, strict=True):
        for got, want, codec in ((cache.keys, state.k, plan.k), (cache.values, state.v, plan.v)):
            assert isinstance(want, mx.array)
            own = to_numpy(want)
            lost = np.square(to_numpy(got[0, :, : want.shape[1]]) - own).sum() / np.square(own - own.mean(axis=1, keepdims=True)).sum()
            heads, rows, dim = want.shape
            worst = max(worst, float(lost / allowed(codec, (heads, rows, dim))))
    return Checked("the rows that were saved: lost energy over its limit", worst, 1.0)


# --- the first token


def _logits(model: LoadedModel, cache: list[Any], token: int) -> mx.array:
    return model.model(mx.array([[token]]), cache=cache)[0, -1].astype(mx.float32)


def _by_prefill(model: LoadedModel, ids: Sequence[int]) -> mx.array:
    logits = _logits(model, prefill(model, ids[:-1]), ids[-1])
    mx.eval(logits)
    return logits


def _prefill(model: LoadedModel, ids: Sequence[int]) -> Prepared:
    """Its check runs the model on the whole prompt at once, which sums in another order."""
    want = model.model(mx.array([list(ids)]))[0, -1].astype(mx.float32)
    mx.eval(want)
    limit = 1e-4 if want.dtype == mx.float32 and model.info.dtype == "float32" else KL_LIMIT
    return Prepared(lambda: _by_prefill(model, ids), lambda got: _diverges(got, want, "the prompt in one forward", limit), None, len(ids))


def _first_token(model: LoadedModel, ids: Sequence[int], spec: str, folder: Path) -> Prepared:
    path = folder / "prompt.kv"
    _emptied(folder)
    save(capture(model, ids[:-1]), path, codec=spec)
    want = _by_prefill(model, ids)
    lossless = parse_codec(spec).lossless

    def run() -> mx.array:
        logits = _logits(model, load(path, model).cache, ids[-1])
        mx.eval(logits)
        return logits

    def check(got: mx.array) -> Checked:
        if lossless:
            return Checked("logits by prefill, exactly", float(np.array(mx.sum(got != want))), 0.0)
        return _diverges(got, want, "logits by prefill", KL_LIMIT)

    return Prepared(run, check, path.stat().st_size, len(ids))


def _diverges(got: mx.array, want: mx.array, against: str, limit: float) -> Checked:
    """KL of the next token, nats, in float64."""
    p, q = (x - x.max() - np.log(np.exp(x - x.max()).sum()) for x in (to_numpy(want), to_numpy(got)))
    return Checked(f"{against}: KL, nats", float((np.exp(p) * (p - q)).sum()), limit)
