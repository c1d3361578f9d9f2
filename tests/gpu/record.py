"""Records what a real GPU machine answers, so that tests can replay it where there is no GPU.

    python3 tests/gpu/record.py --out FILE        (or: python3 -m tests.gpu.record --out FILE)

Needs `pynvml`, `nvidia-smi` and, for the busy phases, `torch` with CUDA; without one of them the rest is recorded. Takes
under three minutes, needs no network and changes no setting. The file holds, idle and while a matmul runs, the raw answer
of every call in `questions.py`, with the microseconds that it took and how many of them were ours; what the driver's counters show while bytes are copied
to and from the card; the kernel's lines about the driver; and the readings that our own `metrics` process makes of all that.
Serial numbers, UUIDs and bus ids are replaced by false ones, the same by the same; process ids are kept.

Shape: `{"recorded", "versions": {…}, "phases": {"idle": PHASE, "busy": PHASE or null}, "copies": {…}, "system": {…}, "load":
{…}, "notes": […]}`; PHASE = `{"nvml": {"calls": {CALL: ANSWER}, "devices": [{CALL: ANSWER, "links": [{CALL: ANSWER}],
"fields": {"ID:SCOPE": ANSWER}}], "seconds"}, "smi": {NAME: {"arguments", "exit", "stdout", "stderr", "seconds"}},
"agent": {…}}`. CALL is the function with its arguments after the handle (and the link), `nvmlDeviceGetClockInfo(1)`; ANSWER
is `{"value": …, "us": …, "cpu_us": …}` or `{"error": NVML's code or null, "message": LINE, "us": …}`; `cpu_us` from 100 us on.
"""

import argparse
import ctypes
import importlib.metadata
import json
import os
import re
import resource
import select
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import questions
from disguise import Disguise

ROOT = Path(__file__).resolve().parents[2]
CARDS_IN_FULL = 1  # the others say little new and would make the file large
SMI_TIME_LIMIT_S = 15.0
LOAD_READY_LIMIT_S = 60.0
SETTLE_S = 3.0  # utilisation is an average over the driver's last sample period
COPY_S = 2.0


def plain(value):
    """An answer as JSON has it: structures as objects, bytes as text, handles as nothing."""
    if isinstance(value, (list, tuple, ctypes.Array)):
        return [plain(item) for item in value]
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if hasattr(value, "_fields_"):
        return {field[0]: plain(getattr(value, field[0])) for field in value._fields_}
    if value is None or isinstance(value, (str, int, float)):
        return value
    if hasattr(value, "__dict__") and vars(value):
        return {key: plain(item) for key, item in vars(value).items()}
    return None


def timed(pynvml, function, *arguments, times=2):
    """The answer of the last of some calls and how long that took; the first loads the symbol."""
    answer = {}
    for _ in range(times):
        started, busy = time.perf_counter(), time.thread_time()
        try:
            answer = {"value": plain(function(*arguments))}
        except pynvml.NVMLError as error:
            answer = {"error": error.value, "message": str(error)}
        except Exception as error:  # pynvml's own mismatch error is no NVMLError, and old ones lack functions
            answer = {"error": None, "message": f"{type(error).__name__}: {error}"}
        answer["us"] = round((time.perf_counter() - started) * 1e6)
        if answer["us"] >= 100:
            answer["cpu_us"] = round((time.thread_time() - busy) * 1e6)
    return answer


def ask(pynvml, name, *arguments, times=2):
    function = getattr(pynvml, name, None)
    if function is None:
        return {"error": None, "message": f"AttributeError: this pynvml has no {name}", "us": 0}
    return timed(pynvml, function, *arguments, times=times)


def ask_field(pynvml, handle, field, scope):
    answer = ask(pynvml, "nvmlDeviceGetFieldValues", handle, [(field, scope)])
    if "error" in answer or not answer["value"]:
        return answer
    said = answer["value"][0]
    spent = {key: answer[key] for key in ("us", "cpu_us") if key in answer}
    if said["nvmlReturn"] != 0:
        return {"error": said["nvmlReturn"], **spent}
    kind = said["valueType"]
    name = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}.get(kind, "ullVal")
    return {"value": said["value"].get(name), "type": kind, "timestamp": said["timestamp"], **spent}


def record_card(pynvml, handle, in_full, notes):
    answers = {}
    for name, *arguments in questions.DEVICE_CALLS:
        try:
            values = [getattr(pynvml, item) if isinstance(item, str) else item for item in arguments]
        except AttributeError as error:
            notes.append(str(error))
            continue
        answers[f"{name}({', '.join(map(str, values))})"] = ask(pynvml, name, handle, *values)
    if not in_full:
        return answers
    fields = [(field, 0) for field in questions.FIELDS]
    fields += [(field, scope) for field in questions.POWER_FIELDS for scope in questions.POWER_SCOPES]
    fields += [(field, questions.ALL_LINKS) for field in questions.FIELDS_OF_ALL_LINKS]
    answers["links"] = []
    for link in range(questions.LINKS):
        found = {
            f"{name}({', '.join(map(str, arguments))})": ask(pynvml, name, handle, link, *arguments)
            for name, *arguments in questions.LINK_CALLS
        }
        answers["links"].append(found)
        if link and "value" in found["nvmlDeviceGetNvLinkState()"]:
            fields += [(field, link) for field in questions.LINK_FIELDS]
    answers["fields"] = {f"{field}:{scope}": ask_field(pynvml, handle, field, scope) for field, scope in fields}
    return answers


def record_events(pynvml, handles):
    """Whether XIDs can be waited for, and how long a look at none takes."""
    kind = getattr(pynvml, "nvmlEventTypeXidCriticalError", 8)
    calls = {"nvmlEventSetCreate()": ask(pynvml, "nvmlEventSetCreate", times=1)}
    try:
        events = pynvml.nvmlEventSetCreate()
    except Exception as error:  # recorded by the line above in the driver's own words
        calls["events"] = {"error": None, "message": f"{type(error).__name__}: {error}"}
        return calls
    for handle in handles:
        calls[f"nvmlDeviceRegisterEvents({kind})"] = ask(
            pynvml, "nvmlDeviceRegisterEvents", handle, kind, events, times=1
        )
    calls["nvmlEventSetWait_v2(0)"] = ask(pynvml, "nvmlEventSetWait_v2", events, 0)
    calls["nvmlEventSetFree()"] = ask(pynvml, "nvmlEventSetFree", events, times=1)
    return calls


def record_nvml(pynvml, notes):
    started = time.monotonic()
    calls = {
        "nvmlSystemGetDriverVersion()": ask(pynvml, "nvmlSystemGetDriverVersion"),
        "nvmlSystemGetNVMLVersion()": ask(pynvml, "nvmlSystemGetNVMLVersion"),
        "nvmlSystemGetCudaDriverVersion_v2()": ask(pynvml, "nvmlSystemGetCudaDriverVersion_v2"),
        "nvmlDeviceGetCount()": ask(pynvml, "nvmlDeviceGetCount"),
        "nvmlDeviceGetHandleByIndex(99)": ask(pynvml, "nvmlDeviceGetHandleByIndex", 99),
    }
    devices, handles = [], []
    for index in range(calls["nvmlDeviceGetCount()"].get("value", 0)):
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        except pynvml.NVMLError as error:
            devices.append({"nvmlDeviceGetHandleByIndex": {"error": error.value, "message": str(error)}})
            continue
        handles.append(handle)
        devices.append(record_card(pynvml, handle, index < CARDS_IN_FULL, notes))
    calls.update(record_events(pynvml, handles))
    return {"calls": calls, "devices": devices, "seconds": round(time.monotonic() - started, 4)}


def smi(arguments):
    started = time.monotonic()
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, timeout=SMI_TIME_LIMIT_S, stdin=subprocess.DEVNULL
        )
        answer = {
            "exit": done.returncode,
            "stdout": done.stdout.decode("utf-8", "replace"),
            "stderr": done.stderr.decode("utf-8", "replace"),
        }
    except (OSError, subprocess.TimeoutExpired) as error:
        answer = {"exit": None, "stdout": "", "stderr": f"{type(error).__name__}: {error}"}
    return dict(answer, arguments=arguments, seconds=round(time.monotonic() - started, 4))


def record_smi(notes):
    answers = {name: smi(arguments) for name, arguments in questions.SMI_COMMANDS.items()}
    names, aliases = [], {}
    for line in smi(questions.HELP)["stdout"].splitlines():
        found = re.findall(r'"([a-z0-9_.]+)"', line) if line.startswith('"') else []
        if found and not questions.NOT_RECORDED.search(found[0]):
            names.append(found[0])
            aliases.update(dict.fromkeys(found[1:], found[0]))
    while names:
        answer = smi([f"--query-gpu={','.join(names)}", questions.SMI_FORMAT])
        refused = re.search(r'Field "([^"]+)" is not a valid field', answer["stdout"] + answer["stderr"])
        if not refused or refused.group(1) not in names:
            answers["every_field"] = dict(answer, aliases=aliases)
            break
        notes.append(f"nvidia-smi lists the field {refused.group(1)} and refuses it")
        names.remove(refused.group(1))
    return answers


def record_agent(lines):
    """What our own metrics process says of this machine, and the processor time that it took for it."""
    program = ROOT / "dflash_tui" / "node" / "__main__.py"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    try:
        done = subprocess.run(
            [sys.executable, str(program), "metrics", "--count", str(lines)],
            capture_output=True,
            timeout=lines + 30,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    readings = []
    for line in done.stdout.decode("utf-8", "replace").splitlines():
        reading = json.loads(line)
        for process in (process for card in reading["gpus"] for process in card["processes"] or ()):
            process["command"] = process["command"] and process["command"][:40]
        readings.append({key: value for key, value in reading.items() if key != "host"})
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    said = done.stderr.decode("utf-8", "replace").strip()
    return {
        "exit": done.returncode,
        "stderr": said,
        "cpu_seconds": round(spent, 3),
        "lines": lines,
        "last": readings[-1:],
    }


def record_phase(pynvml, notes, lines):
    return {
        "nvml": record_nvml(pynvml, notes) if pynvml else None,
        "smi": record_smi(notes),
        "agent": record_agent(lines),
    }


def under_load(what, notes, during):
    """`(what during() gives, {"pid", …, "moved_bytes", "seconds"})` while the load runs; (None, {}) and a note where it cannot."""
    load = subprocess.Popen(
        [sys.executable, "-u", "-c", questions.LOAD, what],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
    )
    try:
        ready, _, _ = select.select([load.stdout], [], [], LOAD_READY_LIMIT_S)
        line = load.stdout.readline().decode("utf-8", "replace").split(None, 3) if ready else []
        if len(line) < 4 or line[0] != "ready":
            load.kill()
            said = load.communicate()[1].decode("utf-8", "replace").strip().splitlines()
            notes.append(f"no load {what!r}: {said[-1] if said else 'it was not ready in time'}")
            return None, {}
        time.sleep(SETTLE_S)
        found = during()
        facts = {"pid": int(line[1]), "in_our_proc": Path(f"/proc/{load.pid}").exists(), "torch": line[2]}
        facts["device_name"] = line[3].strip()
        load.terminate()
        moved = load.communicate(timeout=30)[0].decode("utf-8", "replace").split()
        if len(moved) == 3 and moved[0] == "moved":
            facts.update(moved_bytes=int(moved[1]), seconds=round(float(moved[2]), 3))
        return found, facts
    except Exception as error:  # a phase that fails must not lose the others
        notes.append(f"load {what!r}: {type(error).__name__}: {error}")
        return None, {}
    finally:
        load.kill()
        load.wait()


def pcie_counters(pynvml):
    """Both ways of the driver to tell PCIe traffic, twice with a known time between: which one is send and which receive."""
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)

    def counted():
        answers = {str(field): ask_field(pynvml, handle, field, 0) for field in questions.PCIE_COUNTERS}
        return {"monotonic": time.monotonic(), **answers}

    first = counted()
    time.sleep(COPY_S)
    rates = {str(way): [ask(pynvml, "nvmlDeviceGetPcieThroughput", handle, way) for _ in range(3)] for way in (0, 1)}
    return {"counters": [first, counted()], "nvmlDeviceGetPcieThroughput": rates}


def record_system(hide):
    """What the kernel tells of the driver: its log where it may be read, /proc/driver/nvidia and the cards' PCI folders."""
    found = {"kernel": os.uname().release, "dev": sorted(path.name for path in Path("/dev").glob("nvidia*"))}
    about_us = re.compile(r"NVRM|Xid|nvidia|nvlink|nvswitch", re.IGNORECASE)
    try:
        log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
        lines = []
        try:
            while True:
                try:
                    lines.append(os.read(log, 8192).decode("utf-8", "replace"))
                except BrokenPipeError:
                    continue  # older lines were overwritten meanwhile
        except BlockingIOError:
            pass  # the end of what there is
        finally:
            os.close(log)
        found["kmsg"] = {
            "lines": [hide.kernel_line(line) for line in lines if about_us.search(line)][-60:],
            "read": len(lines),
        }
    except OSError as error:
        found["kmsg"] = {"error": f"{type(error).__name__}: {error}"}
    files = [Path("/proc/driver/nvidia/version"), *Path("/proc/driver/nvidia/gpus").glob("*/information")]
    for folder in Path("/sys/bus/pci/drivers/nvidia").glob("0*"):
        files += [
            folder / name for name in ("current_link_speed", "current_link_width", "max_link_speed", "max_link_width")
        ]
    for path in files:
        try:
            found[str(path)] = path.read_text("utf-8", "replace").strip()
        except OSError as error:
            found[str(path)] = f"{type(error).__name__}: {error}"
    return found


def written(value, indent=0):
    """JSON with a line for each answer: small enough to keep, and readable."""
    if not isinstance(value, (dict, list)) or not value or len(json.dumps(value)) < 110 - indent:
        return json.dumps(value)
    pad = " " * (indent + 1)
    if isinstance(value, list):
        rows, ends = [written(item, indent + 1) for item in value], "[]"
    else:
        rows, ends = [f"{json.dumps(str(key))}: {written(item, indent + 1)}" for key, item in value.items()], "{}"
    return ends[0] + "\n" + ",\n".join(pad + row for row in rows) + "\n" + " " * indent + ends[1]


def main():
    parser = argparse.ArgumentParser(
        prog="record.py", description="Records a GPU machine's answers for replay in tests."
    )
    parser.add_argument("--out", required=True, type=Path, help="the JSON file to write")
    options = parser.parse_args()
    notes, hide, pynvml = [], Disguise(), None
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:  # a recording of nvidia-smi alone is still of use
        notes.append(f"no NVML: {type(error).__name__}: {error}")
        pynvml = None
    versions = {"python": sys.version.split()[0], "pynvml": None}
    for name in ("nvidia-ml-py", "pynvml", "nvidia-ml-py3"):
        try:
            versions["pynvml"] = f"{name} {importlib.metadata.version(name)}"
            break
        except importlib.metadata.PackageNotFoundError:
            continue
    recording = {"recorded": time.strftime("%Y-%m-%d", time.gmtime()), "versions": versions, "phases": {}}
    recording["phases"]["idle"] = record_phase(pynvml, notes, 3)
    recording["phases"]["busy"], recording["load"] = under_load(
        "matmul", notes, lambda: record_phase(pynvml, notes, 31)
    )
    recording["copies"] = {}
    for what in ("to_card", "from_card") if pynvml else ():
        counters, facts = under_load(what, notes, lambda: pcie_counters(pynvml))
        recording["copies"][what] = {"load": facts, "nvml": counters}
    recording["system"] = record_system(hide)
    recording["notes"] = notes
    text = written(hide.value(recording)) + "\n"
    options.out.write_text(text, encoding="utf-8")
    answered = recording["phases"]["idle"]["smi"]["gpus"]
    print(
        f"wrote {options.out}: {len(text)} bytes; nvidia-smi exit {answered['exit']}, nvml {bool(pynvml)}; notes: {notes}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
