"""One comparison in full: both backends side by side, then what came of it. What nodes wrote never goes through markup."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.cells import cell_len, set_cell_size
from textual.content import Content

from backends.spec import BACKENDS
from dflash_tui.app.widgets.comparison import (
    Measured,
    measured,
    model_of,
    parity_word,
    seconds_left,
    share_done,
    side_state,
    times,
)
from dflash_tui.app.widgets.job_detail import ended, plain, strays, took, why
from dflash_tui.app.widgets.jobs_table import phase
from dflash_tui.app.widgets.labelled import labelled
from dflash_tui.app.widgets.sparkline import bar, sparkline
from dflash_tui.app.widgets.words import job_state, last_seen
from dflash_tui.fleet import format as fmt
from dflash_tui.fleet.comparison import figure, left_off, mapping, number
from dflash_tui.fleet.facts import Diagnosis, Job, Side
from dflash_tui.fleet.series import shrink
from dflash_tui.fleet.sides import Points, rates
from dflash_tui.fleet.state import NodeView
from dflash_tui.node import hiding
from dflash_tui.node.protocol import Launch

LABEL_WIDTH = 16
HISTORY_S = 120.0
_WIDEST = 44  # columns of one side; wider the two are hard to read across
_COLOURS = {
    "good": "$text-success",
    "warn": "$text-warning",
    "bad": "bold $text-error",
    "accent": "$text-accent",
    "dim": "$text-muted",
}

Cells = Sequence[tuple[str, str]]


def head_content(
    node: NodeView, job: Job, launch: Launch | None, diagnosis: Diagnosis | None, *, now: float, width: int
) -> Content:
    """What is compared and where; then the verdict of one that is done, or why one came to none."""
    lines = [Content.styled(fmt.one_line(_what(node, job, launch)), "bold")]
    verdict = mapping(mapping(job.result).get("verdict"))
    if verdict:
        sentence = str(verdict.get("sentence") or fmt.NOT_AVAILABLE)
        lines.append(Content(fmt.one_line(sentence)))
        lines += _parity_lines(mapping(mapping(job.result).get("parity")), sentence)
        return Content("\n").join(lines)
    state, style = job_state(job.state)
    seen = last_seen(node, now)
    doubt = f"({seen}: it may have changed)" if seen and not job.state.ended else ""
    # What each side does stands in its column.
    doing = (
        ""
        if job.state.ended or any(side.state in ("starting", "running") for side in job.sides.values())
        else phase(job)
    )
    rest = "  ".join(filter(None, (doubt, took(node, job, now), ended(job), doing)))
    lines.append(Content.assemble((state, _COLOURS.get(style, "")), f"  {rest}"))
    for label, text in (*why(job, diagnosis), *strays(job)):
        lines.append(labelled(label, text, label_width=LABEL_WIDTH, width=width))
    return Content("\n").join(lines)


def _what(node: NodeView, job: Job, launch: Launch | None) -> str:
    model = model_of(job, launch).rstrip("/").rpartition("/")[2] or job.name or job.id
    found = {**({} if launch is None else launch.spec), **(job.result or {})}
    samples, tokens = number(found.get("samples")), number(found.get("tokens"))
    parts = [
        f"{model} on {node.host}",
        f"{int(samples):,} samples" + (f" of {fmt.count(tokens)} tokens" if tokens else "") if samples else "",
        str(found.get("dtype") or ""),
        "" if "together" not in found else "side by side" if found["together"] else "one after the other",
    ]
    return ", ".join(part for part in parts if part)


def _parity_lines(parity: Mapping[str, Any], sentence: str) -> Iterator[Content]:
    """What stands against the verdict: that both did not write the same, and every reason that the sentence does not give."""
    word, style = parity_word(parity)
    if style == "good":
        return
    sign, said = ("!", "the two did not write the same states") if style == "bad" else ("?", "it is not known")
    yield Content.assemble((f"{sign} parity {word}", _COLOURS.get(style, "")), f": {said}")
    for reason in parity.get("reasons") or ():
        if str(reason) not in sentence:
            yield Content.assemble(("  ! ", "bold $text-error"), fmt.one_line(str(reason)))


# Both sides, one figure a line.


def figures_content(node: NodeView, job: Job, *, width: int) -> Content:
    """The two backends in two columns, for `width` columns in all."""
    column = min(_WIDEST, max(8, (width - LABEL_WIDTH - 1) // 2))
    lines = [_row("", [(name, "bold") for name in BACKENDS], column)]
    lines += [_row(label, cells, column) for label, cells in _figures(node, job, column)]
    return Content("\n").join(lines)


def _row(label: str, cells: Cells, column: int) -> Content:
    padded = [(f"{_fit(fmt.one_line(text), column - 1)} ", style) for text, style in cells]
    return Content.assemble((f"{label:{LABEL_WIDTH}}", "dim"), *padded).rstrip()


def _fit(text: str, width: int) -> str:
    """A text of exactly `width` columns; one that is cut says so."""
    return set_cell_size(text, width) if cell_len(text) <= width else set_cell_size(text, width - 1) + "…"


def _figures(node: NodeView, job: Job, column: int) -> Iterator[tuple[str, Cells]]:
    sides = [job.sides.get(name) for name in BACKENDS]
    results = [measured(job, name) for name in BACKENDS]
    both = list(zip(BACKENDS, sides, results, strict=True))

    def cells(text: Callable[[Side | None, Measured | None], str]) -> Cells:
        return [(text(side, result), "") for _, side, result in both]

    if not all(results):  # with figures of both it is plain that both got to their end
        states = [side_state(node, job, side) for side in sides]
        yield "state", [(text, _COLOURS.get(style, "")) for text, style in states]
    if not job.state.ended:
        yield "doing", cells(lambda side, _: "" if side is None or side.state == "done" else side.phase or "")
    if not all(results):
        yield "progress", [(_progress(side, column), "") for side in sides]
    yield "samples/s", [_speed(job, name, side, result) for name, side, result in both]
    if any(result is not None and result.interval() for result in results):
        yield "  95 % interval", cells(lambda _, result: _interval(result))
    points = node.side_points.get(job.id, {})
    now = {name: points.get(name, ()) for name, side in job.sides.items() if side.state in ("starting", "running")}
    if not job.state.ended and any(now.values()):
        yield "  last 2 min", [(_history(now.get(name, ()), column - 2), "$text-accent") for name in BACKENDS]
    yield "  per GPU", cells(_per_gpu)
    yield "tokens/s", cells(lambda side, result: figure(_value(side, result, "tokens_per_s")))
    yield "MB/s", cells(lambda side, result: figure(_megabytes(side, result)))
    yield "start-up", cells(lambda side, result: fmt.duration(_value(side, result, "startup_s")))
    if any(results):
        yield "measured over", cells(lambda _, result: fmt.duration(result.number("steady_s") if result else None))
        yield "samples/joule", cells(lambda _, result: figure(result.number("samples_per_joule") if result else None))
        yield "whole dataset", cells(lambda _, result: _whole_dataset(result))
        if any(result and result.text("packing") for result in results):
            yield "batches", cells(lambda _, result: result.text("packing") if result else "")
    else:
        yield (
            "ran for" if job.state.ended else "running for",
            cells(lambda side, _: fmt.duration(None if side is None else side.elapsed_s)),
        )
        if not job.state.ended:
            yield "ETA", cells(lambda side, _: _eta(side))
    yield "GPUs", cells(lambda side, result: _gpus(node, job, side, result))
    for label, name in (("restarts", "restarts"), ("skipped", "skipped")):
        counts = [result.number(name) if result else None for result in results]
        if any(counts):
            yield label, [(fmt.count(count), "$text-warning" if count else "") for count in counts]
    for package in ("vllm", "transformers", "torch"):
        versions = [mapping(result.fields.get("versions")).get(package) if result else None for result in results]
        if any(versions):
            yield package, [(plain(version) if version else "", "") for version in versions]


def _history(points: Points, room: int) -> str:
    # After a gap in the link they reach further back.
    values = shrink(rates(tuple(point for point in points if point[0] > points[-1][0] - HISTORY_S)), room)
    return sparkline(values, len(values))


def _value(side: Side | None, result: Measured | None, name: str) -> float | None:
    """Of the result where there is one, else as it was told last."""
    if result is not None:
        return result.number(name)
    value = None if side is None else getattr(side, name)
    return None if value is None else float(value)


def _progress(side: Side | None, column: int) -> str:
    done = share_done(side)
    if side is None or done is None:
        return fmt.NOT_AVAILABLE
    count = f"{fmt.percent(100 * done):>4} {side.done:,}/{side.total:,}"
    room = min(24, column - 3 - len(count))
    return f"{bar(done, room).replace(' ', '░')} {count}" if room > 3 else count


def _speed(job: Job, name: str, side: Side | None, result: Measured | None) -> tuple[str, str]:
    text = figure(_value(side, result, "samples_per_s"))
    verdict, parity = (mapping(mapping(job.result).get(what)) for what in ("verdict", "parity"))
    if verdict.get("faster") != name:
        return text, ""
    # Of states that are not the same it decides nothing.
    style = "bold $text-success" if parity.get("verdict") == "good" else ""
    return f"{text}  <- {times(number(verdict.get('ratio')))} as fast", style


def _eta(side: Side | None) -> str:
    if side is None:
        return fmt.NOT_AVAILABLE
    return "" if side.state in ("done", "failed", "stopped") else fmt.duration(seconds_left(side))


def _interval(result: Measured | None) -> str:
    found = None if result is None else result.interval()
    return fmt.NOT_AVAILABLE if found is None else f"{figure(found[0])} to {figure(found[1])}"


def _per_gpu(side: Side | None, result: Measured | None) -> str:
    if result is not None:
        return figure(result.number("samples_per_s_per_gpu"))
    if side is None or side.samples_per_s is None or not side.gpus:
        return fmt.NOT_AVAILABLE
    return figure(side.samples_per_s / len(side.gpus))


def _megabytes(side: Side | None, result: Measured | None) -> float | None:
    if result is not None:
        return result.number("mb_per_s")
    return None if side is None or side.bytes_per_s is None else side.bytes_per_s / 1e6


def _whole_dataset(result: Measured | None) -> str:
    if result is None:
        return fmt.NOT_AVAILABLE
    samples = result.number("whole_dataset_samples")
    of = f" for {int(samples):,} samples" if samples else ""
    return f"{fmt.duration(result.number('whole_dataset_s'))}{of}"


def _gpus(node: NodeView, job: Job, side: Side | None, result: Measured | None) -> str:
    named = None if result is None else result.fields.get("gpus")
    uuids = [str(uuid) for uuid in named] if isinstance(named, list) else list(side.gpus if side is not None else ())
    if not uuids:
        return "none: the CPU" if not job.gpus else fmt.NOT_AVAILABLE
    known = {gpu.uuid: gpu for gpu in job.gpus}
    indices = [str(known[uuid].index) if uuid in known else uuid for uuid in uuids]
    names = {gpu.name.removeprefix("NVIDIA ") for uuid in uuids if (gpu := known.get(uuid)) and gpu.name}
    return " ".join((", ".join(indices), *sorted(names)))


# What both wrote, layer by layer; and what was asked for.


def parity_content(job: Job, *, width: int) -> Content | None:
    """Each layer's error against its limit, and the worst sample; None where there is no parity."""
    parity = mapping(mapping(job.result).get("parity"))
    layers = mapping(parity.get("layers"))
    if not layers:
        return None
    room = max(0, min(20, width - _PARITY_WIDTH))
    head = _parity_row("layer", "error", "limit", "of it".ljust(room)[:room], "cosine", "worst row")
    lines = [Content.styled("parity of what both wrote, layer by layer", "bold"), Content.styled(head, "dim")]
    for layer_id, layer in ((name, mapping(item)) for name, item in layers.items()):
        errors = [number(layer.get(name)) for name in ("relative_error", "relative_error_by_token")]
        # The larger of the two is judged.
        error = max((value for value in errors if value is not None), default=None)
        limit, row, cosine = (number(layer.get(name)) for name in ("limit", "worst_row", "cosine"))
        text = _parity_row(
            layer_id,
            _percent(error),
            _percent(limit),
            bar(None if error is None or not limit else error / limit, room).replace(" ", "░"),
            fmt.NOT_AVAILABLE if cosine is None else f"{cosine:.5f}",
            fmt.NOT_AVAILABLE if row is None else f"{int(row):,}",
        )
        verdict = ("good", "$text-success") if layer.get("good") is True else ("BAD", "bold $text-error")
        lines.append(Content.assemble(text, verdict))
    if more := left_off(job.result, layers):
        lines.append(Content.styled(f" {more}", "dim"))
    worst = number(parity.get("worst_row"))
    if worst is not None:
        off = _percent(number(parity.get("worst_error")))
        at = parity.get("worst_layer")
        where = f"row {int(worst):,}" + (f" at layer {at}" if at is not None else "")
        words = f"{where}, off by {off}: nearest its limit"
        lines.append(Content.assemble((f"{'worst sample':{LABEL_WIDTH}}", "dim"), words))
    return Content("\n").join(lines)


_PARITY_WIDTH = 53  # without the bar


def _parity_row(layer: str, error: str, limit: str, track: str, cosine: str, row: str) -> str:
    return f" {fmt.one_line(layer):>5} {error:>8} {limit:>7}  {track}  {cosine:>8} {row:>10}  "


def _percent(value: float | None) -> str:
    return fmt.NOT_AVAILABLE if value is None else f"{100 * value:.3g} %"


def about_content(
    node: NodeView, job: Job, launch: Launch | None, *, clock: Callable[[float | None], str], width: int
) -> Content:
    """What was asked for, where it stands and when it ran."""

    def at(time: float | None) -> str:
        return clock(None if time is None else node.console_time(time))

    found = {**({} if launch is None else launch.spec), **(job.result or {})}
    pairs = [("job", f"{job.id}  {job.name}")]
    pairs += [(name, plain(found[name])) for name in ("model", "dataset", "output", "report") if found.get(name)]
    if found.get("layer_ids") or found.get("layers"):
        pairs.append(("layer ids", plain(found.get("layer_ids") or found.get("layers"))))
    if found.get("extra_args"):
        pairs.append(("vLLM options", " ".join(hiding.arguments([str(word) for word in found["extra_args"]]))))
    pairs += _energy(job)
    pairs.append(("times", f"made {at(job.created)}  started {at(job.started)}  ended {at(job.ended)}"))
    lines = [labelled(label, text, label_width=LABEL_WIDTH, width=width) for label, text in pairs]
    return Content("\n").join(lines)


def _energy(job: Job) -> Iterator[tuple[str, str]]:
    """Where the joules are from, or why there are none."""
    told = {
        name: result.text("energy_source") or result.text("energy_note")
        for name in BACKENDS
        if (result := measured(job, name))
    }
    if len(set(told.values())) == 1 and all(told.values()):
        yield "energy", next(iter(told.values()))
    elif any(told.values()):
        yield "energy", "; ".join(f"{name}: {text or fmt.NOT_AVAILABLE}" for name, text in told.items())
