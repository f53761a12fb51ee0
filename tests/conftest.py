"""Fixtures shared by the tests, and a header that says what they ran on."""

from pathlib import Path

import mlx.core as mx
import pytest

from kvtool.blas import loaded_openblas
from kvtool.model import LoadedModel, load_model
from tests.smollm2.make import models_at


def pytest_report_header() -> str:
    return f"mlx {mx.__version__} on {mx.default_device()}, BLAS {loaded_openblas() or 'of MLX'}"


@pytest.fixture(scope="session")
def tiny_a() -> LoadedModel:
    return load_model("tiny-a")


@pytest.fixture(scope="session")
def tiny_b() -> LoadedModel:
    return load_model("tiny-b")


@pytest.fixture(scope="session")
def smollm2_paths() -> dict[str, Path]:
    return models_at()
