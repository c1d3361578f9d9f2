"""Runs a comparison to its verdict: both sides, their figures, the parity of what they wrote, the report. Loads no torch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from backends.compare.energy import SOURCE, Meter
from backends.compare.figures import Steady, significant
from backends.compare.folder import Folder
from backends.compare.processes import end_all_below, heir
from backends.compare.sides import Side
from backends.compare.verdict import Subject, verdict
from backends.environment import versions
from backends.errors import Interrupted, JobError
from backends.events import EventLog
from backends.parity import parity
from backends.plan.compare import ComparePlan, plan_compare
from backends.progress import Progress
from backends.spec import BACKENDS, CompareSpec, ParitySpec

_POLL_S = 0.1
_TELL_S = 1.0
# An agent that comes later reads the events from their end: what has not changed is told again now and then.
_AGAIN_S = 20.0
# Less than the grace of a job's supervisor, which then ends everything itself.
_END_S = 35.0
# A steady state shorter than this says little, however many samples there were.
_SHORT_S = 10.0
# An event of a job's record may have 16 KiB; with more layers than this the report alone has them all.
_LAYERS_TOLD = 24
# Processes that a warning names one by one.
_NAMED = 10


def compare(spec: CompareSpec, events: EventLog, should_stop: Callable[[], bool]) -> dict[str, Any]:
    """Returns the fields of `finished`, which are those of `compare.json`. A bad parity is a result.

    A comparison measures, so an earlier one in the same folder is done anew, never gone on with. Raises JobError, with the
    message of a side that failed, SpecError and Interrupted; no process and, unless `keep_files`, no hidden state is left.
    """
    events.emit("phase", phase="checking")
    plan = plan_compare(spec)
    if plan.problem is not None:
        raise plan.problem
    folder = Folder(spec)
    try:
        with heir(), Meter(spec.gpus) as meter:
            return _Comparison(plan, folder, meter, events, should_stop).run()
    finally:
        problem = "" if spec.keep_files else folder.remove_states()
        folder.close()
        if problem:
            events.emit("warning", message=problem)


class _Comparison:
    def __init__(
        self, plan: ComparePlan, folder: Folder, meter: Meter, events: EventLog, should_stop: Callable[[], bool]
    ) -> None:
        self.plan = plan
        self.folder = folder
        self.meter = meter
        self.events = events
        self.should_stop = should_stop
        each = plan.tokens / plan.samples
        self.sides = {name: Side(plan.specs[name], folder.output, plan.samples, each) for name in BACKENDS}
        for name, side in self.sides.items():
            side.spec = replace(side.spec, output=str(folder.path(name)))
        self.progress = _BothSides(events, total=2 * plan.samples)
        self.began = time.monotonic()
        # Of each side: when it was looked at and told last, and what was told.
        self._looked = dict.fromkeys(BACKENDS, -math.inf)
        self._told: dict[str, tuple[float, dict[str, Any]]] = {}

    def run(self) -> dict[str, Any]:
        plan = self.plan
        hf = plan.sides["hf"]
        self.events.emit(
            "started",
            verb="compare",
            total=2 * plan.samples,
            already_done=0,
            layer_ids=list(hf.layer_ids),
            hidden_size=hf.shape.hidden_size,
            bytes_per_token=hf.bytes_per_token,
            together=plan.spec.together,
        )
        for warning in plan.warnings:
            self.events.emit("warning", message=warning)
        self._tell(now=True)
        try:
            if plan.spec.together:
                self._work(list(self.sides.values()))
            else:
                for side in self.sides.values():
                    self._work([side])
        finally:
            self._tell(now=True)
        found = self._parity()
        return self._report(found)

    # --- the sides --------------------------------------------------------------------------------------------------

    def _work(self, sides: Sequence[Side]) -> None:
        """Runs sides to their end. Raises JobError where one fails, and Interrupted; the others are ended then."""
        try:
            for side in sides:
                side.start()
            while any(side.running for side in sides):
                self._look(sides)
                if self.should_stop():
                    raise self._interrupted()
                time.sleep(_POLL_S)
        finally:
            self._end(sides)

    def _look(self, sides: Sequence[Side]) -> None:
        """What they told, to the console. Raises the error of one that failed."""
        for side in sides:
            before = side.done, side.tokens, side.bytes
            side.look()
            done, tokens, nbytes = side.done - before[0], side.tokens - before[1], side.bytes - before[2]
            self.progress.add(samples=done, tokens=tokens, nbytes=nbytes)
            for warning in side.warnings:
                # What the plan said of both sides is said.
                if warning not in self.plan.sides[side.name].warnings:
                    self.events.emit("warning", message=f"{side.name}: {warning}")
            side.warnings.clear()
        self._tell()
        for side in sides:
            if side.error is not None:
                # Who stops the whole group stops the side too.
                raise self._interrupted() if self.should_stop() else side.error

    def _end(self, sides: Sequence[Side]) -> None:
        """Asks those that still run to end, and sees that nothing is left of any."""
        asked = [side for side in sides if side.running]
        for side in asked:
            side.ask_to_end()
        deadline = time.monotonic() + _END_S
        while any(side.running for side in asked) and time.monotonic() < deadline:
            for side in asked:
                side.look()
            time.sleep(_POLL_S)
        self.progress.skipped = sum(int(side.finished.get("skipped") or 0) for side in self.sides.values())
        ended = end_all_below([side.process for side in self.sides.values() if side.process is not None])
        for side in asked:
            side.look()
        names = " and ".join(side.name for side in sides)
        if ended.signalled and not asked:
            message = f"{ended.signalled} processes that the {names} side left behind were ended"
            self.events.emit("warning", message=message)
        if ended.alive:
            pids = ", ".join(map(str, ended.alive[:_NAMED]))
            message = (
                f"{len(ended.alive)} processes of the {names} side live on after SIGKILL and hold what they have,"
                f" GPU memory too: pid {pids}"
            )
            self.events.emit("warning", message=message)

    def _interrupted(self) -> Interrupted:
        done = sum(side.done for side in self.sides.values())
        total = 2 * self.plan.samples
        words = f"stopped on request with {done} of {total} samples done; a comparison is done anew, from its beginning"
        return Interrupted(words, done, total)

    def _tell(self, *, now: bool = False, phase: str = "") -> None:
        """A `side` event for each side that has news, and one of the progress over both, once a second at most."""
        moment = time.monotonic()
        for name, side in self.sides.items():
            at, before = self._told.get(name, (-math.inf, {}))
            if not now and side.state == before.get("state") and moment - self._looked[name] < _TELL_S:
                continue
            self._looked[name] = moment
            fields = side.fields()
            if now or fields != before or moment - at >= _AGAIN_S:
                self._told[name] = moment, fields
                self.events.emit("side", **fields)
        self.progress.phase = phase or "; ".join(
            f"{side.name}: {side.phase or side.state}" for side in self.sides.values() if side.running
        )
        self.progress.tell(now=now)

    # --- what came of it --------------------------------------------------------------------------------------------

    def _parity(self) -> dict[str, Any]:
        """The parity of vllm's folder with hf's as the reference. That it cannot be computed is a bad one."""
        self.events.emit("phase", phase="comparing what they wrote")
        spec = ParitySpec(reference=str(self.folder.path("hf")), output=str(self.folder.path("vllm")))
        try:
            found = parity(spec, _ParityEvents(self.events, self._tell), self.should_stop)
        except Interrupted:
            raise self._interrupted() from None
        except JobError as error:
            reason = f"{error.message}: {error.remedy}" if error.remedy else error.message
            return {
                "verdict": "bad",
                "reasons": [reason],
                "layers": {},
                "worst_layer": None,
                "worst_row": None,
                "worst_error": None,
                "report": None,
            }
        layers: dict[str, dict[str, Any]] = found["layers"]
        # The nearest to its limit, which is another for each layer.
        layer_id, worst = max(layers.items(), key=lambda item: item[1]["worst_row_error"] / item[1]["limit"])
        return {
            "verdict": found["verdict"],
            "reasons": found["reasons"],
            "layers": layers,
            "worst_layer": layer_id,
            "worst_row": worst["worst_row"],
            "worst_error": worst["worst_row_error"],
            "report": str(self.folder.keep_parity(Path(found["report"]))),
        }

    def _report(self, found: dict[str, Any]) -> dict[str, Any]:
        plan, spec = self.plan, self.plan.spec
        gpus = self.meter.gpus()
        steady = {name: side.steady for name, side in self.sides.items()}
        sides = {name: self._figures(side, steady[name]) for name, side in self.sides.items()}
        for name, span in steady.items():
            if span is not None and span.seconds < _SHORT_S:
                short = f"the steady state of {name} lasted only {span.seconds:.1f} s: compare more samples for sound figures"
                self.events.emit("warning", message=short)
        for name, side in self.sides.items():
            if side.restarts:
                lost = f"{name} was started anew, which its rate includes: see the log for why, and compare again"
                self.events.emit("warning", message=lost)
        header = plan.sides["hf"].header
        names = {gpu["uuid"]: gpu["name"] for gpu in gpus}
        subject = Subject(
            model=header.get("model_hub") or Path(header["model"]).name,
            gpus=[names[uuid] for uuid in plan.specs["hf"].gpus],
            rows=plan.whole[0],
            each=spec.together,
        )
        result = {
            "model": header.get("model_hub") or header["model"],
            "dataset": header["dataset"],
            "output": str(self.folder.output),
            "report": str(self.folder.path("compare.json")),
            "first": spec.first,
            "samples": plan.samples,
            "tokens": plan.tokens,
            "together": spec.together,
            "dtype": spec.dtype,
            "layer_ids": list(plan.sides["hf"].layer_ids),
            "gpus": gpus,
            "versions": versions(),
            "sides": sides,
            "parity": found,
            "verdict": verdict(subject, steady, sides, found),
            "done": self.progress.done,
            "total": self.progress.total,
            "elapsed_s": round(time.monotonic() - self.began, 3),
        }
        self.folder.report(result)
        self._tell(now=True)
        return {"verb": "compare", **result, "parity": _told(found)}

    def _figures(self, side: Side, span: Steady | None) -> dict[str, Any]:
        """Those of one side; what was not measured is null. mb_per_s: of 10**6 bytes."""
        cards, each = max(len(side.spec.gpus), 1), side.tokens_each
        rate = None if span is None else span.tokens_per_s
        interval = None if span is None else span.interval()
        startup = side.startup_s
        rows, tokens = self.plan.whole
        energy = None if span is None else self.meter.used(side.spec.gpus, span.begin, span.end)
        joules = None if energy is None else energy.joules
        plan = self.plan.sides[side.name]
        vllm = {name: plan.vllm.get(name) for name in ("version", "torch", "cuda", "transformers")} if plan.vllm else {}
        return {
            "samples": side.done,
            "tokens": side.tokens,
            "bytes": side.bytes,
            "startup_s": significant(startup),
            "steady_s": significant(None if span is None else span.seconds),
            "samples_per_s": significant(None if rate is None else rate / each),
            "tokens_per_s": significant(rate),
            "mb_per_s": significant(None if span is None else span.bytes_per_s / 1e6),
            "samples_per_s_per_gpu": significant(None if rate is None or not side.spec.gpus else rate / each / cards),
            "interval": None if interval is None else [significant(bound / each) for bound in interval],
            "joules": significant(joules),
            "samples_per_joule": significant(span.tokens / each / joules if span is not None and joules else None),
            "energy_source": None if joules is None else SOURCE,
            "energy_note": "" if energy is None else energy.note,
            "whole_dataset_s": significant(None if rate is None or startup is None else startup + tokens / rate),
            "whole_dataset_samples": rows,
            "packing": side.finished.get("packing"),
            "versions": {"vllm": vllm.pop("version"), **vllm} if vllm else versions(),
            "gpus": list(side.spec.gpus),
            "restarts": side.restarts,
            "skipped": int(side.finished.get("skipped") or 0),
        }


class _BothSides(Progress):
    """Over sides that are as fast as they are, and may come one after the other: nobody knows when they end."""

    def _eta_s(self, samples_per_s: float | None) -> None:
        return None


class _ParityEvents(EventLog):
    """The parity's progress as a phase of the comparison; what it finds stands in the report."""

    def __init__(self, events: EventLog, tell: Callable[..., None]) -> None:
        super().__init__(None)
        self._events = events
        self._tell = tell

    def emit(self, event: str, **fields: Any) -> None:
        if event == "progress":
            self._tell(phase=f"comparing what they wrote: {fields['done']} of {fields['total']} samples")
        elif event == "warning":
            self._events.emit("warning", message=f"parity: {fields['message']}")


def _told(parity: dict[str, Any]) -> dict[str, Any]:
    """For the event: of very many layers the worst ones, and of very many reasons the first."""
    layers = parity["layers"]
    if len(layers) > _LAYERS_TOLD:
        worst = sorted(layers, key=lambda name: -layers[name]["worst_row_error"] / layers[name]["limit"])[:_LAYERS_TOLD]
        layers = {name: layers[name] for name in layers if name in worst}
    return {**parity, "layers": layers, "reasons": parity["reasons"][:_LAYERS_TOLD]}
