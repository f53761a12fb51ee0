"""The hook into mlx-lm's attention: there while a coded cache lives, and taken out after the last.

mlx-lm's `base.scaled_dot_product_attention` passes a cache that has `bits` on to `quantized_scaled_dot_product_attention`, looked up in
that module at every call, so that one symbol reaches all model files, whenever they were imported. Learned sinks raise an error before that
call, hence the files that have them (`families.SINKS`) get a function of their own in place of base's.

Beside `metal.fused_sdpa.patch_mlx_lm_for_fused_sdpa`: that patch decides first, for caches whose `config` asks for it, and leaves all
others, these among them, to the original; either can be put in and taken out without the other.
"""

import sys
import threading
import weakref
from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any

from mlx_lm.models import base

from veloxquant_mlx.caches.families import SINKS
from veloxquant_mlx.metal import fused_sdpa
from veloxquant_mlx.metal.fused_sdpa import is_patched

SYMBOL = "quantized_scaled_dot_product_attention"
_OURS = "_coded_attention"  # attribute of our functions: themselves, as a wrapper around one may copy it, and what they stand in for
_lock = threading.RLock()
_holders = 0


def hold(cache: Any) -> None:
    """Keep the hook in place for as long as an object lives."""
    global _holders
    with _lock:
        _holders += 1
        _install()
    weakref.finalize(cache, _release).atexit = False


def is_installed() -> bool:
    """Whether attention of mlx-lm reaches coded caches now."""
    return _routes(getattr(base, SYMBOL))


def _release() -> None:
    global _holders
    with _lock:
        _holders -= 1
        if not _holders:
            _uninstall()


def _places() -> list[tuple[Any, str]]:
    modules = [sys.modules.get(f"mlx_lm.models.{name}") for name in sorted(SINKS)]
    return [(base, SYMBOL), *((module, "scaled_dot_product_attention") for module in modules if module is not None)]


def _install() -> None:
    for module, symbol in _places():
        original = getattr(module, symbol)
        if not _routes(original):
            setattr(module, symbol, _routed(original))


def _uninstall() -> None:
    for module, symbol in _places():
        ours, original = getattr(getattr(module, symbol), _OURS, (None, None))
        # Another patch that was put over ours since keeps it; ours then passes on what is not its own.
        if ours is getattr(module, symbol):
            # And one beneath ours that was taken out since is not put back.
            gone = not is_patched() and hasattr(original, fused_sdpa._ORIGINAL)
            setattr(module, symbol, getattr(original, fused_sdpa._ORIGINAL) if gone else original)


def _routes(function: Any) -> bool:
    """Whether ours is this function, or one that it wraps."""
    while function is not None:
        if getattr(function, _OURS, (None,))[0] is function:
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def _routed(original: Callable) -> Callable:
    parameters = signature(original)

    @wraps(original, updated=())  # marks of other patches are theirs
    def attention(queries: Any, keys: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
        attend = getattr(keys, "attend", None)
        if attend is None or keys is not values:
            return original(queries, keys, values, *args, **kwargs)
        call = parameters.bind(queries, keys, values, *args, **kwargs).arguments
        return attend(queries, call["scale"], call.get("mask"), call.get("sinks"))

    setattr(attention, _OURS, (attention, original))
    return attention
