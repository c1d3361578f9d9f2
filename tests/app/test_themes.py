"""The project's themes can be read by everyone, and a user's broken one is told by name."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest
from textual.app import App
from textual.color import Color
from textual.theme import Theme

from dflash_tui.app.themes import DEFAULT_THEME, ThemeError, load_themes, read_theme
from dflash_tui.fleet.facts import JobsArrived, JobState

from .scripted import NOW, ScriptedLink, console, gpu_node, launch_file, lost_node, running_job, until_shown

TEXTS = ("foreground", "primary", "secondary", "accent", "success", "warning", "error")
GROUNDS = ("background", "surface", "panel")

# How eyes without one kind of cone see linear RGB at full severity: Machado, Oliveira and Fernandes 2009, table of matrices.
EYES = {
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}


def project_themes(tmp_path: Path) -> list[Theme]:
    themes, problems = load_themes(tmp_path / "none")
    assert problems == []
    return themes


def linear(colour: str) -> list[float]:
    parts = (value / 255 for value in Color.parse(colour).rgb)
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def luminance(colour: str) -> float:
    red, green, blue = linear(colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """The contrast ratio of WCAG 2, 1 to 21."""
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def lab(rgb: list[float]) -> tuple[float, float, float]:
    """CIE L*a*b* (D65) of linear RGB."""
    rows = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    white = (0.9505, 1.0, 1.089)
    x, y, z = (sum(a * b for a, b in zip(row, rgb, strict=True)) / w for row, w in zip(rows, white, strict=True))
    fx, fy, fz = (v ** (1 / 3) if v > 216 / 24389 else (24389 / 27 * v + 16) / 116 for v in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


def distance(one: str, other: str, eye: str) -> float:
    """How far apart two colours are for an eye, in CIE76 units."""
    seen = []
    for colour in (one, other):
        rgb = [sum(a * b for a, b in zip(row, linear(colour), strict=True)) for row in EYES[eye]]
        seen.append(lab([min(max(value, 0.0), 1.0) for value in rgb]))
    return sum((a - b) ** 2 for a, b in zip(*seen, strict=True)) ** 0.5


def test_there_is_a_dark_and_a_light_theme_and_the_default_is_one_of_them(tmp_path: Path) -> None:
    themes = project_themes(tmp_path)
    assert {theme.dark for theme in themes} == {True, False}
    assert DEFAULT_THEME in {theme.name for theme in themes}


def test_every_text_colour_has_a_contrast_of_at_least_4_5_on_every_ground(tmp_path: Path) -> None:
    for theme in project_themes(tmp_path):
        for text in TEXTS:
            for ground in GROUNDS:
                ratio = contrast(getattr(theme, text), getattr(theme, ground))
                assert ratio >= 4.5, f"{theme.name}: {text} on {ground} is {ratio:.2f}"


def test_the_key_under_the_cursor_can_be_read(tmp_path: Path) -> None:
    for theme in project_themes(tmp_path):
        pair = theme.variables["block-cursor-foreground"], theme.variables["block-cursor-background"]
        assert contrast(*pair) >= 4.5, theme.name


@pytest.mark.parametrize("eye", EYES)
def test_success_warning_and_error_stay_apart_for_colour_blind_eyes(tmp_path: Path, eye: str) -> None:
    for theme in project_themes(tmp_path):
        for one, other in combinations(("success", "warning", "error"), 2):
            apart = distance(getattr(theme, one), getattr(theme, other), eye)
            assert apart >= 15, f"{theme.name}: {one} and {other} are {apart:.1f} apart with {eye}"


async def test_textual_takes_every_theme(tmp_path: Path) -> None:
    app: App[None] = App()
    async with app.run_test():
        for theme in project_themes(tmp_path):
            app.register_theme(theme)
            app.theme = theme.name
            assert app.current_theme.name == theme.name


def test_a_users_theme_is_added_and_one_of_the_same_name_replaces_the_projects(tmp_path: Path) -> None:
    (tmp_path / "night.toml").write_text('primary = "#00ff00"\n')
    (tmp_path / "mine.toml").write_text(f'name = "{DEFAULT_THEME}"\nprimary = "#123456"\n')
    themes, problems = load_themes(tmp_path)
    found = {theme.name: theme for theme in themes}
    assert problems == []
    assert found["night"].primary == "#00ff00"
    assert found[DEFAULT_THEME].primary == "#123456"


def test_the_users_themes_are_found_in_the_configuration_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "dflash-tui" / "themes"
    folder.mkdir(parents=True)
    (folder / "night.toml").write_text('primary = "#00ff00"\n')
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert "night" in {theme.name for theme in load_themes()[0]}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("primary = ", "is not TOML"),
        ('secondary = "red"', "primary is missing"),
        ('primary = "#12345"', "primary must be a colour"),
        ("primary = 5", "primary must be a colour"),
        ('primary = "red"\nerror = "reddish"', "error must be a colour"),
        ('primary = "red"\ncolour = "blue"', "no setting of a theme is called 'colour'"),
        ('primary = "red"\ndark = "yes"', "dark must be true or false"),
        ('primary = "red"\ntext_alpha = 7', "text_alpha must be a number from 0 to 1"),
        ('primary = "red"\nname = ""', "name must be a text"),
        ('primary = "red"\n[variables]\nborder = 3', "variables must be a table of texts"),
    ],
)
def test_a_broken_theme_is_told_by_file_and_reason_and_stops_no_other(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "broken.toml").write_text(text)
    (tmp_path / "whole.toml").write_text('primary = "#00ff00"\n')
    themes, problems = load_themes(tmp_path)
    assert {"whole", DEFAULT_THEME} <= {theme.name for theme in themes}
    assert "broken" not in {theme.name for theme in themes}
    [problem] = problems
    assert "broken.toml" in problem
    assert reason in problem
    assert "\n" not in problem


def test_a_theme_that_is_not_utf8_or_cannot_be_read_is_told(tmp_path: Path) -> None:
    (tmp_path / "latin.toml").write_bytes(b'name = "caf\xe9"\nprimary = "red"\n')
    (tmp_path / "folder.toml").mkdir()
    problems = load_themes(tmp_path)[1]
    assert len(problems) == 2
    assert "latin.toml: is not UTF-8" in problems[1]
    assert "folder.toml: cannot be read" in problems[0]


def test_two_files_of_one_name_are_told(tmp_path: Path) -> None:
    for file in ("a.toml", "b.toml"):
        (tmp_path / file).write_text('name = "twin"\nprimary = "#00ff00"\n')
    [problem] = load_themes(tmp_path)[1]
    assert "b.toml: a.toml is called 'twin' too" in problem


def test_a_missing_file_is_a_theme_error(tmp_path: Path) -> None:
    with pytest.raises(ThemeError, match="cannot be read"):
        read_theme(tmp_path / "nowhere.toml")


@pytest.mark.parametrize("theme", ["chalk", "kiln"])
async def test_whatever_stands_on_a_screen_can_be_told_from_its_ground(theme: str) -> None:
    job = running_job()
    ended = running_job("20261130-010000-extract-aaaa", state=JobState.DONE, ended=NOW)
    link = ScriptedLink("gpu-1", [*gpu_node("gpu-1"), JobsArrived("gpu-1", (job, ended), whole=True)])
    link.files = {(one.id, "launch"): launch_file(one) for one in (job, ended)}
    app = console(link, ScriptedLink("gpu-7", lost_node("gpu-7")), theme=theme)
    async with app.run_test(size=(120, 40)) as pilot:
        for keys, text in (
            (("1", "down"), "0 H200"),
            (("2",), "520/1,000"),
            (("n",), "busy GPUs"),
            (("escape", "3"), "Choose a job"),
        ):
            await pilot.press(*keys)
            await until_shown(pilot, text)
            for strip in app.screen._compositor.render_strips():
                for part, style, _ in strip:
                    if any(map(str.isalnum, part)) and style and style.color and style.bgcolor:
                        colours = [Color.from_rich_color(one).hex6 for one in (style.color, style.bgcolor)]
                        assert contrast(*colours) >= 2, f"{text}: {part!r} is {colours[0]} on {colours[1]}"
