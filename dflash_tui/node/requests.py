"""What the agent does when a console asks. Each request is answered once; what takes time goes on beside the loop."""

import errno
import json
import os
import signal
import time
from typing import Any, Callable, Dict, List, Optional

from dflash_tui.node import files, gpus, launching, locks, paths, plans, processes, protocol, secrets, verbs
from dflash_tui.node.children import Ended, Program
from dflash_tui.node.diagnose import request as diagnose
from dflash_tui.node.doctor import request as doctor
from dflash_tui.node.jobs import Record
from dflash_tui.node.protocol import Refused
from dflash_tui.node.supervisor import FORCE

_FIRST_READING_S = 20.0
_STRAYS_POLL_S = 0.2
_LISTED = 500

Then = Callable[[], None]


class Requests:
    """The operations of `protocol.py`, for one console. `agent` gives the loop, the store, the metrics and the way out."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._programs: List[Program] = []
        self._launching: Dict[str, List[Any]] = {}
        self._ops: Dict[str, Callable[[Any, protocol.Header], None]] = {
            "ping": self._ping,
            "list": self._list,
            "gpus": self._gpus,
            "plan": self._plan,
            "launch": self._launch,
            "stop": self._stop,
            "doctor": self._doctor,
            "diagnose": self._diagnose,
            **files.Files(agent, self._answer, self._refuse).ops(),
        }

    def handle(self, header: protocol.Header) -> None:
        """Does what a request asks; whatever goes wrong is answered."""
        number = header.get("id")
        op = self._ops.get(str(header.get("op")))
        if op is None:
            known = ", ".join(self._ops)
            self._refuse(
                number,
                Refused(protocol.BAD_REQUEST, "no operation is called %r" % (header.get("op"),), "there are " + known),
            )
            return
        self._guarded(number, lambda: op(number, header))

    def close(self) -> None:
        for program in self._programs:
            program.kill()

    def _guarded(self, number: Any, call: Then) -> None:
        try:
            call()
        except Refused as refused:
            self._refuse(number, refused)
        except OSError as error:
            self._refuse(
                number, Refused(protocol.IO_ERROR, "%s: %s" % (error.filename or "the node", error.strerror or error))
            )
        except Exception as error:
            self._refuse(
                number, Refused(protocol.INTERNAL, "%s: %s" % (type(error).__name__, error), "please report this")
            )

    def _answer(self, number: Any, fields: Dict[str, Any], payload: bytes = b"") -> None:
        self._agent.out.send(dict({"re": number, "ok": True}, **fields), payload)

    def _refuse(self, number: Any, refused: Refused) -> None:
        error = {"code": refused.code, "message": refused.message, "remedy": refused.remedy}
        self._agent.out.send({"re": number, "ok": False, "error": error})

    def _ping(self, number: Any, header: protocol.Header) -> None:
        self._answer(number, {"time": time.time()})

    def _list(self, number: Any, header: protocol.Header) -> None:
        store = self._agent.store
        records: List[Record] = []
        room = protocol.MAX_HEADER * 3 // 4
        ids = paths.job_ids(store.root)
        whole = len(ids) <= _LISTED
        for job in reversed(ids[-_LISTED:]):
            record = self._look(job)
            if record is None:
                continue
            room -= len(json.dumps(record))
            if room < 0:
                whole = False
                break  # a frame has an end; the oldest are left out
            records.append(record)
        self._answer(number, {"jobs": records[::-1], "whole": whole})

    def _look(self, job: str) -> Optional[Record]:
        try:
            return self._record(job)
        except Refused:
            return None  # removed since the folder was read

    def _record(self, job: str) -> Record:
        memory = gpus.memory_by_pid(self._agent.metrics.reading)
        record: Record = self._agent.store.look(job, memory)
        return record

    def _doctor(self, number: Any, header: protocol.Header) -> None:
        def done(fields: Callable[[], Dict[str, Any]]) -> None:
            self._guarded(number, lambda: self._answer(number, fields()))

        self._keep(doctor.start(self._agent, header, done))

    def _diagnose(self, number: Any, header: protocol.Header) -> None:
        def done(fields: Callable[[], Dict[str, Any]]) -> None:
            self._guarded(number, lambda: self._answer(number, fields()))

        path, is_file = files.path_of(self._agent.store.root, header)
        record = None if is_file else self._record(header["job"])
        self._keep(diagnose.start(self._agent.loop, path, record, done))

    # GPUs

    def _gpus(self, number: Any, header: protocol.Header) -> None:
        wanted = _list_of(header, "select")

        def then() -> None:
            cards = self._choose(wanted, bool(header.get("share")))
            named = [{name: card.get(name) for name in ("index", "uuid", "name")} for card in cards]
            self._answer(number, {"gpus": named})

        self._after_reading(number, wanted, then)

    def _choose(self, wanted: List[Any], share: bool) -> List[gpus.Card]:
        cards = gpus.select(self._agent.metrics.reading, wanted)
        gpus.check_free(self._agent.store.root, cards, share, self._agent.store.orphan_on)
        return cards

    def _after_reading(self, number: Any, wanted: List[Any], then: Then) -> None:
        """Goes on once the GPUs are known: the first reading of a driver may take seconds."""
        started = time.monotonic()

        def attempt() -> None:
            if wanted and self._agent.metrics.reading is None and time.monotonic() - started < _FIRST_READING_S:
                self._agent.loop.later(0.1, attempt)
            else:
                self._guarded(number, then)

        attempt()

    def _with_python(
        self, number: Any, verb: str, name: str, then: Callable[[str], None], fail: launching.Fail
    ) -> None:
        if verbs.is_of_node(verb):
            then(verbs.node_python())
            return
        python = launching.find_python(name or self._agent.default_python)
        self._keep(
            launching.probe_python(self._agent.loop, python, lambda: self._guarded(number, lambda: then(python)), fail)
        )

    def _keep(self, program: Program) -> None:
        self._programs = [kept for kept in self._programs if kept.running()] + [program]

    # Plan

    def _plan(self, number: Any, header: protocol.Header) -> None:
        request = header.get("spec")
        if not isinstance(request, dict) or not isinstance(request.get("spec"), dict):
            raise Refused(protocol.BAD_REQUEST, "plan: spec must be {verb, spec}, not %r" % (request,))
        wanted, share = _list_of(header, "gpus"), bool(header.get("share"))
        timeout = header.get("timeout_s", 120.0)
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout <= 3600:
            raise Refused(protocol.BAD_REQUEST, "plan: timeout_s must be seconds, at most 3600, not %r" % (timeout,))
        verb = str(request.get("verb"))
        sent, more = secrets.of_request(header, verb), launching.env_of(header.get("env") or {}, "plan")

        def then() -> None:
            cards = self._choose(wanted, share)
            self._with_python(
                number,
                verb,
                str(header.get("python") or ""),
                lambda python: self._run_plan(number, request, python, cards, timeout, sent, more),
                lambda refused: self._refuse(number, refused),
            )

        self._after_reading(number, wanted, then)

    def _run_plan(
        self,
        number: Any,
        request: Dict[str, Any],
        python: str,
        cards: List[gpus.Card],
        timeout: float,
        sent: Dict[str, str],
        more: Dict[str, str],
    ) -> None:
        def ended(result: Ended) -> None:
            self._guarded(number, lambda: self._answer(number, {"plan": plans.plan_of(result, timeout)}))

        data = json.dumps(dict(request, spec=launching.with_gpus(request["spec"], cards))).encode()
        env = {**launching.environment(), **more}
        uuids = ",".join(str(card["uuid"]) for card in cards)
        env.update(
            CUDA_DEVICE_ORDER="PCI_BUS_ID",
            CUDA_VISIBLE_DEVICES=uuids,
            PYTHONUNBUFFERED="1",
            TERM="dumb",
            COLUMNS="4000",
        )
        command = verbs.plan_command(self._agent.bundle, python, str(request.get("verb")))
        pipe = secrets.pipe_with(sent)
        try:
            if pipe >= 0:
                env[secrets.VARIABLE] = str(pipe)
            fds = [pipe] if pipe >= 0 else []
            self._keep(Program(self._agent.loop, command, ended, timeout, data, env, fds))
        finally:
            if pipe >= 0:
                os.close(pipe)

    # Launch and stop

    def _launch(self, number: Any, header: protocol.Header) -> None:
        job = paths.check_job_id(header.get("job"))
        if os.path.isdir(paths.job_dir(self._agent.store.root, job)):
            self._answer(number, {"job": self._record(job)})
            return
        if job in self._launching:
            self._launching[job].append(number)
            return
        launch = launching.launch_of(header.get("launch"))
        sent = secrets.of_request(header, launch.verb)
        self._launching[job] = [number]

        def refuse(refused: Refused) -> None:
            for asked in self._launching.pop(job, []):
                self._refuse(asked, refused)

        def started() -> None:
            for asked in self._launching.pop(job, []):
                self._guarded(asked, lambda asked=asked: self._answer(asked, {"job": self._record(job)}))  # type: ignore[misc]  # mypy knows no lambda's defaults

        def carefully(call: Then) -> None:
            try:
                call()
            except Refused as refused:
                refuse(refused)
            except OSError as error:
                refuse(Refused(protocol.IO_ERROR, "%s: %s" % (error.filename or "the node", error.strerror or error)))
            except Exception as error:
                refuse(Refused(protocol.INTERNAL, "%s: %s" % (type(error).__name__, error), "please report this"))

        def with_cards() -> None:
            cards = self._choose(list(launch.gpus), launch.share)
            self._with_python(
                number,
                launch.verb,
                launch.python,
                lambda python: carefully(
                    lambda: self._agent.starter.start(job, launch, python, cards, started, refuse, sent)
                ),
                refuse,
            )

        self._after_reading(number, list(launch.gpus), lambda: carefully(with_cards))

    def _stop(self, number: Any, header: protocol.Header) -> None:
        job, force = paths.check_job_id(header.get("job")), bool(header.get("force"))
        record = self._record(job)
        if record["state"] in protocol.ENDED and record["state"] != "orphaned":
            raise Refused(
                protocol.NOT_RUNNING,
                "job %s is not running: it is %s" % (job, record["state"]),
                "there is nothing to stop",
            )
        folder = paths.job_dir(self._agent.store.root, job)
        supervisor = processes.identity_of(record.get("supervisor"))
        word = signal.SIGTERM
        try:
            paths.write_json(os.path.join(folder, "stop.json"), {"requested": time.time(), "force": force})
        except OSError as error:
            # A full disk may be the very reason to stop: then the signal alone must say it.
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not processes.alive(supervisor):
                raise
            word = FORCE if force else signal.SIGTERM
        if record["state"] == "orphaned":
            self._end_strays(number, job, folder)
            return
        if supervisor is not None and record.get("boot_id") == self._agent.store.boot_id:
            # Where it is in another container the signal finds nobody; it looks for the file by itself too.
            processes.send(supervisor, word)
        self._answer(number, {"job": self._record(job)})

    def _end_strays(self, number: Any, job: str, folder: str) -> None:
        def check() -> None:
            def look() -> None:
                record = self._record(job)
                if record["state"] in protocol.ENDED and record["state"] != "orphaned":
                    self._answer(number, {"job": record})
                else:
                    self._agent.loop.later(_STRAYS_POLL_S, check)

            self._guarded(number, look)

        fd = locks.take(os.path.join(folder, "lock"))
        if fd is None:
            check()  # another console has begun it; the file just written reaches that one
            return
        try:
            fail: launching.Fail = lambda refused: self._refuse(number, refused)  # noqa: E731 - a name with a type, for what is a line
            launching.spawn(self._agent.loop, folder, [fd], check, fail, adopt=True)
        finally:
            os.close(fd)


def _list_of(header: protocol.Header, name: str) -> List[Any]:
    value = header.get(name) or []
    if not isinstance(value, list):
        raise Refused(protocol.BAD_REQUEST, "%s must be a list of indices or UUIDs, not %r" % (name, value))
    return value
