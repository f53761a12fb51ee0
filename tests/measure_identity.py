"""What a model's identity costs, with nothing remembered and with all of it: `python -m tests.measure_identity [MODEL]`.

The model is loaded first and stays in the page cache; only what identity adds to a load is timed, by the clock and of the processor, the
least of several runs of each. Exits with 1 where a figure misses its aim.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from kvtool.identifying import ModelFiles, identify
from kvtool.model import load_model
from tests.smollm2.make import models_at

COLD_S, WARM_S = 2.0, 0.010  # aims


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """(by the clock, of the processor) in seconds."""
    clock, processor = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - clock, time.process_time() - processor


def main() -> int:
    with tempfile.TemporaryDirectory() as root:
        model = load_model(sys.argv[1] if len(sys.argv) > 1 else models_at()["smollm2"])

        def once() -> None:
            identify("m", model.info.architecture, model.model, model.tokenizer, ModelFiles.of(model.folder))

        size = sum(path.stat().st_size for path in model.folder.glob("model*.safetensors"))
        print(f"{model.info.name}: weights of {size / 1e6:.1f} MB")
        found = {}
        for name, runs in (("nothing remembered", 3), ("unchanged", 20)):
            times = []
            for i in range(runs):
                os.environ["KVTOOL_CACHE"] = str(Path(root) / (str(i) if name == "nothing remembered" else "0"))
                times.append(timed(once))
            found[name] = min(times)
            print(f"  {name:<20} {1e3 * min(times)[0]:9.2f} ms, processor {1e3 * min(cpu for _, cpu in times):9.2f} ms, {runs} runs")
    return 0 if found["nothing remembered"][0] < COLD_S and found["unchanged"][0] < WARM_S else 1


if __name__ == "__main__":
    sys.exit(main())
