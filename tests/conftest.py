"""Fixtures shared by the tests, and a header that says what they ran on."""

import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from formats.calibration import to_bytes
from kvtool.blas import loaded_openblas
from kvtool.model import LoadedModel, load_model
from kvtool.service import tenants
from kvtool.service.tenants import Tenant
from tests import store_servers
from tests.library import calibration_of
from tests.service_running import HAVE_SERVICE, service
from tests.smollm2.make import models_at
from tests.texts import text

# Files that take longest, in processor time; one that began last would run alone at the end.
# fmt: off
LONGEST = (
    "test_smollm2", "test_native_neon", "test_kernels", "test_kernel_mutations", "test_kernel_faults", "test_component_kernel",
    "test_tiny_models", "test_decode_tiles", "test_kernel_cuda", "test_coded_kernel", "test_coded_tiles", "test_bench", "test_native",
    "test_lm_server", "test_store_objects", "test_evicting", "test_unlike_shapes", "test_store_memory", "test_coded_load", "test_coded",
    "test_cli", "test_store_hostile", "test_metal_emulation", "test_alignment", "test_calibrate", "test_store_races", "test_store_remote",
    "test_sweeping", "test_rope_families", "test_memory", "test_service_page", "test_store_killed", "test_service_hostile",
)
# fmt: on


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where several processes run the tests, each takes whole files, whose fixtures are shared, the longest first."""
    if hasattr(config, "workerinput"):
        place = {name: i for i, name in enumerate(LONGEST)}
        items.sort(key=lambda item: place.get(item.path.stem, len(place)))


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


def _port(have: bool, missing: str, server: Callable[[Path], AbstractContextManager[int]]) -> Any:
    """A fixture: port of a server of the session in a folder of its own."""

    @pytest.fixture(scope="session")
    def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
        if not have:
            pytest.skip(f"{missing} is not installed")
        with server(tmp_path_factory.mktemp("server")) as running:
            yield running

    return port


s3_port = _port(store_servers.HAVE_S3, "obstore or moto[server]", lambda _: store_servers.s3_server())
azure_port = _port(store_servers.HAVE_AZURE, "azurite-blob or the package obstore", store_servers.azure_server)
redis_port = _port(store_servers.HAVE_REDIS, "redis-server or the package redis", store_servers.redis_server)
cluster_port = _port(store_servers.HAVE_REDIS, "redis-server or the package redis", store_servers.redis_cluster)


@pytest.fixture(scope="session")
def google() -> Iterator[Any]:
    """The tests' own server of Google Cloud Storage's XML interface; listings come in pages of 7."""
    pytest.importorskip("obstore", reason="obstore is not installed")
    server = pytest.importorskip("tests.gcs_server", reason="cryptography is not installed")
    with server.gcs_server(store_servers.BUCKET, page=7) as running:
        yield running


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], tuple[str, str]]]:
    """Makes a new tenant of a service that all tests share: its address and the tenant's token."""
    if not HAVE_SERVICE:
        pytest.skip("the extras serve and remote are not installed")
    folder = tmp_path_factory.mktemp("served")
    known: list[Tenant] = []
    tenants.write(folder / "tenants.json", known)

    def another() -> tuple[str, str]:
        tenant, token = tenants.made(f"tenant-{len(known)}")
        known.append(tenant)
        tenants.write(folder / "tenants.json", known)
        return running.address, token

    with service(folder / "store", "--tenants", str(folder / "tenants.json")) as running:
        yield another


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a tmpfs with these options; or mounts it anew with others, such as read-only."""
    place = tmp_path / "disk"

    def mounted(options: str) -> Path:
        kind = ["-t", "tmpfs"] if not place.exists() else []
        place.mkdir(exist_ok=True)
        command = ["mount", *kind, "-o", options, *(["tmpfs"] if kind else []), str(place)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert not done.returncode or kind, done.stderr
        if done.returncode:
            pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
        return place

    yield mounted
    subprocess.run(["umount", "-l", str(place)], capture_output=True)
