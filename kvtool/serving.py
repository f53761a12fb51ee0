"""mlx-lm's own OpenAI-compatible server over coded caches: what files hold is there from the start, what it caches itself can be codes."""

import copy
import importlib
import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from http.server import HTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from mlx_lm import server
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache
from mlx_lm.utils import load_config

from formats.errors import IncompatibleError
from kvtool.archive import Restored
from kvtool.model import LoadedModel
from kvtool.store.behind import Behind

# `mlx_lm.generate` is a function to who imports it from the package.
generating = importlib.import_module("mlx_lm.generate")
logger = logging.getLogger(__name__)


def serve(
    model: LoadedModel,
    prompts: Sequence[Restored],
    options: Sequence[str],
    *,
    empty: list[Any] | None = None,
    behind: Behind | None = None,
) -> None:
    """Run `mlx_lm.server` until it is stopped.

    Args:
        model: the model to serve, the only one.
        prompts: caches of this model, of which every request takes the longest that its prompt begins with; they are shared, never copied.
        options: of mlx_lm.server, such as ["--port", "8081"]; --model, --kv-bits and --draft-model are not among them.
        empty: from `kvtool.make_cache`, what the caches of other prompts begin as; None: as mlx-lm keeps them.
        behind: a store that all prompts go to, and come from where memory has less of them.

    Raises:
        IncompatibleError: a prompt without token ids.
        ValueError: options that do not go with coded caches.
    """
    for refused in ("--model", "--kv-bits", "--adapter-path", "--draft-model"):
        if any(option == refused or option.startswith(f"{refused}=") for option in options):
            raise ValueError(f"[serve] {refused} is not taken here.")
    if any(restored.tokens is None for restored in prompts):
        raise IncompatibleError("a file without token ids cannot be found by its prompt", hint="export it with --tokens")
    files = [(restored.cache, list((restored.tokens or ())[: restored.usable])) for restored in prompts]
    for _, prefix in files:
        logger.info("%d tokens are in the prompt cache", len(prefix))
    name = str(model.folder)

    class Cache(server.LRUPromptCache):
        """The server's prompt cache, beside what the files hold, which never leaves it."""

        def fetch_nearest_cache(self, model: Any, tokens: list[int]) -> tuple[list[Any] | None, list[int]]:
            cache, rest = super().fetch_nearest_cache(model, tokens)
            for held, prefix in files:
                common = _common(prefix, tokens)
                if common > len(tokens) - len(rest) and (common == len(prefix) or can_trim_prompt_cache(held)):
                    cache, rest = copy.deepcopy(held), tokens[common:]
                    trim_prompt_cache(cache, len(prefix) - common)
            if behind is not None and (stored := behind.found(tokens, len(tokens) - len(rest))) is not None:
                cache, rest = stored[0], tokens[stored[1] :]
            if rest or cache is None:
                return cache, rest
            # The server takes no request that has nothing left to run.
            if not can_trim_prompt_cache(cache):
                return None, tokens
            trim_prompt_cache(cache, 1)
            return cache, tokens[-1:]

        def insert_cache(self, model: Any, tokens: list[int], prompt_cache: list[Any], **kind: Any) -> None:
            super().insert_cache(model, tokens, prompt_cache, **kind)
            if behind is not None:
                behind.later(tokens, prompt_cache)

    def load(path: str | Path, *args: Any, **kwargs: Any) -> tuple[Any, Any, dict[str, Any]]:
        if str(path) != name:
            raise IncompatibleError(f"only {name} is served here", path=str(path), hint="leave model out of the request, or restart")
        if kwargs.get("adapter_path") is not None:
            raise IncompatibleError("no other adapter is served here", hint="leave adapters out of the request, or restart with --adapter")
        return model.model, model.tokenizer, load_config(model.folder)

    running: list[Any] = []
    asked: list[int] = []

    class Generator(server.ResponseGenerator):
        """The server's thread, known, so that it ends where the server cannot start."""

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            running.append(self)

        def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> tuple[Any, ...]:
            if args.model.adapter is not None:  # which mlx-lm passes over where the request names no model: never an answer of another one
                raise ValueError("no other adapter is served here; leave adapters out of the request, or restart with --adapter")
            found = super()._tokenize(tokenizer, request, args)
            if not found[0]:  # further on it would end the thread, and every request after it
                raise ValueError("the prompt has no tokens")
            return found

    def fresh(one: Any, *args: Any, **kwargs: Any) -> list[Any]:
        return copy.deepcopy(empty) if empty is not None and one is model.model else make_prompt_cache(one, *args, **kwargs)

    def run_http(host: str, port: int, generator: Any) -> None:
        run(host, port, generator, stoppable(server.ThreadingHTTPServer, asked))

    run = server._run_http_server
    # Where the server makes its caches, not in the model: what a probe finds there is what files and stores are compared with.
    with ExitStack() as stack:
        replaced = {
            "LRUPromptCache": Cache,
            "ResponseGenerator": Generator,
            "load": load,
            "make_prompt_cache": fresh,
            "_run_http_server": run_http,
            # /v1/models lists a hub's cache as well, which is not served, and breaks off where there is none.
            "scan_cache_dir": lambda: SimpleNamespace(repos=()),
        }
        stack.enter_context(_replaced(server, replaced))
        stack.enter_context(_replaced(generating, {"make_prompt_cache": fresh}))
        stack.enter_context(_arguments(["mlx_lm.server", "--model", name, *options]))
        # An exception here could leave a thread behind that nobody knows, and that keeps the process.
        stack.enter_context(_signals(lambda number, frame: asked.append(number), signal.SIGINT, signal.SIGTERM))
        try:
            server.main()
        finally:
            for generator in running:
                generator.stop_and_join()


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that two sequences begin with alike."""
    unlike = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(unlike, min(len(one), len(other)))


@contextmanager
def _replaced(module: ModuleType, names: dict[str, Any]) -> Iterator[None]:
    before = {name: getattr(module, name) for name in names}
    for name, value in names.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def stoppable(kind: type[HTTPServer], asked: Sequence[int] = ()) -> type[HTTPServer]:
    """A server that ^C and SIGTERM end by asking it: an exception that is raised where Python happens to finalise something is lost.

    Args:
        kind: of server.
        asked: signals that came before it served; then it does not begin.
    """

    class Stoppable(kind):  # type: ignore[misc, valid-type]
        def serve_forever(self, *args: float) -> None:
            def stop(number: int, frame: Any) -> None:
                threading.Thread(target=self.shutdown, daemon=True).start()  # which waits for the loop that this thread is in

            with _signals(stop, signal.SIGINT, signal.SIGTERM):
                if not asked:
                    super().serve_forever(*args)
            self.server_close()  # who comes while the store is being written shall not wait for an answer

    return Stoppable


@contextmanager
def _signals(handler: Callable[[int, Any], None], *numbers: signal.Signals) -> Iterator[None]:
    """The handler of signals meanwhile, where this is the thread that may set it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = [(number, signal.signal(number, handler)) for number in numbers]
    try:
        yield
    finally:
        for number, earlier in before:
            signal.signal(number, earlier)


@contextmanager
def _arguments(arguments: list[str]) -> Iterator[None]:
    before = sys.argv
    sys.argv = arguments
    try:
        yield
    finally:
        sys.argv = before
