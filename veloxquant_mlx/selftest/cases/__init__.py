"""The table of kernel cases: every module here that does not start with `_` contributes CASES, ERRORS, LENGTHS and MUTATIONS."""

import importlib
import pkgutil
from typing import Any

from veloxquant_mlx.selftest.case import Case, ErrorCase, LengthCase, Mutation


def _collect(name: str) -> tuple[Any, ...]:
    return tuple(row for module in MODULES for row in getattr(module, name, ()))


MODULES = tuple(importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))
CASES: tuple[Case, ...] = _collect("CASES")
ERRORS: tuple[ErrorCase, ...] = _collect("ERRORS")
LENGTHS: tuple[LengthCase, ...] = _collect("LENGTHS")
MUTATIONS: tuple[Mutation, ...] = _collect("MUTATIONS")
