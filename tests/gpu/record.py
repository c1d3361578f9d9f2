"""Records what a real GPU machine answers, so that tests can replay it where there is no GPU.

    python3 tests/gpu/record.py OUT.json

Needs `pynvml`, `nvidia-smi` and, for the busy half, `torch` with CUDA. Takes under 60 seconds and changes no setting.
The file holds the raw answer of every NVML call that `dflash_tui/node/nvml.py` makes and stdout, stderr and exit status
of every `nvidia-smi` command of `dflash_tui/node/smi.py`, idle and while a matmul runs. Serial numbers, UUIDs and bus ids
are replaced by fixed false ones; process ids are kept.

Shape: `{"recorded", "versions": {…}, "phases": {"idle": PHASE, "busy": PHASE or null}, "load": {…}, "notes": […]}` and
PHASE = `{"nvml": {"calls": {CALL: ANSWER}, "devices": [{CALL: ANSWER}], "seconds"}, "smi": {NAME: {"arguments", "exit",
"stdout", "stderr", "seconds"}}}`. CALL is the function with its arguments after the handle, `nvmlDeviceGetClockInfo(1)`;
ANSWER is `{"value": …}` or `{"error": CODE, "message": LINE}`.
"""

import importlib.metadata
import json
import re
import select
import subprocess
import sys
import time
from pathlib import Path

SMI_TIME_LIMIT_S = 10.0
LOAD_READY_LIMIT_S = 25.0
SMI_COMMANDS = {
    "gpus": [
        "--query-gpu=index,uuid,name,utilization.gpu,memory.used,memory.total,power.draw,power.limit,"
        "temperature.gpu,clocks.sm,clocks.mem",
        "--format=csv,noheader,nounits",
    ],
    "processes": ["--query-compute-apps=gpu_uuid,pid,process_name,used_memory", "--format=csv,noheader,nounits"],
    "unknown_gpu": ["--id=99", "--query-gpu=index,uuid", "--format=csv,noheader,nounits"],
    "list": ["-L"],
    "full": ["-q", "-x"],
}
# Function, then its arguments after the handle.
DEVICE_CALLS = [
    ("nvmlDeviceGetUUID",),
    ("nvmlDeviceGetName",),
    ("nvmlDeviceGetPciInfo_v3",),
    ("nvmlDeviceGetUtilizationRates",),
    ("nvmlDeviceGetMemoryInfo",),
    ("nvmlDeviceGetMemoryInfo", "nvmlMemory_v2"),
    ("nvmlDeviceGetPowerUsage",),
    ("nvmlDeviceGetEnforcedPowerLimit",),
    ("nvmlDeviceGetPowerManagementLimit",),
    ("nvmlDeviceGetTemperature", "NVML_TEMPERATURE_GPU"),
    ("nvmlDeviceGetTemperatureV", "NVML_TEMPERATURE_GPU"),
    ("nvmlDeviceGetClockInfo", "NVML_CLOCK_SM"),
    ("nvmlDeviceGetClockInfo", "NVML_CLOCK_MEM"),
    ("nvmlDeviceGetMigMode",),
    ("nvmlDeviceGetMaxMigDeviceCount",),
    ("nvmlDeviceGetComputeRunningProcesses_v3",),
    ("nvmlDeviceGetComputeRunningProcesses_v2",),
    ("nvmlDeviceGetComputeRunningProcesses",),
    ("nvmlDeviceGetGraphicsRunningProcesses_v3",),
    ("nvmlDeviceGetGraphicsRunningProcesses_v2",),
    ("nvmlDeviceGetGraphicsRunningProcesses",),
]
LOAD = """
import os, sys, time, torch
a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
b = a @ a
torch.cuda.synchronize()
print("ready", os.getpid(), torch.__version__, torch.cuda.get_device_name(), flush=True)
end = time.monotonic() + 40
while time.monotonic() < end:
    for _ in range(50):
        b = a @ a
    torch.cuda.synchronize()
"""

SECRET_TAGS = re.compile(
    r"<([a-z0-9_]*(?:serial|guid|board_id|pdi|cluster_uuid|clique_id|slot_number|tray_index|host_id|module_id|peer_type)"
    r"[a-z0-9_]*)>([^<]*)</\1>"
)
UUID = re.compile(r"\b((?:GPU-|MIG-)?)([0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12})\b", re.IGNORECASE)
BUS_ID = re.compile(r"\b(?:[0-9A-F]{8}|[0-9A-F]{4}):([0-9A-F]{2}:[0-9A-F]{2}\.[0-9A-F])\b", re.IGNORECASE)
PCI_TAGS = re.compile(r"<(pci_domain|pci_bus|pci_device)>[^<]*</\1>")


class Disguise:
    """Replaces what identifies a card, the same thing by the same thing throughout."""

    def __init__(self):
        self.uuids = {}
        self.buses = {}

    def text(self, text):
        text = SECRET_TAGS.sub(self._tag, text)
        text = PCI_TAGS.sub(lambda m: f"<{m.group(1)}>00</{m.group(1)}>", text)
        text = UUID.sub(self._uuid, text)
        text = BUS_ID.sub(self._bus, text)
        return text.replace(sys.executable, "/usr/bin/python3")

    def value(self, value):
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.value(item) for item in value]
        if isinstance(value, dict):
            hidden = ("bus", "device", "domain") if "busId" in value else ()
            return {key: 0 if key in hidden else self.value(item) for key, item in value.items()}
        return value

    def _tag(self, match):
        kept = match.group(2).strip() in ("N/A", "")
        return match.group(0) if kept else f"<{match.group(1)}>0</{match.group(1)}>"

    def _uuid(self, match):
        number = self.uuids.setdefault(match.group(2).lower(), len(self.uuids))
        return f"{match[1]}00000000-0000-4000-8000-{number:012d}"

    def _bus(self, match):
        number = self.buses.setdefault(match.group(1).lower(), len(self.buses))
        return f"00000000:{0x10 + number:02X}:00.0"


def plain(pynvml, value):
    """An answer as JSON has it: structures as objects, bytes as text."""
    if isinstance(value, (list, tuple)):
        return [plain(pynvml, item) for item in value]
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if hasattr(value, "_fields_"):
        return {field[0]: plain(pynvml, getattr(value, field[0])) for field in value._fields_}
    if hasattr(value, "__dict__"):
        return {key: plain(pynvml, item) for key, item in vars(value).items()}
    return value


def ask(pynvml, name, *arguments):
    """One NVML call: its answer, or its error by number and text."""
    try:
        return {"value": plain(pynvml, getattr(pynvml, name)(*arguments))}
    except pynvml.NVMLError as error:
        return {"error": error.value, "message": str(error)}
    except Exception as error:  # pynvml's own mismatch error is no NVMLError, and old ones lack functions
        return {"error": None, "message": f"{type(error).__name__}: {error}"}


def pynvml_version():
    try:
        return importlib.metadata.version("nvidia-ml-py")
    except importlib.metadata.PackageNotFoundError:
        return None


def record_nvml(pynvml, notes):
    started = time.monotonic()
    calls = {
        "nvmlSystemGetDriverVersion()": ask(pynvml, "nvmlSystemGetDriverVersion"),
        "nvmlSystemGetNVMLVersion()": ask(pynvml, "nvmlSystemGetNVMLVersion"),
        "nvmlDeviceGetCount()": ask(pynvml, "nvmlDeviceGetCount"),
        "nvmlDeviceGetHandleByIndex(99)": ask(pynvml, "nvmlDeviceGetHandleByIndex", 99),
    }
    devices = []
    for index in range(calls["nvmlDeviceGetCount()"].get("value", 0)):
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        except pynvml.NVMLError as error:
            devices.append({"nvmlDeviceGetHandleByIndex": {"error": error.value, "message": str(error)}})
            continue
        answers = {}
        for name, *arguments in DEVICE_CALLS:
            try:
                values = [getattr(pynvml, argument) for argument in arguments]
            except AttributeError as error:
                notes.append(str(error))
                continue
            answers[f"{name}({', '.join(map(str, values))})"] = ask(pynvml, name, handle, *values)
        devices.append(answers)
    return {"calls": calls, "devices": devices, "seconds": round(time.monotonic() - started, 4)}


def record_smi():
    answers = {}
    for name, arguments in SMI_COMMANDS.items():
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
        answers[name] = dict(answer, arguments=arguments, seconds=round(time.monotonic() - started, 4))
    return answers


def record_phase(pynvml, notes):
    return {"nvml": record_nvml(pynvml, notes) if pynvml else None, "smi": record_smi()}


def record_busy(pynvml, notes):
    """The same while a matmul runs; (None, {}) and a note where it cannot run."""
    load = subprocess.Popen(
        [sys.executable, "-u", "-c", LOAD], stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL
    )
    try:
        ready, _, _ = select.select([load.stdout], [], [], LOAD_READY_LIMIT_S)
        line = load.stdout.readline().decode("utf-8", "replace").split(None, 3) if ready else []
        if len(line) < 4 or line[0] != "ready":
            load.kill()
            said = load.communicate()[1].decode("utf-8", "replace").strip().splitlines()
            notes.append(f"no busy phase: {said[-1] if said else 'the load was not ready in time'}")
            return None, {}
        time.sleep(3)  # utilisation is an average over the driver's last sample period
        phase = record_phase(pynvml, notes)
        seen = Path(f"/proc/{load.pid}").exists()
        return phase, {"pid": load.pid, "in_our_proc": seen, "torch": line[2], "device": line[3].strip()}
    finally:
        load.kill()
        load.wait()


def main():
    if len(sys.argv) != 2:
        print("usage: python3 record.py OUT.json", file=sys.stderr)
        return 2
    notes = []
    pynvml = None
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:  # a recording of nvidia-smi alone is still of use
        notes.append(f"no NVML: {type(error).__name__}: {error}")
        pynvml = None
    recording = {
        "recorded": time.strftime("%Y-%m-%d", time.gmtime()),
        "versions": {"python": sys.version.split()[0], "pynvml": pynvml_version()},
        "phases": {"idle": record_phase(pynvml, notes)},
    }
    recording["phases"]["busy"], recording["load"] = record_busy(pynvml, notes)
    recording["notes"] = notes
    with Path(sys.argv[1]).open("w", encoding="utf-8") as file:
        json.dump(Disguise().value(recording), file, indent=1)
        file.write("\n")
    smi = recording["phases"]["idle"]["smi"]["gpus"]
    print(f"wrote {sys.argv[1]}; nvidia-smi exit {smi['exit']}, nvml {bool(pynvml)}; notes: {notes}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
