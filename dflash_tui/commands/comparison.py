"""What a comparison found, for a person: the figures of both sides, the layers and the sentence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dflash_tui.commands.output import clean, complain, console, duration, note, table
from dflash_tui.commands.parity import layers_table
from dflash_tui.commands.sides import SIDES


def show_result(result: Mapping[str, Any]) -> None:
    """Figures and layers as tables and the sentence, on stdout; why the parity is bad on stderr."""
    sides = {name: _mapping(_mapping(result.get("sides")).get(name)) for name in SIDES}
    shown = table("", *SIDES, right=SIDES)
    for title, cell in _ROWS.items():
        cells = [cell(sides[name]) for name in SIDES]
        if any(cells):
            shown.add_row(title, *cells)
    screen = console()
    screen.print(shown)
    parity = _mapping(result.get("parity"))
    layers = _mapping(parity.get("layers"))
    if layers:
        screen.print(layers_table(layers))
    screen.print(clean(str(_mapping(result.get("verdict")).get("sentence") or "")))
    for text in dict.fromkeys(str(side.get("energy_note") or "") for side in sides.values()):
        if text:
            note(f"no energy: {text}")
    note(f"kept in {result.get('report')}")
    for reason in parity.get("reasons") or ():
        complain(str(reason))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _value(value: Any) -> float | None:
    return None if isinstance(value, bool) or not isinstance(value, (int, float)) else float(value)


def _digits(value: float | None) -> str:
    """Three significant digits, all of them before the point."""
    if value is None:
        return "n/a"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _plain(name: str, unit: str = "") -> Callable[[Mapping[str, Any]], str]:
    def cell(side: Mapping[str, Any]) -> str:
        value = _value(side.get(name))
        return _digits(value) if value is None or not unit else f"{_digits(value)} {unit}"

    return cell


def _count(name: str) -> Callable[[Mapping[str, Any]], str]:
    """A number that is worth a line only where it is not 0."""
    return lambda side: f"{value:,.0f}" if (value := _value(side.get(name))) else ""


def _rate(side: Mapping[str, Any]) -> str:
    bounds = side.get("interval")
    rate = _digits(_value(side.get("samples_per_s")))
    if not isinstance(bounds, (list, tuple)) or len(bounds) != 2:
        return rate
    return f"{rate} ({_digits(_value(bounds[0]))} to {_digits(_value(bounds[1]))})"


def _whole(side: Mapping[str, Any]) -> str:
    return duration(_value(side.get("whole_dataset_s")))


def _version(side: Mapping[str, Any]) -> str:
    versions = _mapping(side.get("versions"))
    name = next((name for name in ("vllm", "transformers") if versions.get(name)), None)
    return "n/a" if name is None else clean(f"{name} {versions[name]}")


_ROWS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "start-up": _plain("startup_s", "s"),
    "steady state": _plain("steady_s", "s"),
    "samples/s (95 %)": _rate,
    "tokens/s": _plain("tokens_per_s"),
    "MB/s": _plain("mb_per_s"),
    "samples/s a GPU": _plain("samples_per_s_per_gpu"),
    "joules": _plain("joules"),
    "samples/joule": _plain("samples_per_joule"),
    "whole dataset": _whole,
    "version": _version,
    "packing": lambda side: clean(str(side.get("packing") or "")),
    "restarts": _count("restarts"),
    "skipped": _count("skipped"),
}
