"""Environments of vLLM as setup lays them out, with nothing in them but what an installer writes."""

from __future__ import annotations

import json
import os
import venv
from pathlib import Path


def installed(python: Path, name: str, version: str) -> None:
    """What an installer writes of a package, into that Python."""
    site = next(python.parent.parent.glob("lib/python*/site-packages"))
    folder = site / f"{name}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (site / name).mkdir()
    # Whoever imports it instead of asking for its version is told so.
    (site / name / "__init__.py").write_text("raise SystemExit('imported')\n")


def environment(data: Path, version: str, *, whole: bool = True) -> Path:
    """An environment laid out as setup lays them out; its Python."""
    envs = data / "dflash-tui" / "envs"
    folder = envs / ".built" / f"vllm-{version}-0123456789"
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    installed(python, "vllm", version)
    installed(python, "transformers", "5.14.1")
    installed(python, "torch", "2.11.0")
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "torch" / "version.py").write_text("__version__ = '2.11.0+cu130'\ncuda: Optional[str] = '13.0'\n")
    if whole:
        (folder / "env.json").write_text(json.dumps({"name": f"vllm-{version}"}))
    (envs / f"vllm-{version}").symlink_to(os.path.relpath(folder, envs))
    return python


def python_of(data: Path, version: str) -> str:
    return str((data / "dflash-tui" / "envs" / f"vllm-{version}").resolve() / "bin" / "python")
