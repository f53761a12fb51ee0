"""Fixtures shared by the tests, and a header that says what they ran on."""

from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from formats.calibration import to_bytes
from kvtool.blas import loaded_openblas
from kvtool.model import LoadedModel, load_model
from tests import store_servers
from tests.library import calibration_of
from tests.smollm2.make import models_at
from tests.texts import text


def pytest_report_header() -> str:
    return f"mlx {mx.__version__} on {mx.default_device()}, BLAS {loaded_openblas() or 'of MLX'}"


@pytest.fixture(scope="session")
def tiny_a() -> LoadedModel:
    return load_model("tiny-a")


@pytest.fixture(scope="session")
def tiny_b() -> LoadedModel:
    return load_model("tiny-b")


@pytest.fixture(scope="session")
def calibration_a(tiny_a: LoadedModel) -> bytes:
    """The bytes of a calibration of tiny-a from 320 tokens."""
    return to_bytes(calibration_of(tiny_a, tiny_a.tokenizer.encode(text("technical"))[:320]))


@pytest.fixture(scope="session")
def smollm2_paths() -> dict[str, Path]:
    return models_at()


@pytest.fixture(scope="session")
def s3_port() -> Iterator[int]:
    if not store_servers.HAVE_S3:
        pytest.skip("obstore or moto[server] is not installed")
    with store_servers.s3_server() as port:
        yield port


@pytest.fixture(scope="session")
def redis_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    if not store_servers.HAVE_REDIS:
        pytest.skip("redis-server or the package redis is not installed")
    with store_servers.redis_server(tmp_path_factory.mktemp("redis")) as port:
        yield port


@pytest.fixture(scope="session")
def cluster_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    if not store_servers.HAVE_REDIS:
        pytest.skip("redis-server or the package redis is not installed")
    with store_servers.redis_cluster(tmp_path_factory.mktemp("cluster")) as port:
        yield port
