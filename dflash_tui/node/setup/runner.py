"""`__main__.py setup …`: the job that makes environments, and the plan of one.

setup SPEC.json --events FILE     exit status 0 finished, 2 refused, 3 interrupted (it goes on when run again), 1 failed
setup --plan                      {"spec": {…}} on standard input, the plan as one line of JSON on standard output
"""

import argparse
import json
import os
import shutil
import signal
import sys
import traceback
from typing import Any, Dict, List, Optional

from dflash_tui.node.setup import build, places, plan
from dflash_tui.node.setup.pip import Interrupted, Programs
from dflash_tui.node.setup.report import Report
from dflash_tui.node.setup.spec import Refusal, SetupSpec

_TEMPORARY = ".temporary"


def main(arguments: List[str]) -> int:
    parser = argparse.ArgumentParser(prog="dflash-tui-node setup")
    parser.add_argument("spec", nargs="?")
    parser.add_argument("--events")
    parser.add_argument("--plan", action="store_true")
    options = parser.parse_args(arguments)
    if options.plan:
        print(json.dumps(_plan()))
        return 0
    if options.spec is None:
        parser.error("a spec must be given")
    # Its output is the job's log, which others may cut short; only the events matter then.
    return run(options.spec, options.events)


def _plan() -> Dict[str, Any]:
    try:
        request = json.load(sys.stdin)
        return plan.answer(SetupSpec.from_json(request["spec"]))
    except Refusal as refusal:
        return {"ok": False, "error": refusal.message, "remedy": refusal.remedy, "warnings": []}
    except OSError as error:
        line = "%s: %s" % (error.filename or "the node", error.strerror or error)
        return {"ok": False, "error": line, "remedy": "", "warnings": []}


def run(path: str, events: Optional[str]) -> int:
    """Runs the setup of a spec file to its end; the exit status."""
    report = Report(events)
    programs = Programs()
    signal.signal(signal.SIGTERM, programs.stop)
    # What it makes is the user's own, whatever the login shell thinks.
    os.umask(0o022)
    try:
        _work(path, report, programs)
        return 0
    except Interrupted:
        _tell(report, "interrupted", "stopped on request; run again, it goes on where it was")
        return 3
    except Refusal as refusal:
        _tell(report, "failed", refusal.message, refusal.remedy)
        return 2 if isinstance(refusal, _Refused) else 1
    except OSError as error:
        line = "%s: %s" % (error.filename or "the node", error.strerror or error)
        _tell(report, "failed", line, "free some space, or check the rights of that place; then run it again")
        return 1
    except Exception as error:
        traceback.print_exc()
        _tell(report, "failed", "%s: %s" % (type(error).__name__, error), "its log says where; please report it")
        return 1


class _Refused(Refusal):
    """Nothing was begun."""


def _tell(report: Report, event: str, message: str, remedy: str = "") -> None:
    print("%s: %s" % (message, remedy) if remedy else message, file=sys.stderr, flush=True)
    try:
        report.emit(event, message=message, **({"remedy": remedy} if event == "failed" else {"done": 0, "total": 0}))
    except Refusal as unwritten:
        print(unwritten.message, file=sys.stderr, flush=True)


def _work(path: str, report: Report, programs: Programs) -> None:
    try:
        with open(path, encoding="utf-8") as file:
            spec = SetupSpec.from_json(json.load(file))
        lock = places.lock()
        if lock is None:
            raise plan.busy(places.lock_holder() or "")
    except ValueError as error:
        raise _Refused("the spec %s is not JSON: %s" % (path, error)) from None
    except Refusal as refusal:
        raise _Refused(refusal.message, refusal.remedy) from None
    try:
        temporary = os.path.join(places.root(), _TEMPORARY)
        shutil.rmtree(temporary, ignore_errors=True)  # a killed setup left it; the lock is ours now
        os.mkdir(temporary, 0o700)
        programs.work_in(temporary, lock)
        try:
            _make(spec, report, programs)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    finally:
        os.close(lock)


def _make(spec: SetupSpec, report: Report, programs: Programs) -> None:
    try:
        planned = plan.make(spec)
    except Refusal as refusal:
        raise _Refused(refusal.message, refusal.remedy) from None
    names = [one.name for one in planned.todo + planned.kept]
    report.emit("started", verb="setup", total=len(names), already_done=len(planned.kept), where=places.root())
    for line in planned.warnings:
        report.emit("warning", message=line)
    for wanted in planned.todo:
        build.build(wanted, planned.base, planned.wheels, planned.driver, programs, report)
    made = {one.name for one in planned.todo}
    records = [dict(record, made=record["name"] in made) for record in places.whole() if record["name"] in names]
    report.emit(
        "finished",
        done=len(records),
        total=len(names),
        elapsed_s=report.elapsed_s,
        bytes=sum(record["bytes"] for record in records),
        worker_python=places.worker_python(),
        environments=records,
    )
