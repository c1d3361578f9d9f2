"""What can be proved without running: style, types, layers, and that the node side speaks Python 3.8."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
TOOLS = Path(sys.executable).parent
LIMIT_S = 280


def run(*command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(TOOLS / command[0]), *command[1:]], cwd=cwd, capture_output=True, text=True, timeout=LIMIT_S
    )


def passes(*command: str) -> None:
    result = run(*command)
    assert result.returncode == 0, result.stdout + result.stderr


def test_ruff_finds_nothing() -> None:
    passes("ruff", "check", "backends", "dflash_tui", "tests")


def test_everything_is_formatted() -> None:
    passes("ruff", "format", "--check", "backends", "dflash_tui", "tests")


def test_strict_types_hold() -> None:
    passes("mypy", "--strict", "backends", "dflash_tui")


def test_the_layers_hold() -> None:
    passes("lint-imports", "--no-cache")


def test_a_broken_layer_would_be_noticed(tmp_path: Path) -> None:
    extra = tmp_path / "probe"
    extra.mkdir()
    (extra / "__init__.py").write_text("import textual\n")
    settings = (
        "[tool.importlinter]\nroot_packages = ['probe']\ninclude_external_packages = true\n"
        "[[tool.importlinter.contracts]]\nname = 'x'\ntype = 'forbidden'\n"
        "source_modules = ['probe']\nforbidden_modules = ['textual']\n"
    )
    (tmp_path / "pyproject.toml").write_text(settings)
    result = run("lint-imports", "--no-cache", cwd=tmp_path)
    assert result.returncode != 0
    assert "probe is not allowed to import textual" in result.stdout


def test_the_node_side_speaks_python_3_8() -> None:
    passes("vermin", "-q", "-t=3.8-", "--eval-annotations", "--no-tips", "dflash_tui/node")
