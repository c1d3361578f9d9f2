"""What a comparison found, for a person: the figures of both sides, the layers and the sentence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from backends.spec import BACKENDS
from dflash_tui.commands.output import clean, complain, console, duration, note, table
from dflash_tui.commands.parity import layers_table
from dflash_tui.fleet.comparison import figure, left_off, mapping, number, pair


def show_result(result: Mapping[str, Any]) -> None:
    """Figures and layers as tables and the sentence, on stdout; why the parity is bad on stderr."""
    sides = {name: mapping(mapping(result.get("sides")).get(name)) for name in BACKENDS}
    shown = table("", *BACKENDS, right=BACKENDS)
    for title, cell in _ROWS.items():
        cells = [cell(sides[name]) for name in BACKENDS]
        if any(cells):
            shown.add_row(title, *cells)
    screen = console()
    screen.print(shown)
    parity = mapping(result.get("parity"))
    layers = mapping(parity.get("layers"))
    if layers:
        screen.print(layers_table(layers))
        if more := left_off(result, layers):
            screen.print(more)
    screen.print(clean(str(mapping(result.get("verdict")).get("sentence") or "")))
    for text in dict.fromkeys(str(side.get("energy_note") or "") for side in sides.values()):
        if text:
            note(f"no energy: {text}")
    note(f"kept in {result.get('report')}")
    for reason in parity.get("reasons") or ():
        complain(str(reason))


def _digits(value: float | None) -> str:
    return figure(value, missing="n/a")


def _plain(name: str, unit: str = "") -> Callable[[Mapping[str, Any]], str]:
    def cell(side: Mapping[str, Any]) -> str:
        value = number(side.get(name))
        return _digits(value) if value is None or not unit else f"{_digits(value)} {unit}"

    return cell


def _count(name: str) -> Callable[[Mapping[str, Any]], str]:
    """A number that is worth a line only where it is not 0."""
    return lambda side: f"{value:,.0f}" if (value := number(side.get(name))) else ""


def _rate(side: Mapping[str, Any]) -> str:
    bounds = pair(side.get("interval"))
    rate = _digits(number(side.get("samples_per_s")))
    return rate if bounds is None else f"{rate} ({_digits(bounds[0])} to {_digits(bounds[1])})"


def _whole(side: Mapping[str, Any]) -> str:
    return duration(number(side.get("whole_dataset_s")))


def _version(side: Mapping[str, Any]) -> str:
    versions = mapping(side.get("versions"))
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
