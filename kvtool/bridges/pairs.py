"""The same texts through two models: keys before RoPE and values of every layer, row beside row."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import numpy as np
from blake3 import blake3

from formats.errors import IncompatibleError
from kvtool import calibration_texts
from kvtool.bridges.alignment import Alignment, align_text, check_overlap, token_bytes
from kvtool.capturing import check_ids, encode_prompt, prefill, token_ids
from kvtool.compat import tokenizer_difference
from kvtool.model import LoadedModel
from kvtool.probe import CacheProbe, probe_model
from kvtool.snapshot import take_states
from veloxquant_mlx.transfer.rope import rotate
from veloxquant_mlx.transfer.rope_spec import RopeSpec, unrotated

LENGTH = 256  # tokens of a piece
PIECES = 64
LEAST = 32  # tokens; a shorter end of a text is left out


def layer_problem(probe: CacheProbe) -> str | None:
    """Why a layer's rows cannot be taken before RoPE or written back, or None."""
    if probe.k is None or probe.v is None or probe.caches or probe.attention != "full":
        return f"its cache is {probe.cls} ({probe.attention}), not one of full attention"
    if probe.k.rope_problem is not None or probe.v.rope_problem is not None:
        return f"its rotation is not known: {probe.k.rope_problem or probe.v.rope_problem}"
    if probe.v.rope is not None:
        return "its values are rotated"
    return "keys and values have unlike heads" if probe.k.heads != probe.v.heads else None


def check_layers_of(model: LoadedModel) -> tuple[CacheProbe, ...]:
    """A model's layer table, each layer one that maps can be made for.

    Raises:
        IncompatibleError: a layer that is not.
    """
    probes = probe_model(model.model)
    for i, probe in enumerate(probes):
        problem = layer_problem(probe)
        if problem is not None:
            raise IncompatibleError(f"{model.info.name}, layer {i}: {problem}", hint="maps are for models of full-attention layers")
    return probes


def before_rope(keys: mx.array, values: mx.array, rope: RopeSpec | None) -> np.ndarray:
    """(S, heads (D_k + D_v)) float32: keys before RoPE in half-split order, then values, all heads, of rows as cached (H, S, D) from 0."""
    keys = rotate(keys.astype(mx.float32), np.arange(keys.shape[1]), rope, unrotated(rope))
    rows = [mx.swapaxes(x.astype(mx.float32), 0, 1).reshape(x.shape[1], -1) for x in (keys, values)]
    return np.array(mx.concatenate(rows, axis=1))


@dataclass(frozen=True, eq=False)
class Pairs:
    """Rows of two models at the same tokens.

    Attributes:
        documents: (N,) which text each row is of.
        texts: name of each text -> blake3 of its token ids.
        source, target: layer by layer, (N, heads (D_k + D_v)) float32 in files of a temporary folder.
    """

    documents: np.ndarray
    texts: Mapping[str, str]
    source: Sequence[np.ndarray]
    target: Sequence[np.ndarray]
    folder: tempfile.TemporaryDirectory = field(repr=False)


def pieces_of(
    model: LoadedModel, texts: Mapping[str, str | Sequence[int]] | None, pieces: int = PIECES, length: int = LENGTH
) -> list[tuple[str, list[int]]]:
    """(text, token ids) of pieces spread evenly over the texts.

    Args:
        texts: name -> text or token ids; None for the shipped ones.
        pieces: of all texts together, about. length: tokens of a piece.

    Raises:
        ValueError: no text, or one that is too short.
    """
    given: Mapping[str, str | Sequence[int]] = calibration_texts.texts() if texts is None else texts
    if not given:
        raise ValueError("[fit] texts must hold at least one text, but got none.")
    found: list[tuple[str, list[int]]] = []
    for name, text in given.items():
        ids = encode_prompt(model, text) if isinstance(text, str) else token_ids(text)
        check_ids(model, ids)
        own = [ids[a : a + length] for a in range(0, len(ids), length) if len(ids) - a >= LEAST]
        if not own:
            raise ValueError(f"[fit] texts[{name!r}] must have at least {LEAST} tokens, but got {len(ids)}.")
        chosen = np.unique(np.linspace(0, len(own) - 1, max(1, min(len(own), -(-pieces // len(given))))).astype(int))
        found += [(name, own[i]) for i in chosen]
    return found


def collect_pairs(
    source: LoadedModel,
    target: LoadedModel,
    texts: Mapping[str, str | Sequence[int]] | None = None,
    *,
    pieces: int = PIECES,
    length: int = LENGTH,
    overlap: float | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Pairs:
    """Run texts through both models.

    Args:
        source, target: models of one tokenizer, or with `overlap` of two.
        texts, pieces, length: as in `pieces_of`, of the target's tokens.
        overlap: take tokens of unlike tokenizers that stand for one another, where this share of the target's end where the source's do.
        progress: called with (tokens done, tokens in all).

    Raises:
        ValueError: no text, or one that is too short.
        IncompatibleError: other tokenizers, or layers that no map can be made for.
    """
    problem = tokenizer_difference(source.info, target.info)
    if problem is not None and overlap is None:
        what = f"{source.info.name} and {target.info.name} have unlike tokenizers: {problem}"
        raise IncompatibleError(what, hint="give an --overlap: a map from one's tokens to those of the other that end where they do")
    tables = [check_layers_of(model) for model in (source, target)]
    given = pieces_of(target, texts, pieces, length)
    if problem is None or overlap is None:
        aligned = [(name, Alignment.same(ids)) for name, ids in given]
    else:
        aligned = _aligned(source, target, given, overlap)
    chosen = [(name, list(own.target)) for name, own in aligned]
    total, done = sum(len(ids) for _, ids in chosen), 0
    folder = tempfile.TemporaryDirectory(prefix="kvtool-fit-")
    sides: list[list[np.ndarray]] = []
    for side, probes in zip(("source", "target"), tables, strict=True):
        shapes = [(total, probe.k.heads * (probe.k.dim + probe.v.dim)) for probe in probes if probe.k is not None and probe.v is not None]
        files = [Path(folder.name) / f"{side}-{i}" for i in range(len(shapes))]
        sides.append([np.memmap(file, np.float32, "w+", shape=shape) for file, shape in zip(files, shapes, strict=True)])
    for _, own in aligned:
        stop = done + len(own.target)
        which = (own.source, own.rows), (own.target, np.arange(len(own.target)))
        for model, probes, rows, (ids, at) in zip((source, target), tables, sides, which, strict=True):
            states = take_states(prefill(model, ids), length=len(ids))
            for state, probe, out in zip(states, probes, rows, strict=True):
                assert isinstance(state.k, mx.array) and isinstance(state.v, mx.array) and probe.k is not None
                out[done:stop] = before_rope(state.k, state.v, probe.k.rope)[at]
        done = stop
        if progress is not None:
            progress(done, total)
    names = list(dict.fromkeys(name for name, _ in chosen))
    documents = np.concatenate([np.full(len(ids), names.index(name)) for name, ids in chosen])
    digests = {
        name: blake3(np.array([i for own, ids in chosen if own == name for i in ids], dtype="<i8").tobytes()).hexdigest() for name in names
    }
    return Pairs(documents, digests, sides[0], sides[1], folder)


def _aligned(
    source: LoadedModel, target: LoadedModel, pieces: Sequence[tuple[str, list[int]]], least: float
) -> list[tuple[str, Alignment]]:
    """Pieces of the target's ids in the tokens of both, without special tokens and without what a cut left of a character."""
    special = set(target.tokenizer.all_special_ids)
    found = []
    for name, ids in pieces:
        data = b"".join(token_bytes(target, [i for i in ids if i not in special]))
        found.append((name, align_text(source, target, data.decode("utf-8", errors="ignore"))))
    total = sum(len(own.target) for _, own in found)
    check_overlap(sum(own.overlap * len(own.target) for _, own in found) / total, least, source.info, target.info)
    return found
