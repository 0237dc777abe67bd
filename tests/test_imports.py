"""The arrows between packages, read from the source. docs/architecture.md draws the same arrows."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
ROOT = "surefoot"

FOUNDATION = frozenset({"errors", "machine", "paths", "validation", "version"})
"""Modules that every package may import; among themselves they only look at each other."""

ARROWS: dict[str, frozenset[str]] = {
    "structured": frozenset(),
    "sampling": frozenset({"structured"}),
    "prompts": frozenset(),
    "speculation": frozenset(),
    "kernels": frozenset(),
    "cache": frozenset(),
    "parallel": frozenset(),
    "targets": frozenset({"kernels", "cache"}),
    "drafters": frozenset({"targets", "kernels", "cache", "speculation"}),
    "engine": frozenset(
        {"drafters", "targets", "kernels", "cache", "speculation", "sampling", "structured", "parallel"}
    ),
    "profiling": frozenset({"engine", "targets", "kernels", "cache", "speculation", "sampling"}),
    "llm": frozenset({"profiling", "engine", "targets", "speculation", "sampling", "prompts"}),
    "async_llm": frozenset({"llm", "engine", "targets", "speculation", "sampling", "prompts"}),
    "bench": frozenset(
        {"llm", "profiling", "engine", "drafters", "targets", "kernels", "cache", "speculation", "sampling"}
    ),
    "training": frozenset({"engine", "drafters", "targets", "kernels", "cache", "speculation", "sampling"}),
    "serving": frozenset(
        {
            *("async_llm", "llm", "engine", "drafters", "targets", "speculation", "sampling", "structured", "prompts"),
            "profiling",
        }
    ),
    "cli": frozenset(
        {
            "serving",
            "async_llm",
            "llm",
            "bench",
            "training",
            "profiling",
            "engine",
            "drafters",
            "targets",
            "speculation",
            "sampling",
            "prompts",
        }
    ),
    "": frozenset({"llm", "async_llm", "sampling"}),  # what `import surefoot` offers
    "__main__": frozenset({"cli"}),
}
"""Package or top-level module -> what it may import besides the foundation. Nothing points upward."""

LINES = 500
LONGEST = {"surefoot.engine.step": 200}
"""Most lines of a file, and the exceptions."""


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted((SOURCE / ROOT).rglob("*.py"))}


def imported(name: str, text: str) -> set[str]:
    """Modules of the package that a module imports anywhere: at its top, inside functions, for type checkers only."""
    found = set()
    package = name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = node.module or ""
            if node.level:
                base = ".".join([*parents[: len(parents) - node.level + 1], *base.split(".")]).rstrip(".")
            for alias in node.names:
                full = f"{base}.{alias.name}"
                found.add(full if full in MODULES else base)
    return {module for module in found if module in MODULES} - {name}


GRAPH = {name: imported(name, path.read_text()) for name, path in MODULES.items()}


def room(module: str) -> str:
    """The package or top-level module that a module belongs to."""
    return module.removeprefix(ROOT).lstrip(".").partition(".")[0]


def circles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """Strongly connected components of more than one module."""
    reach: dict[str, set[str]] = {}
    for start in graph:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            for module in graph[waiting.pop()] - seen:
                seen.add(module)
                waiting.append(module)
        reach[start] = seen
    return {
        frozenset({other for other in reach[module] if module in reach[other]})
        for module in graph
        if module in reach[module]
    }


def upward() -> set[tuple[str, str]]:
    """Imports that no arrow allows."""
    return {
        (module, other)
        for module, others in GRAPH.items()
        for other in others
        if room(module) != room(other)
        and room(other) not in (FOUNDATION if room(module) in FOUNDATION else FOUNDATION | ARROWS[room(module)])
    }


def test_the_reader_of_imports_sees_every_kind() -> None:
    text = (
        "import surefoot.errors\nfrom surefoot import llm\nfrom surefoot.engine import step as s\nfrom os import path\n"
    )
    text += "def f():\n    from surefoot.kernels.native import load\n    from . import paged\n"
    found = imported("surefoot.cache.blocks", text)
    assert found == {f"surefoot.{name}" for name in ("errors", "llm", "engine.step", "kernels.native", "cache.paged")}
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"d"}}) == {frozenset("bc"), frozenset("d")}


def test_every_package_has_its_arrows_and_no_arrow_closes_a_circle() -> None:
    assert {room(module) for module in MODULES} <= ARROWS.keys() | FOUNDATION
    drawn = {name: set(targets) for name, targets in ARROWS.items()}
    assert set().union(*drawn.values()) <= drawn.keys()
    assert circles(drawn) == set()


def test_no_module_imports_upward() -> None:
    assert upward() == set()


def test_no_circle_between_modules() -> None:
    assert circles(GRAPH) == set()


def test_files_are_short() -> None:
    lengths = {name: len(path.read_text().splitlines()) for name, path in MODULES.items()}
    long = {name: length for name, length in lengths.items() if length > LONGEST.get(name, LINES)}
    assert long == {}


@pytest.mark.parametrize(
    ("modules", "missing", "allowed"),
    [
        (
            "surefoot.speculation, surefoot.speculation.simulation",
            ("hypothesis", "pydantic", "transformers", "matplotlib", "rich", "typer", "scipy", "safetensors"),
            {"speculation", *FOUNDATION},
        ),
        ("surefoot.cli.app", ("torch", "transformers", "matplotlib"), {"cli", "sampling", "structured", *FOUNDATION}),
    ],
)
def test_what_an_import_loads(modules: str, missing: tuple[str, ...], allowed: set[str]) -> None:
    """The planning half is usable without the engine; `surefoot --help` answers without torch."""
    code = f"import sys, {modules}\nprint(*sorted(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = result.stdout.split()
    assert not {name.partition(".")[0] for name in loaded} & set(missing)
    ours = {room(name) for name in loaded if name.startswith(f"{ROOT}.")}
    assert ours <= allowed, ours - allowed


def test_the_planning_half_lists_its_names() -> None:
    import surefoot.speculation as speculation

    assert sorted(speculation.__all__) == speculation.__all__
    assert all(hasattr(speculation, name) for name in speculation.__all__)
