"""kvtool: capture, compress, store and reuse the KV cache of mlx-lm models, in the same model or another one.

    import kvtool

    kvtool.use_openblas()                                 # Linux CPU only, before MLX is imported
    model = kvtool.load_model("mlx-community/SmolLM2-135M-Instruct")
    snapshot = kvtool.capture(model, "A long shared prompt ...")
    kvtool.save(snapshot, "prompt.kv", codec="rvq-2+2")
    restored = kvtool.load("prompt.kv", model)          # restored.cache goes to mlx_lm.generate(prompt_cache=...)

Importing this package does not import MLX: `kvtool check` and `kvtool inspect` work without it.
"""

import importlib
import logging
from typing import TYPE_CHECKING, Any

import veloxquant_mlx as veloxquant_mlx  # before MLX's first product, see there
from kvtool.version import __version__

logging.getLogger(__name__).addHandler(logging.NullHandler())

_HOME = {
    "use_openblas": "kvtool.blas",
    "load_model": "kvtool.model",
    "LoadedModel": "kvtool.model",
    "capture": "kvtool.capturing",
    "Snapshot": "kvtool.capturing",
    "save": "kvtool.archive",
    "open": "kvtool.archive",
    "load": "kvtool.loading",
    "Archive": "kvtool.archive",
    "Restored": "kvtool.archive",
    "SaveReport": "kvtool.archive",
    "make_cache": "kvtool.live",
    "Store": "kvtool.store.store",
    "recode": "kvtool.recoding",
    "fit": "kvtool.bridges.fitting",
    "profile": "kvtool.bridges.profiling",
    "recode_across": "kvtool.bridges.bridging",
    "load_across": "kvtool.bridges.bridging",
    "evaluate": "kvtool.evaluation",
    "EvalReport": "kvtool.evaluation",
    "calibrate": "kvtool.calibrating",
    "Calibration": "kvtool.calibrations",
    "sweep": "kvtool.sweeping",
    "SweepReport": "kvtool.sweeping",
    "SweepRow": "kvtool.sweeping",
    "robustness": "kvtool.hostile_rows",
    "RobustnessReport": "kvtool.hostile_rows",
}

__all__ = ["__version__", *_HOME]

if TYPE_CHECKING:
    from kvtool.archive import Archive as Archive
    from kvtool.archive import Restored as Restored
    from kvtool.archive import SaveReport as SaveReport
    from kvtool.archive import open as open
    from kvtool.archive import save as save
    from kvtool.blas import use_openblas as use_openblas
    from kvtool.bridges.bridging import load_across as load_across
    from kvtool.bridges.bridging import recode_across as recode_across
    from kvtool.bridges.fitting import fit as fit
    from kvtool.bridges.profiling import profile as profile
    from kvtool.calibrating import calibrate as calibrate
    from kvtool.calibrations import Calibration as Calibration
    from kvtool.capturing import Snapshot as Snapshot
    from kvtool.capturing import capture as capture
    from kvtool.evaluation import EvalReport as EvalReport
    from kvtool.evaluation import evaluate as evaluate
    from kvtool.hostile_rows import RobustnessReport as RobustnessReport
    from kvtool.hostile_rows import robustness as robustness
    from kvtool.live import make_cache as make_cache
    from kvtool.loading import load as load
    from kvtool.model import LoadedModel as LoadedModel
    from kvtool.model import load_model as load_model
    from kvtool.recoding import recode as recode
    from kvtool.store.store import Store as Store
    from kvtool.sweeping import SweepReport as SweepReport
    from kvtool.sweeping import SweepRow as SweepRow
    from kvtool.sweeping import sweep as sweep


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
