"""Themes from TOML files, one a file: the project's own and the user's. A broken file is told and stops no other.

A file holds the arguments of `textual.theme.Theme`: `name` (the file's name where it is left out), `primary` (needed), any
other colour of `COLOURS`, `dark`, `luminosity_spread`, `text_alpha`, and a table `variables` of style variables.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import platformdirs
from textual.color import Color, ColorParseError
from textual.theme import Theme

DEFAULT_THEME = "kiln"
COLOURS = (
    "primary",
    "secondary",
    "warning",
    "error",
    "success",
    "accent",
    "foreground",
    "background",
    "surface",
    "panel",
    "boost",
)
NUMBERS = ("luminosity_spread", "text_alpha")
KNOWN = ("name", "dark", *COLOURS, *NUMBERS, "variables")


class ThemeError(ValueError):
    """A theme that cannot be: one line, with the remedy in it."""


def package_folders() -> tuple[Path, ...]:
    """Where the project's own themes may lie: inside an installed package, and at the root of a checkout."""
    here = Path(__file__).resolve().parent
    return (here / "themes", here.parent.parent / "themes")


def user_folder() -> Path:
    """Where a user's own themes are looked for."""
    return platformdirs.user_config_path("dflash-tui", appauthor=False) / "themes"


def load_themes(extra: Path | None = None) -> tuple[list[Theme], list[str]]:
    """The themes in order of their names, and one line for each file that is none.

    extra: the folder of the user's own, `user_folder()` where None; it need not exist. A theme of the user replaces one of
    the project with the same name. Raises nothing.
    """
    themes: dict[str, Theme] = {}
    problems: list[str] = []
    own = next((folder for folder in package_folders() if folder.is_dir()), None)
    if own is None:
        problems.append(f"no folder of themes at {' or '.join(map(str, package_folders()))}: install dflash-tui again")
    for folder in (own, user_folder() if extra is None else extra):
        if folder is not None:
            _load_folder(folder, themes, problems)
    return [themes[name] for name in sorted(themes)], problems


def _load_folder(folder: Path, themes: dict[str, Theme], problems: list[str]) -> None:
    here: dict[str, Path] = {}
    try:
        paths = sorted(folder.glob("*.toml")) if folder.is_dir() else []
    except OSError as error:
        problems.append(f"{folder}: {error.strerror}")
        return
    for path in paths:
        try:
            theme = read_theme(path)
            if theme.name in here:
                raise ThemeError(f"{here[theme.name].name} is called {theme.name!r} too; give one another name")
        except ThemeError as error:
            problems.append(f"{path}: {error}")
        else:
            here[theme.name] = path
            themes[theme.name] = theme


def read_theme(path: Path) -> Theme:
    """The theme of one file. Raises ThemeError, whose line does not name the file."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ThemeError(f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ThemeError("is not UTF-8; save it as UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise ThemeError(f"is not TOML: {error}") from None
    return make_theme(data, default_name=path.stem)


def make_theme(data: Mapping[str, Any], default_name: str) -> Theme:
    """The theme that `data` describes. Raises ThemeError."""
    for key in data:
        if key not in KNOWN:
            raise ThemeError(f"no setting of a theme is called {key!r}; they are {', '.join(KNOWN)}")
    if "primary" not in data:
        raise ThemeError('primary is missing; give it a colour, such as primary = "#f2a65a"')
    arguments: dict[str, Any] = {"name": default_name, **data}
    name = arguments["name"]
    if not isinstance(name, str) or not name.strip() or not name.isprintable():
        raise ThemeError(f"name must be a text that is not empty, not {name!r}")
    if not isinstance(arguments.get("dark", True), bool):
        raise ThemeError(f"dark must be true or false, not {data['dark']!r}")
    for key in COLOURS:
        if key in data:
            _check_colour(key, data[key])
    for key in NUMBERS:
        value = data.get(key, 0.0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise ThemeError(f"{key} must be a number from 0 to 1, not {value!r}")
    variables = data.get("variables", {})
    if not isinstance(variables, dict) or not all(isinstance(value, str) for value in variables.values()):
        raise ThemeError('variables must be a table of texts, such as border = "#f2a65a"')
    theme = Theme(**arguments)
    try:
        theme.to_color_system().generate()
    except ValueError as error:
        raise ThemeError(f"variables cannot be used: {' '.join(str(error).split())}") from None
    return theme


def _check_colour(key: str, value: object) -> None:
    try:
        if not isinstance(value, str):
            raise ColorParseError("not a text")
        Color.parse(value)
    except ColorParseError:
        raise ThemeError(f'{key} must be a colour such as "#f2a65a" or "teal", not {value!r}') from None
