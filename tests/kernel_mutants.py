"""Faults planted in the Python of the kernel functions, and which cells of the kernel table a fault has turned red.

A mutant is the code object of one function with one place of its source changed; planted, every caller runs it.
"""

import ast
import copy
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType
from typing import Any

from veloxquant_mlx.metal import FUNCTIONS

# (function, column) of the kernel table: a fault of that column was planted in this session and a row failed.
caught: set[tuple[str, str]] = set()

PACKAGES = ("veloxquant_mlx.metal.", "veloxquant_mlx.allocators.", "veloxquant_mlx.transfer.")
SHARED = ("veloxquant_mlx.metal._checks", "veloxquant_mlx.metal._backend", "veloxquant_mlx.metal._kernel")
# A wrong index would be read outside its array, which on a CPU is not an error but may end the process.
BOUNDS = ("clamped_indices",)
# Their arguments are shapes, types and ranges: a fault there is an error of MLX, not a wrong result.
SHAPING = ("reshape", "astype", "arange", "range", "transpose", "broadcast_to", "split", "zeros", "ones", "full", "expand_dims")

# Definitions that only look codes up: the next entry in place of the right one, clamped as ever.
WRITTEN = {
    "dequantize_vq": ("clamped_indices(indices,", "clamped_indices(indices + 1,"),
    "_dequantize_ops": ("mx.minimum(indices.astype(mx.uint32),", "mx.minimum(indices.astype(mx.uint32) + 1,"),
}

_PAIRS = (
    *((ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.LShift, ast.RShift), (ast.BitAnd, ast.BitOr)),
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq)),
)
SWAPS: dict[type[ast.AST], type[ast.AST]] = dict([*_PAIRS, *((b, a) for a, b in _PAIRS)])
Edit = Callable[[Any], None]


@dataclass(frozen=True)
class Mutant:
    """`function` with another code; `text` says what changed."""

    function: FunctionType
    code: CodeType
    text: str

    @contextmanager
    def planted(self) -> Iterator[None]:
        sound = self.function.__code__
        self.function.__code__ = self.code
        try:
            yield
        finally:
            self.function.__code__ = sound


def called(run: Callable[[], object]) -> list[FunctionType]:
    """Functions of the kernel package, and of what it builds on, that `run` calls, in order."""
    codes: dict[CodeType, None] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            codes[frame.f_code] = None

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    modules = [module for name, module in list(sys.modules.items()) if name.startswith(PACKAGES) and name not in SHARED]
    known = {f.__code__: f for module in modules for f in vars(module).values() if isinstance(f, FunctionType)}
    return [known[code] for code in codes if code in known and known[code].__module__ not in SHARED]


def definition_mutants(functions: Sequence[FunctionType]) -> Iterator[Mutant]:
    """Operators, comparisons and arguments exchanged in what computes, then constants; the function's own module first, it itself last."""
    for function in functions:
        if function.__name__ in WRITTEN:
            yield _written(function, *WRITTEN[function.__name__])
    computing = [f for f in functions if not f.__name__.lstrip("_").startswith("check") and f.__name__ not in BOUNDS]
    own = {f.__module__ for f in functions if f.__name__ in FUNCTIONS}
    computing.sort(key=lambda f: (f.__name__ in FUNCTIONS, f.__module__ not in own))
    for edits in (_exchange, _next_constant):
        for function in computing:
            yield from _mutants(function, _computing_nodes, edits)


def check_mutants(functions: Sequence[FunctionType]) -> Iterator[Mutant]:
    """One check gone: a call of `require` or `check_...`, or the condition of a `raise`."""
    for function in functions:
        yield from _mutants(function, lambda tree: list(ast.walk(tree)), _removal)


def _mutants(function: FunctionType, places: Callable[[Any], list[Any]], edits: Callable[[Any], list[Edit]]) -> Iterator[Mutant]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    for number, node in enumerate(places(tree)):
        for edit in edits(node):
            changed = copy.deepcopy(tree)
            target = places(changed)[number]
            edit(target)
            text = f"{function.__module__}.{function.__name__}: {ast.unparse(node)} -> {ast.unparse(target)}"
            yield Mutant(function, _code(ast.fix_missing_locations(changed), function), text)


def _written(function: FunctionType, old: str, new: str) -> Mutant:
    source = textwrap.dedent(inspect.getsource(function))
    if source.count(old) != 1:
        raise ValueError(f"{function.__name__} must have {old!r} once")
    tree = ast.parse(source.replace(old, new))
    return Mutant(function, _code(tree, function), f"{function.__module__}.{function.__name__}: {old} -> {new}")


def _code(tree: ast.Module, function: FunctionType) -> CodeType:
    module = compile(tree, f"<mutant of {function.__name__}>", "exec")
    (code,) = [c for c in module.co_consts if isinstance(c, CodeType) and c.co_name == function.__name__]
    return code


def _computing_nodes(tree: ast.Module) -> list[Any]:
    """Nodes of the body that take part in a value: no conditions, subscripts, keywords, checks, shapes, or loops that must end."""
    found = []

    def visit(node: Any) -> None:
        if isinstance(node, ast.Raise | ast.While | ast.keyword | ast.AnnAssign) or _is_check(node):
            return
        if isinstance(node, ast.Call) and _name(node.func) in SHAPING:
            visit(node.func)
            return
        found.append(node)
        for child in ast.iter_child_nodes(node):
            if child is not getattr(node, "slice", None) and child is not getattr(node, "test", None):
                visit(child)

    (definition,) = tree.body
    for statement in definition.body:
        visit(statement)
    return found


def _exchange(node: Any) -> list[Edit]:
    if isinstance(node, ast.BinOp) and type(node.op) in SWAPS:
        return [lambda n: setattr(n, "op", SWAPS[type(n.op)]())]
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
        return [lambda n: setattr(n, "ops", [SWAPS[type(n.ops[0])](), *n.ops[1:]])]
    if isinstance(node, ast.Call) and len(node.args) >= 2:
        return [lambda n: setattr(n, "args", [*n.args[:-2], n.args[-1], n.args[-2]])]
    return []


def _next_constant(node: Any) -> list[Edit]:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return [lambda n: setattr(n, "value", n.value + 1)]
    return []


def _removal(node: Any) -> list[Edit]:
    if isinstance(node, ast.If) and isinstance(node.body[0], ast.Raise):
        return [lambda n: setattr(n, "test", ast.Constant(False))]
    if isinstance(node, ast.Expr) and _is_check(node.value):
        return [lambda n: setattr(n, "value", ast.Constant(None))]
    if isinstance(node, ast.Assign) and _is_check(node.value) and _name(node.value.func) == "check_int":
        return [lambda n: setattr(n, "value", n.value.args[2])]
    return []


def _is_check(node: Any) -> bool:
    return isinstance(node, ast.Call) and _name(node.func).lstrip("_").startswith(("check", "require"))


def _name(node: Any) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
