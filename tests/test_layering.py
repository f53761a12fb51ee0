"""Data flows one way: each package imports only from the layers below it, absolutely, at the top of its files."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STDLIB = set(sys.stdlib_module_names)

# Longest prefix wins. What a module may import besides the standard library, itself and its own package.
ALLOWED = {
    "formats": {"numpy", "safetensors", "zstandard", "blake3"},
    "veloxquant_mlx.allocators": {"mlx", "numpy", "veloxquant_mlx.native"},
    "veloxquant_mlx.transfer": {"mlx", "numpy", "veloxquant_mlx.native"},
    "veloxquant_mlx.metal": {"mlx", "numpy", "veloxquant_mlx.native", "veloxquant_mlx.allocators", "veloxquant_mlx.transfer"},
    # The patch of mlx-lm's attention is part of the kernels' specification.
    "veloxquant_mlx.metal.fused_sdpa": {"mlx", "mlx_lm", "numpy", "veloxquant_mlx.metal", "veloxquant_mlx.allocators"},
    "veloxquant_mlx.native": {"mlx", "numpy", "formats"},
    "veloxquant_mlx.codecs": {
        "mlx",
        "constriction",
        "numpy",
        "veloxquant_mlx.native",
        "veloxquant_mlx.metal",
        "veloxquant_mlx.allocators",
        "veloxquant_mlx.transfer",
        "formats",
    },
    "veloxquant_mlx.caches": {
        "mlx",
        "mlx_lm",
        "numpy",
        "veloxquant_mlx.codecs",
        "veloxquant_mlx.native",
        "veloxquant_mlx.metal",
        "veloxquant_mlx.allocators",
        "veloxquant_mlx.transfer",
        "formats",
    },
    "veloxquant_mlx.selftest.oracles": {"numpy"},
    "veloxquant_mlx.selftest": {
        "mlx",
        "numpy",
        "formats",
        "veloxquant_mlx.metal",
        "veloxquant_mlx.allocators",
        "veloxquant_mlx.transfer",
    },
    "kvtool.tiny.training": {"numpy", "torch", "tokenizers", "safetensors", "mlx", "mlx_lm", "kvtool"},
    "kvtool.store.buckets": {"kvtool", "formats", "obstore"},
    "kvtool.store.served": {"kvtool", "blake3", "urllib3"},
    "kvtool.service": {"kvtool", "formats", "blake3", "fastapi", "starlette", "pydantic", "uvicorn", "prometheus_client"},
    "kvtool.store.valkey": {"kvtool", "formats", "redis"},
    "kvtool.store.sealed": {"kvtool", "formats", "cryptography"},
    "kvtool": {"numpy", "mlx", "mlx_lm", "click", "blake3", "huggingface_hub", "jinja2", "formats", "veloxquant_mlx", "kvtool"},
    "tests.oracles": {"numpy"},
    "tests.codec_oracles": {"numpy"},
}
# `kvtool check` and `inspect` work without MLX; so do the modules they import.
WITHOUT_MLX = (
    "formats",
    "kvtool",
    "kvtool.cli",
    "kvtool.cli._common",
    "kvtool.cli.check",
    "kvtool.cli.inspect",
    "kvtool.cli.diff",
    "kvtool.cli.calibrations",
    "kvtool.cli.doctor",
    "kvtool.identity",
)


def modules() -> list[tuple[str, Path]]:
    paths = [p for top in ("formats", "veloxquant_mlx", "kvtool", "tests") for p in sorted((ROOT / top).rglob("*.py"))]
    return [(".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"), p) for p in paths]


MODULES = dict(modules())


def imports(tree: ast.AST) -> list[tuple[str, int, bool]]:
    """(module, line, inside a function) of every import; relative ones as "."."""
    found = []

    def visit(node: ast.AST, inside: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                found.extend((alias.name, child.lineno, inside) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = "." if child.level else str(child.module)
                # `from package import module` imports the module.
                names = {f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base for alias in child.names}
                found.extend((name, child.lineno, inside) for name in sorted(names))
            visit(child, inside or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))

    visit(tree, False)
    return found


def rule(module: str) -> tuple[str, set[str]] | None:
    best = max((k for k in ALLOWED if module == k or module.startswith(k + ".")), key=len, default=None)
    return None if best is None else (best, ALLOWED[best])


@pytest.mark.parametrize(("module", "path"), modules(), ids=[m for m, _ in modules()])
def test_imports_only_lower_layers(module: str, path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    allowed = rule(module)
    for name, line, inside in imports(tree):
        where = f"{path.relative_to(ROOT)}:{line} imports {name}"
        assert name != ".", f"{where}: relative"
        # Commands import MLX when they run, so that others start without it; everything else imports at the top.
        assert not inside or module.startswith("kvtool.cli"), f"{where}: inside a function"
        if allowed is not None and name.split(".")[0] not in STDLIB:
            home, names = allowed
            assert any(name == n or name.startswith(n + ".") for n in {home, *names}), f"{where}: not a lower layer of {home}"


@pytest.mark.parametrize("module", WITHOUT_MLX)
def test_no_mlx_at_import(module: str) -> None:
    """Follow the imports at module level; none may reach MLX."""
    seen, queue = set(), [module]
    while queue:
        current = queue.pop()
        if current in seen or current not in MODULES:
            continue
        seen.add(current)
        tree = ast.parse(MODULES[current].read_text(encoding="utf-8"))
        guarded = {
            n.lineno
            for g in ast.walk(tree)
            if isinstance(g, ast.If) and "TYPE_CHECKING" in ast.unparse(g.test)
            for n in ast.walk(g)
            if hasattr(n, "lineno")
        }
        for name, line, inside in imports(tree):
            if inside or line in guarded:
                continue
            assert name.split(".")[0] not in ("mlx", "mlx_lm"), f"{module} reaches MLX through {current}:{line}"
            parts = name.split(".")
            queue += [".".join(parts[:i]) for i in range(1, len(parts) + 1)]


def test_no_vague_module_names() -> None:
    bad = {"utils", "helpers", "manager", "misc", "common"}
    assert not [m for m, _ in modules() if m.rsplit(".", 1)[-1] in bad]
