"""The commands of a worker Python: plan, prepare, extract, verify, parity, compare, export, demo.

    python backends/__main__.py VERB SPEC.json [--events EVENTS.jsonl [--side-of PID]]
    python backends/__main__.py plan -          the spec on stdin as {"verb": VERB, "spec": {...}}

Exit status: 0 finished; 2 bad input (one line on stderr); 3 stopped by SIGTERM or SIGINT, resumable; 1 anything else.
`--side-of`: the run is one side of the comparison that PID runs; its events tell when each part was done, and it is asked to
end when PID is gone.
`plan` prints one JSON object as its last line and exits 0 also when the answer is no.
"""

from __future__ import annotations

import json
import os
import signal
import sys

if sys.version_info < (3, 11):  # noqa: UP036 - a node's own Python may be any
    _OLD = f"the Python {sys.executable} is {sys.version_info[0]}.{sys.version_info[1]}"
    _REMEDY = "name a Python of at least 3.11 for workers"
    if sys.argv[1:2] == ["plan"]:
        print(json.dumps({"ok": False, "error": _OLD, "remedy": _REMEDY, "warnings": []}))
        sys.exit(0)
    print(f"backends: {_OLD}: {_REMEDY}", file=sys.stderr)
    sys.exit(2)

import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

# Run as a file, sys.path[0] is this folder: `backends/dataset.py` must not pass for a top-level `dataset`, and the
# bundle goes last so that nothing in it hides a package of the worker Python.
_HERE = Path(__file__).resolve().parent
if sys.path and sys.path[0] and Path(sys.path[0]).resolve() == _HERE:
    del sys.path[0]
if str(_HERE.parent) not in sys.path:
    sys.path.append(str(_HERE.parent))

# Only now: they are found by that path.
from backends import credentials  # noqa: E402
from backends.errors import Interrupted, JobError, one_line  # noqa: E402
from backends.events import EventLog  # noqa: E402
from backends.hubname import uses_hub  # noqa: E402
from backends.questions import QUESTIONS  # noqa: E402
from backends.spec import SPECS, Spec, SpecError  # noqa: E402

Verb = Callable[[Any, EventLog, Callable[[], bool]], dict[str, Any]]

VERBS = ("plan", "prepare", "extract", "verify", "parity", "compare", "export", "demo")
_OPTIONS = ["--events", "--side-of"]
FINISHED, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 3


def _verb(name: str) -> Verb:
    """The function of a verb, imported only now: `plan` of a bad spec must not wait for torch."""
    if name == "extract":
        from backends.runner import extract

        return extract
    if name == "prepare":
        from backends.prepare import prepare

        return prepare
    if name == "verify":
        from backends.verify import verify

        return verify
    if name == "parity":
        from backends.parity import parity

        return parity
    if name == "compare":
        from backends.compare.run import compare

        return compare
    if name == "export":
        from backends.export import export

        return export
    if name == "demo":
        from backends.demo.run import demo

        return demo
    raise SpecError(f"no verb is called {name!r}; the verbs are {', '.join(VERBS)}")


def read_spec(verb: str, text: str) -> Spec:
    """The spec of a verb or a question from JSON text. Raises SpecError."""
    known = {**SPECS, **QUESTIONS}
    if verb not in known:
        raise SpecError(f"no verb is called {verb!r}; the verbs are {', '.join(known)}")
    return known[verb].loads(text)


def plan_main(source: str) -> int:
    """Answers on stdout whether a spec can be run here, and what it would do."""
    from backends import plan

    try:
        text = sys.stdin.read() if source == "-" else _read(source)
        data = _json(text)
        if not isinstance(data, dict) or set(data) != {"verb", "spec"}:
            raise SpecError('plan: give one JSON object {"verb": VERB, "spec": {...}}')
        answer = plan.plan(read_spec(str(data["verb"]), json.dumps(data["spec"])))
    except SpecError as error:
        answer = plan.refusal(str(error), "")
    except JobError as error:
        answer = plan.refusal(error.message, error.remedy)
    except Exception as error:
        traceback.print_exc()
        answer = plan.refusal(f"plan broke: {type(error).__name__}: {one_line(error)}", "the traceback is on stderr")
    print(json.dumps(answer), flush=True)
    return FINISHED


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise SpecError(f"plan: the spec is not JSON: {error}") from None


def _read(source: str) -> str:
    try:
        return Path(source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise JobError(f"{source} cannot be read: {one_line(error)}", "give the path of the spec's JSON file") from None


class StopFlag:
    """True once SIGTERM or SIGINT came."""

    def __init__(self) -> None:
        self._set = False
        signal.signal(signal.SIGTERM, self._handle)
        signal.signal(signal.SIGINT, self._handle)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        self._set = True

    def __call__(self) -> bool:
        return self._set


def run_main(verb: str, source: str, events_path: str | None, side_of: int = 0) -> int:
    """Runs one verb to its end and says in the last event how it ended. side_of: the process of a comparison, 0 for none."""
    from backends.environment import versions

    should_stop = StopFlag()
    if side_of:
        from backends.compare.processes import end_with

        end_with(side_of)
    try:
        events = EventLog(Path(events_path) if events_path else None, steps=side_of > 0, versions=versions())
    except OSError as error:
        return _say(f"the events file {events_path} cannot be written: {one_line(error)}", BAD_INPUT)
    if side_of or verb == "compare":
        # The log says it once, of each side under its name: in the comparison's `side` events.
        events.quiet = frozenset({"progress"})
    try:
        spec = read_spec(verb, sys.stdin.read() if source == "-" else _read(source))
        if uses_hub(spec):
            from backends.hub import localised

            spec = localised(spec, events, should_stop)
        outcome = _verb(verb)(spec, events, should_stop)
        events.emit("finished", **outcome)
        return FINISHED
    except Interrupted as stop:
        _last(events, "interrupted", message=stop.message, done=stop.done, total=stop.total)
        return _say(stop.message, INTERRUPTED)
    except JobError as error:
        return _fail(events, error.message, error.remedy, error.status)
    except SpecError as error:
        return _fail(events, str(error), "", BAD_INPUT)
    except ImportError as error:
        from backends.environment import import_remedy

        traceback.print_exc()
        message, remedy = import_remedy(error)
        return _fail(events, message, remedy, BAD_INPUT)
    except Exception as error:
        traceback.print_exc()
        return _fail(events, f"{type(error).__name__}: {one_line(error)}", "the traceback is in the log", FAILED)
    finally:
        events.close()


def _fail(events: EventLog, message: str, remedy: str, status: int) -> int:
    _last(events, "failed", message=message, remedy=remedy)
    return _say(f"{message}: {remedy}" if remedy else message, status)


def _last(events: EventLog, event: str, **fields: Any) -> None:
    try:
        events.emit(event, **fields)
    except JobError as error:
        # A full disk is often why we are here: the exit status still tells.
        print(f"backends: {error.message}", file=sys.stderr)


def _say(line: str, status: int) -> int:
    print(f"backends: {line}", file=sys.stderr, flush=True)
    return status


def main(argv: list[str]) -> int:
    # torch's threads sleep while they wait: where cores are shared, spinning takes the time of whom is waited for.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    credentials.take()
    if argv == ["worker"]:
        from backends.worker import worker_main

        return worker_main()
    if argv == ["vllm-worker"]:
        from backends.vllm.serving import vllm_worker_main

        return vllm_worker_main()
    if len(argv) == 2 and argv[0] == "plan":
        return plan_main(argv[1])
    if (
        len(argv) in (2, 4, 6)
        and argv[0] in VERBS
        and argv[0] != "plan"
        and argv[2:5:2] == _OPTIONS[: len(argv) // 2 - 1]
    ):
        side_of = argv[5] if len(argv) == 6 else "0"
        if side_of.isdecimal():
            return run_main(argv[0], argv[1], argv[3] if len(argv) > 2 else None, int(side_of))
    return _say(f"usage: {{{','.join(VERBS)}}} SPEC.json [--events EVENTS.jsonl]; got {argv}", BAD_INPUT)


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Libraries leave threads that can hold up an exit for ever; everything of ours is committed by now.
    os._exit(status)
