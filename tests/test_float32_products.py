"""Float32 products are that, on every back end, from the import of kvtool or of the codecs on."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os, {package}
import mlx.core as mx
import numpy as np
a, b = (np.random.default_rng(seed).standard_normal((64, 576)).astype(np.float32) for seed in (0, 1))
want = a.astype(np.float64) @ b.T
print(os.environ["MLX_ENABLE_TF32"], np.linalg.norm(np.array(mx.array(a) @ mx.array(b).T) - want) / np.linalg.norm(want))
"""


@pytest.mark.parametrize("package", ["kvtool", "veloxquant_mlx.codecs"])
def test_products_have_float32_factors(package: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "MLX_ENABLE_TF32"}
    program = PROGRAM.format(package=package)
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    setting, error = done.stdout.split()
    assert setting == "0"
    assert float(error) < 1e-6  # TF32 gives 3e-4


def test_who_asks_for_tf32_has_it() -> None:
    program = "import os, kvtool; print(os.environ['MLX_ENABLE_TF32'])"
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | {"MLX_ENABLE_TF32": "1"}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "1"
