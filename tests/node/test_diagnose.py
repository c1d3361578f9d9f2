"""Why a job failed: the right cause in every recording, whatever is cut off, mixed in or put around it."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_tui.node.diagnose import find
from dflash_tui.node.diagnose.find import Ended

LOGS = Path(__file__).resolve().parents[1] / "data" / "logs"
FAILED = {
    "v0.20.1-h200-no-eagle3-interface": ("vllm-no-eagle3-interface", 96, "gpu_model_runner.py", 4830),
    "v0.20.1-hybrid-kv-manager-off": ("vllm-hybrid-kv-manager-off", 117, "kv_cache_utils.py", 1407),
    "v0.20.1-hybrid-page-size": ("vllm-hybrid-page-size", 117, "kv_cache_utils.py", 1035),
    "v0.26.0-two-h200-worker-hangs": ("gpu-illegal-access", 153, "_ops.py", 865),
    "v0.32.0-cpu-killed": ("killed-by-sigkill", 282, None, None),
    "v0.32.0-cpu-pin-memory": ("no-pinned-memory", 202, "example_hidden_states_connector.py", 402),
    "v0.32.0-cpu-prefix-caching": ("vllm-hybrid-prefix-caching", 189, "mamba_utils.py", 1226),
}
GOOD = (
    "v0.20.1-h200-dense-ok",
    "v0.26.0-h200-dense-ok",
    "v0.26.0-h200-hybrid-ok-then-stopped",
    "v0.32.0-cpu-hybrid-ok",
)

Diagnose = Callable[..., dict[str, Any]]


def data_of(name: str) -> bytes:
    return (LOGS / f"{name}.log").read_bytes()


@pytest.fixture
def diagnose(tmp_path: Path) -> Diagnose:
    def run(data: bytes | str, ended: Ended | None = None, **limits: int) -> dict[str, Any]:
        path = tmp_path / "log"
        path.write_bytes(data.encode() if isinstance(data, str) else data)
        return find.diagnose(str(path), ended or Ended(), **limits)

    return run


def test_the_recordings_are_all_known_to_this_test() -> None:
    assert {path.stem for path in LOGS.glob("*.log")} == {*FAILED, *GOOD}


@pytest.mark.parametrize("name", FAILED)
def test_a_failing_recording_is_told_by_cause_line_source_and_remedy(name: str) -> None:
    id_, number, file, line = FAILED[name]
    found = find.diagnose(str(LOGS / f"{name}.log"))
    assert found["failed"] and found["remedy"]
    assert (found["cause"]["id"], found["cause"]["line"]) == (id_, number)
    whole = data_of(name).split(b"\n")[number - 1].decode()
    assert found["cause"]["quote"] == whole[: len(found["cause"]["quote"])] != ""
    if file is None:
        assert found["source"] is None
    else:
        assert (Path(found["source"]["file"]).name, found["source"]["line"]) == (file, line)


@pytest.mark.parametrize("name", GOOD)
def test_a_good_recording_and_one_that_was_stopped_show_no_failure(name: str) -> None:
    found = find.diagnose(str(LOGS / f"{name}.log"))
    assert (found["failed"], found["cause"], found["remedy"], found["source"]) == (False, None, None, None)


@pytest.mark.parametrize("name", GOOD)
def test_a_good_recording_cut_anywhere_shows_no_failure(name: str, diagnose: Diagnose) -> None:
    data = data_of(name)
    chance = random.Random(name)
    for _ in range(12):
        assert not diagnose(data[: chance.randrange(len(data))])["failed"]


@pytest.mark.parametrize("name", FAILED)
def test_a_failing_recording_cut_anywhere_after_its_cause_keeps_it_and_before_it_invents_none(
    name: str, diagnose: Diagnose
) -> None:
    id_, number, _, _ = FAILED[name]
    data = data_of(name)
    whole = len(b"\n".join(data.split(b"\n")[:number])) + 1
    first_error = data.index(b" ERROR ")
    first_error = data.rindex(b"\n", 0, first_error) + 1
    chance = random.Random(name)
    for _ in range(8):
        found = diagnose(data[: chance.randrange(whole, len(data) + 1)])
        assert (found["cause"]["id"], found["cause"]["line"]) == (id_, number)
        assert not diagnose(data[: chance.randrange(first_error)])["failed"]
    for _ in range(
        4 if whole - first_error > 600 else 0
    ):  # in the middle of what tells it: a failure, and no invented cause
        found = diagnose(data[: chance.randrange(first_error + 200, whole - 60)])
        assert found["failed"] and found["cause"]["id"] in (id_, "unknown")


@pytest.mark.parametrize("name", FAILED)
@pytest.mark.parametrize("other", ["v0.26.0-h200-dense-ok", "v0.32.0-cpu-hybrid-ok"])
def test_lines_of_another_server_between_those_of_a_failing_one_change_nothing(
    name: str, other: str, diagnose: Diagnose
) -> None:
    # Its shutdown is left out: whoever ends one server and not the other is another story.
    mine, theirs = data_of(name).split(b"\n"), data_of(other).split(b"\n")[:130]
    chance = random.Random(name + other)
    mixed: list[bytes] = []
    while mine or theirs:
        source = mine if not theirs or (mine and chance.random() < 0.7) else theirs
        mixed.append(source.pop(0))
    found = diagnose(b"\n".join(mixed))
    assert found["cause"]["id"] == FAILED[name][0]
    assert mixed[found["cause"]["line"] - 1] == data_of(name).split(b"\n")[FAILED[name][1] - 1]


@pytest.mark.parametrize("name", [*FAILED, *GOOD])
def test_colours_bars_and_broken_bytes_change_nothing(name: str, diagnose: Diagnose) -> None:
    plain = find.diagnose(str(LOGS / f"{name}.log"))
    bar = b"\x1b[32mloading\x1b[0m  10%|#   |\rloading  20%|##  |\r\x1b[K"
    dressed = b"\n".join(
        (bar if count % 7 == 0 else b"")
        + line.replace(b"ERROR", b"\x1b[31mERROR\x1b[0m").replace(b"(", b"\x1b[36m(", 1)
        if line.startswith(b"(")
        else line + b"\xff\xfe\r"
        for count, line in enumerate(data_of(name).split(b"\n"))
    )
    found = diagnose(dressed)
    assert (found["failed"], found["source"]) == (plain["failed"], plain["source"])
    if plain["failed"]:
        assert [found["cause"][key] for key in ("id", "line")] == [plain["cause"][key] for key in ("id", "line")]
        assert "\x1b" not in found["cause"]["quote"]


def test_the_root_of_a_chain_is_the_first_raised_and_not_the_last_printed(diagnose: Diagnose) -> None:
    log = """\
starting
Traceback (most recent call last):
  File "/srv/venv/lib/python3.12/site-packages/lib/inner.py", line 12, in load
    return table[key]
           ~~~~~^^^^^
  File "/usr/lib/python3.12/collections/__init__.py", line 999, in __getitem__
    raise KeyError(key)
KeyError: 'wanted'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/srv/venv/lib/python3.12/site-packages/lib/outer.py", line 40, in open
    load(key)
lib.errors.OpenError: cannot open it

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/srv/app.py", line 3, in <module>
    main()
RuntimeError: start failed
"""
    found = diagnose(log)
    assert found["cause"]["id"] == "unknown"
    assert (found["cause"]["text"], found["cause"]["line"]) == ("KeyError: 'wanted'", 8)
    # The frame of the library, not the standard library's below it.
    assert found["source"] == {"file": "/srv/venv/lib/python3.12/site-packages/lib/inner.py", "line": 12}


def test_a_traceback_of_another_process_and_an_exception_group_are_read_through(diagnose: Diagnose) -> None:
    remote = '''\
concurrent.futures.process._RemoteTraceback:
"""
Traceback (most recent call last):
  File "/srv/work.py", line 7, in item
    raise ValueError("row 3 is odd")
ValueError: row 3 is odd
"""

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/srv/app.py", line 3, in <module>
    main()
ValueError: row 3 is odd
'''
    found = diagnose(remote)
    assert (found["cause"]["line"], found["source"]["file"]) == (6, "/srv/work.py")
    group = """\
  + Exception Group Traceback (most recent call last):
  |   File "/srv/app.py", line 9, in <module>
  |     asyncio.run(main())
  | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "/srv/task.py", line 4, in work
    |     raise ValueError("row 5 is odd")
    | ValueError: row 5 is odd
    +------------------------------------
"""
    found = diagnose(group)
    assert (found["cause"]["text"], found["source"]) == (
        "ValueError: row 5 is odd",
        {"file": "/srv/task.py", "line": 4},
    )


def test_ranks_that_print_at_once_are_told_apart(diagnose: Diagnose) -> None:
    one = ["Traceback (most recent call last):", '  File "/srv/t.py", line 5, in f', "    go()", "ValueError: rank one"]
    two = ["Traceback (most recent call last):", '  File "/srv/u.py", line 6, in g', "    go()", "TypeError: rank zero"]
    lines = [
        f"[rank{rank}]: {text}" for pair in zip(one, two, strict=True) for rank, text in zip((1, 0), pair, strict=True)
    ]
    lines.insert(
        3,
        "[rank0]:[W1130 01:25:27.020090778 ProcessGroupNCCL.cpp:1575] Warning: destroy_process_group() was not called",
    )
    found = diagnose("\n".join(lines))
    assert (found["cause"]["text"], found["source"]) == ("ValueError: rank one", {"file": "/srv/t.py", "line": 5})


@pytest.mark.parametrize(
    "noise",
    [
        'Traceback (most recent call last):\n  File "/a.py", line 1, in f\n    time.sleep(9)\nKeyboardInterrupt\n',
        'Exception ignored in: <function Pool.__del__ at 0x7f>\nTraceback (most recent call last):\n  File "/a.py", line 1, in f\n'
        "    close()\nOSError: handle is closed\n",
        '--- Logging error ---\nTraceback (most recent call last):\n  File "/a.py", line 1, in f\n    write()\nValueError: closed file\n',
        "/usr/lib/python3.11/multiprocessing/resource_tracker.py:254: UserWarning: resource_tracker: There appear to be 1 leaked"
        " semaphore objects to clean up at shutdown\n",
        "[rank0]:[W1130 01:25:27.02 ProcessGroupNCCL.cpp:1575] Warning: WARNING: destroy_process_group() was not called\n",
        "(APIServer pid=7) INFO 11-30 02:29:57 [launcher.py:100] [shutdown] API server: shutdown triggered\n"
        '(EngineCore pid=8) Traceback (most recent call last):\n(EngineCore pid=8)   File "/a.py", line 1, in f\n'
        "(EngineCore pid=8)     send()\n(EngineCore pid=8) BrokenPipeError: [Errno 32] Broken pipe\n",
        '(W pid=8) WARNING 11-30 02:29:57 [a.py:1] Traceback (most recent call last):\n(W pid=8) WARNING 11-30 02:29:57 [a.py:1]   File "/a.py", '
        "line 1, in f\n(W pid=8) WARNING 11-30 02:29:57 [a.py:1] ValueError: tried another way\n",
        "WARNING 11-30 01:20:49 [system_utils.py:294] This can cause errors like `OSError: [Errno 24] Too many open files`\n",
    ],
)
def test_noise_is_never_blamed(noise: str, diagnose: Diagnose) -> None:
    assert not diagnose(noise)["failed"]
    failed = diagnose(data_of("v0.20.1-hybrid-page-size") + noise.encode())
    assert failed["cause"]["id"] == "vllm-hybrid-page-size"


def test_the_runners_last_line_is_the_cause_with_its_remedy(diagnose: Diagnose) -> None:
    log = """\
2026-11-30T01:00:00Z started verb=extract total=4
Traceback (most recent call last):
  File "/b/backends/store.py", line 9, in commit
    os.write(fd, data)
OSError: [Errno 5] Input/output error
backends: row 3 cannot be written: look at the disk
"""
    found = diagnose(log)
    assert found["cause"] == {
        "id": "job-error",
        "text": "row 3 cannot be written",
        "line": 6,
        "quote": "backends: row 3 cannot be written: look at the disk",
    }
    assert (found["remedy"], found["source"]["line"]) == ("look at the disk", 9)
    # Where the job's last event is at hand, it tells words and remedy apart.
    last = "a: b: c: d"
    told = diagnose(f"backends: {last}\n", Ended(True, "a: b", "c: d"))
    assert (told["cause"]["text"], told["remedy"]) == ("a: b", "c: d")


def test_where_the_runner_points_at_the_log_the_log_is_asked(diagnose: Diagnose) -> None:
    log = """\
Traceback (most recent call last):
  File "/b/backends/hf/extractor.py", line 9, in forward
    model(ids)
RuntimeError: shapes do not fit
backends: RuntimeError: shapes do not fit: the traceback is in the log
"""
    found = diagnose(log)
    assert (found["cause"]["line"], found["source"]["line"]) == (4, 9)
    server = (
        data_of("v0.20.1-hybrid-page-size")
        + b"backends: the vLLM server ended with status 1 before it was ready: see the log\n"
    )
    assert diagnose(server)["cause"]["id"] == "vllm-hybrid-page-size"
    alone = diagnose("backends: worker 0 was lost (exit status 1) after 2 restarts: see the log\n")
    assert alone["cause"]["text"].startswith("worker 0 was lost")


def test_a_worker_that_was_replaced_is_no_failure_of_a_job_that_finished(diagnose: Diagnose) -> None:
    crash = 'Traceback (most recent call last):\n  File "/a.py", line 1, in f\n    go()\nRuntimeError: once\n'
    assert diagnose(crash)["failed"]
    assert not diagnose(crash + "2026-11-30T01:00:00Z finished done=4 total=4\n")["failed"]
    assert not diagnose(crash + "backends: stopped on request with 3 of 4 samples done\n")["failed"]
    assert diagnose(crash + "2026-11-30T01:00:00Z progress done=0 total=4\n" + crash.replace("once", "twice"))["cause"][
        "text"
    ].endswith("once")
    later = crash + "2026-11-30T01:00:00Z progress done=1\n" + crash.replace("once", "twice")
    assert diagnose(later)["cause"]["text"] == "RuntimeError: twice"


def test_what_became_of_the_job_decides_where_its_log_says_nothing(diagnose: Diagnose) -> None:
    assert not diagnose(data_of("v0.32.0-cpu-killed"), Ended(False))["failed"]
    killed = diagnose("working\n", Ended(True, reason="killed by SIGKILL from outside", signal=9))
    assert (killed["cause"]["id"], killed["cause"]["line"]) == ("killed-by-sigkill", None)
    assert killed["cause"]["text"] == "killed by SIGKILL from outside" and killed["remedy"]
    event = diagnose("working\n", Ended(True, "the disk is full", "free some"))
    assert (event["cause"]["text"], event["cause"]["line"], event["remedy"]) == ("the disk is full", None, "free some")
    assert diagnose("", Ended(True, reason="supervisor gone"))["cause"]["text"] == "supervisor gone"
