"""The outcome of a comparison in one sentence, with what is and what is not sure. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from backends.compare.figures import Steady, ratio, significant


@dataclass(frozen=True, slots=True)
class Subject:
    """What the sentence is about. gpus: names of the cards of one side; rows: of the whole dataset."""

    model: str
    gpus: Sequence[str | None]
    rows: int
    each: bool = False

    @property
    def machine(self) -> str:
        """As "1 H200", "4 H200 each" or "the CPU". each: the sides worked at a time."""
        if not self.gpus:
            return "the CPU that both shared" if self.each else "the CPU"
        names = {(name or "GPU").removeprefix("NVIDIA ") for name in self.gpus}
        return f"{len(self.gpus)} {' and '.join(sorted(names))}{' each' if self.each else ''}"


def verdict(
    subject: Subject,
    steady: Mapping[str, Steady | None],
    sides: Mapping[str, Mapping[str, Any]],
    parity: Mapping[str, Any],
) -> dict[str, Any]:
    """{faster, ratio, low, high, sentence}.

    ratio: the rate of the side that was faster in this run over the other's, so at least 1, with its interval of 95 %.
    faster: that side's name; null where the interval holds 1 or is not known. sides: the figures by name.
    """
    names = list(sides)
    found: dict[str, Any] = {"faster": None, "ratio": None, "low": None, "high": None}
    one, other = (steady[name] for name in names)
    if one is not None and other is not None:
        if one.tokens_per_s < other.tokens_per_s:
            names.reverse()
            one, other = other, one
        value, low, high = ratio(one, other)
        faster = names[0] if low is not None and low > 1 else None
        # Four digits: more is noise.
        found = {"faster": faster}
        found |= {"ratio": significant(value, 4), "low": significant(low, 4), "high": significant(high, 4)}
    return {**found, "sentence": _sentence(subject, names, found, sides, parity)}


def _sentence(
    subject: Subject,
    names: Sequence[str],
    found: Mapping[str, Any],
    sides: Mapping[str, Mapping[str, Any]],
    parity: Mapping[str, Any],
) -> str:
    first, second = names
    where = f"for {subject.model} on {subject.machine}"
    ratio, low, high = (found[name] for name in ("ratio", "low", "high"))
    rates = [sides[name]["samples_per_s"] for name in names]
    figures = "" if None in rates else f"{_rate(rates[0])} against {_rate(rates[1])} samples/s"
    if ratio is None:
        speed = f"how fast hf and vllm are {where} cannot be told, too few samples were compared"
    elif low is None:
        speed = (
            f"{first} did {_times(ratio, ratio)} times as many samples a second as {second} {where},"
            " on too few samples to tell how sure that is"
        )
    elif found["faster"] is None:
        speed = (
            f"no difference can be told between {first} and {second} {where} (ratio {_times(ratio, ratio)},"
            f" {_times(low, ratio)} to {_times(high, ratio)})"
        )
    else:
        speed = (
            f"{first} is {_times(ratio, ratio)} times as fast ({_times(low, ratio)} to {_times(high, ratio)}) {where}"
        )
    whole = [sides[name]["whole_dataset_s"] for name in names]
    takes = ""
    if None not in whole:
        takes = f"{subject.rows:,} samples would take {spell(whole[0])} against {spell(whole[1])}, start-up included"
    if parity["verdict"] != "good":
        why = parity["reasons"][0] if parity["reasons"] else "see the report"
        more = f" ({len(parity['reasons']) - 1} more)" if len(parity["reasons"]) > 1 else ""
        head = (
            f"hf and vllm did NOT write the same {where}: {why}{more}; until that is mended their speed decides nothing"
        )
        return f"{head} ({first} {figures})" if figures else head
    worst = max((_error(layer) for layer in parity["layers"].values()), default=0.0)
    tail = f"both wrote the same (worst layer {_percent(worst)})"
    told = (figures, takes, *_lost(sides), tail)
    return f"{speed}{': ' if figures else '; '}{'; '.join(part for part in told if part)}"


def _lost(sides: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """What a rate holds beside the work."""
    for name, side in sides.items():
        if count := side.get("restarts"):
            yield f"{name} was started anew {'once' if count == 1 else f'{count} times'}, which its rate includes"


def _error(layer: Mapping[str, Any]) -> float:
    return max(float(layer["relative_error"]), float(layer["relative_error_by_token"]))


def _percent(share: float) -> str:
    """One significant digit below 10 %, as "0.9 %"; what two kernels of float32 differ by is not 0 %."""
    percent = share * 100
    return f"{percent:.0f} %" if percent >= 9.5 else f"{percent:.1g} %" if percent >= 0.001 else "under 0.001 %"


def _times(value: float, like: float) -> str:
    """A ratio with as many digits as `like` has: two behind the point below 2."""
    return f"{value:.2f}" if like < 1.95 else f"{value:.1f}" if like < 9.95 else f"{value:.0f}"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"


def spell(seconds: float) -> str:
    """A length of time as a person says it: 40 s, 12 min, 6.2 h, 3.1 days."""
    for size, unit, most in ((1.0, "s", 90.0), (60.0, "min", 90.0), (3600.0, "h", 48.0)):
        if seconds < most * size:
            value = seconds / size
            return f"{value:.1f} {unit}" if unit == "h" and value < 10 else f"{value:.0f} {unit}"
    return f"{seconds / 86400:,.1f} days"
