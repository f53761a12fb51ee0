"""Calibrate a model: run texts through it once, and learn the tables of every calibrated codec from the rows and gradients of its layers.

Time, beside a forward and a backward pass over the texts: building the tables, which grows with rows x layers x (HD)^2. Memory, beside the
passes' own: the rows (`kvtool.moments`, at most 1 GiB), twice that in float64 of one layer while its tables are built, and the tables.

The same model, texts and options on the same machine give the same bytes, and so the same digest.
"""

from collections.abc import Callable, Mapping, Sequence

from formats.calibration import CalibrationFile, to_bytes
from formats.errors import IncompatibleError
from formats.tables import digest_of
from kvtool.archive import producer
from kvtool.calibrations import Calibration
from kvtool.model import LoadedModel
from kvtool.moments import Moments, collect
from veloxquant_mlx.allocators.additive import build_shared, spectra
from veloxquant_mlx.allocators.predictors import build_tcz
from veloxquant_mlx.allocators.transforms import LayerRows, TcTables, build_tc
from veloxquant_mlx.codecs import commvq_additive

RATES = (0.75, 1.25, 2.0)  # designs of tcz
PASSES = {"tc": 40, "tcz": 12, "additive": 24}  # times as long as building a kind of tables of that codec the passes take, about


def calibrate(
    model: LoadedModel,
    texts: Mapping[str, str | Sequence[int]] | None = None,
    *,
    length: int = 1024,
    rates: Sequence[float] = RATES,
    additive: Sequence[float] = commvq_additive.RATES,
    progress: Callable[[int, int], None] | None = None,
) -> Calibration:
    """Tables of `tc`, and of `tcz` and `commvq-N:additive` for a few rates, of every layer that can be calibrated.

    Args:
        model: the model; left as it was.
        texts: name -> text or token ids; None for the shipped corpus.
        length: tokens of a pass; longer texts are run in pieces.
        rates: bits a value that the tables of `tcz` are designed for; the codec takes the nearest.
        additive: each N of `commvq-N:additive` that there are to be tables for.
        progress: called with (done, total), in units of tokens run; a kind of tables takes as long as so many.
    Returns:
        Calibration: not written anywhere; `path` is None.
    Raises:
        ValueError: no text, a text of less than 64 tokens, or arguments out of range.
        IncompatibleError: the model has no layer that can be calibrated, or no backward pass.
    """
    share = _Progress(progress, ["tc", *["tcz"] * len(rates), *["additive"] * len(additive)])
    moments = collect(model, texts, length=length, progress=share.collected)
    return tables_of(moments, rates, additive, share.built)


def tables_of(
    moments: Moments,
    rates: Sequence[float] = RATES,
    additive: Sequence[float] = commvq_additive.RATES,
    built: Callable[[str], None] | None = None,
) -> Calibration:
    """The calibration that rows and metrics give; what `calibrate` does once the texts were run.

    Args:
        rates, additive: as in `calibrate`.
        built: called with the codec's id as each kind of tables is done.
    Raises:
        IncompatibleError: no layer can be calibrated.
    """
    skipped = dict(moments.skipped)
    rows: dict[str, LayerRows] = {}
    tc: dict[str, TcTables] = {}
    for name, layer in moments.layers.items():
        try:
            tc[name] = build_tc(layer)
        except ValueError as error:
            skipped[name] = str(error)
        else:
            rows[name] = layer
    if not tc:
        reasons = "; ".join(f"layer {name}: {why}" for name, why in skipped.items())
        raise IncompatibleError(f"{moments.model.name} has no layer that can be calibrated: {reasons}", hint="use rvq-4 or another codec")
    tables = {"tc": {name: own.to_arrays() for name, own in tc.items()}}
    _tell(built, "tc")
    for rate in rates:
        chained = build_tcz(list(rows.values()), rate)
        tables[f"tcz-{rate:g}"] = {name: own.to_arrays() for name, own in zip(rows, chained, strict=True)}
        _tell(built, "tcz")
    costs = spectra(rows) if additive else {}
    for bits in additive:
        words = build_shared(rows, bits, costs)
        if words:
            tables[f"additive-{bits:g}"] = {name: own.to_arrays() for name, own in words.items()}
        _tell(built, "additive")
    file = CalibrationFile(
        model=moments.model,
        texts=moments.texts,
        tokens=moments.tokens,
        tables=tables,
        options=dict.fromkeys(tables, _options(moments, rows)),
        skipped=skipped,
        producer=producer(),
    )
    return Calibration(file, digest_of(to_bytes(file)))


def _tell(built: Callable[[str], None] | None, codec: str) -> None:
    if built is not None:
        built(codec)


def _options(moments: Moments, rows: Mapping[str, LayerRows]) -> dict[str, int | str]:
    """How the tables came about; no reader needs it."""
    first = next(iter(rows.values()))
    assert first.gradients is not None
    about = {"length": moments.length, "sink": moments.sink, "recent": moments.recent}
    return {"metric": "fisher", "rows": len(first.k), "gradients": first.gradients, **about}


class _Progress:
    """Progress over the texts and the tables after them."""

    def __init__(self, report: Callable[[int, int], None] | None, kinds: Sequence[str]) -> None:
        self.report, self.kinds = report, kinds
        self.done = self.tokens = 0

    def collected(self, done: int, tokens: int) -> None:
        self.done, self.tokens = done, tokens
        self._tell()

    def built(self, codec: str) -> None:
        self.done += self.tokens // PASSES[codec]
        self._tell()

    def _tell(self) -> None:
        if self.report is not None:
            self.report(self.done, self.tokens + sum(self.tokens // PASSES[codec] for codec in self.kinds))
