"""The HTTP interface against requests made from its own description: no answer of the kind 5xx, none that the description does not know.

`KVTOOL_FUZZ=N` makes N requests a route (25 by default).
"""

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("schemathesis", reason="schemathesis is not installed")
pytest.importorskip("fastapi", reason="the extra serve is not installed")
import schemathesis
from hypothesis import HealthCheck, given, settings

import kvtool
from kvtool.service.app import make_app
from kvtool.service.settings import Limits
from kvtool.service.state import State
from kvtool.service.tenants import RIGHTS, Tenants, made
from kvtool.store.folder import Folder
from kvtool.store.store import Store
from tests.library import ids, tiny

SECONDS = 5.0  # of processor time, client and service together
EXAMPLES = int(os.environ.get("KVTOOL_FUZZ", "25"))
TENANT, TOKEN = made("fuzz", RIGHTS)
METHODS = [
    ("GET", "/health"),
    ("GET", "/metrics"),
    ("GET", "/v1/tenant"),
    ("GET", "/v1/now"),
    ("GET", "/v1/objects"),
    ("POST", "/v1/objects/sizes"),
    ("POST", "/v1/objects/used"),
    ("GET", "/v1/objects/{name}"),
    ("HEAD", "/v1/objects/{name}"),
    ("PUT", "/v1/objects/{name}"),
    ("DELETE", "/v1/objects/{name}"),
    ("POST", "/v1/lookup"),
    ("POST", "/v1/explain"),
    ("GET", "/v1/entries"),
    ("GET", "/v1/stats"),
]


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The description of a service with one prompt in it."""
    state = State(Folder(tmp_path_factory.mktemp("fuzz") / "store"), Tenants([TENANT]), Limits(object_bytes=1 << 20, json_bytes=1 << 16))
    Store(state.partition(TENANT), chunk=64).put(kvtool.capture(tiny("qwen3"), ids(150)), codec="rvq-4")
    yield schemathesis.openapi.from_asgi("/openapi.json", make_app(state))


def test_every_route_is_among_them(api: Any) -> None:
    assert sorted((one.ok().method.upper(), one.ok().path) for one in api.get_all_operations()) == sorted(METHODS)


@pytest.mark.parametrize(("method", "path"), METHODS)
def test_no_request_breaks_it(api: Any, method: str, path: str) -> None:
    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), derandomize=EXAMPLES <= 25, database=None)
    @given(case=api[path][method].as_strategy())
    def run(case: Any) -> None:
        start = time.process_time()
        answer = case.call(headers={"Authorization": f"Bearer {TOKEN}"})
        assert answer.status_code < 500, answer.text
        assert time.process_time() - start < SECONDS
        case.validate_response(answer, checks=[schemathesis.checks.CHECKS.get_one("response_schema_conformance")])

    run()
