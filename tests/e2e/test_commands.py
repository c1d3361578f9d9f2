"""The commands on the local node: real agent, real supervisor, real model."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
from pathlib import Path

from dflash_tui.commands.demo import RESULT_KEYS
from dflash_tui.commands.outcome import Exit
from tests.e2e.conftest import Launcher, Shared
from tests.e2e.harness import LIMIT_S, JobFolder, Site, assert_nothing_half, assert_whole, manifest_rows, poll


def test_status_tells_who_and_what_the_node_is(site: Site) -> None:
    (node,) = site.run("status", "--json").json
    assert node["host"] == "local"
    assert node["link"] == "live"
    assert node["boot_id"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert node["agent_pid"] > 1
    assert node["default_python"] == sys.executable
    assert node["state_dir"] == str(site.home / ".local" / "state" / "dflash-tui")
    assert node["metrics"]["host"]["memory_total_bytes"] > 2**20
    assert isinstance(node["jobs"], list)
    shown = site.run("status").out
    assert "local  live" in shown
    assert "cores" in shown


def test_a_plan_says_what_it_would_take_and_starts_nothing(site: Site, shared: Shared, tmp_path: Path) -> None:
    (plan,) = site.run("plan", *shared.extract(tmp_path / "out"), "--json").json
    assert plan["ok"] is True
    assert (plan["num_layers"], plan["hidden_size"], plan["samples"]) == (8, 128, shared.samples)
    assert plan["layer_ids"][-1] == 8
    assert plan["bytes_per_token"] == len(plan["layer_ids"]) * 128 * 4 + 8
    shown = site.run("plan", *shared.extract(tmp_path / "out"))
    assert f"{shared.samples:,}" in shown.out
    assert not (tmp_path / "out").exists()


def test_a_job_that_is_waited_for_ends_with_its_exit_code_and_all_its_samples_verified(
    site: Site, state_dir: Path, shared: Shared, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    done = site.run("launch", *shared.extract(output, "--last", 40), "--wait", "--name", "forty")
    job = JobFolder(state_dir, done.out.strip())
    assert (job.state, job.processes()) == ("done", {})
    assert "40 of 40 samples" in done.err
    assert_whole(output, 40)

    verified = site.run("verify", output, "--recompute", 2, "--json").json
    assert verified["state"] == "done"
    assert verified["result"]["verified"] == 40
    assert verified["result"]["recomputed_worst_error"] <= 1e-5

    exported = site.run("export", output, "--to", tmp_path / "specforge", "--json").json
    assert (exported["state"], exported["result"]["exported"]) == ("done", 40)
    assert len(list((tmp_path / "specforge").rglob("data_*.ckpt"))) == 40

    (listed,) = site.run("jobs", "--json").json
    (record,) = [one for one in listed["jobs"] if one["id"] == job.id]
    assert (record["name"], record["state"], record["progress"]["done"]) == ("forty", "done", 40)
    assert job.id in site.run("jobs").out

    whole = (job.path / "log").read_bytes()
    raw = subprocess.run(
        site.command("logs", job.id), env=site.env, cwd=site.home, capture_output=True, check=True
    ).stdout
    assert hashlib.sha256(raw).hexdigest() == hashlib.sha256(whole).hexdigest()
    assert site.run("logs", job.id, "-n", 1).out == whole.decode().splitlines(keepends=True)[-1]
    events = [json.loads(line) for line in site.run("logs", job.id, "--events", "-f").out.splitlines()]
    assert "started" in {event["event"] for event in events} and events[-1]["event"] == "finished"
    assert site.run("logs", job.id, "--json").json["text"] == whole.decode()

    # Damage shows: a byte more, a file less.
    (output / "hs_7.safetensors").unlink()
    with (output / "hs_9.safetensors").open("ab") as file:
        file.write(b"\0")
    bad = site.run("verify", output, "--json", code=None)
    assert bad.code in (Exit.FAILED, Exit.BAD_INPUT)
    assert "hs_7.safetensors" in bad.json["error"] and "1 more" in bad.json["error"]


def test_ctrl_c_while_waiting_leaves_the_job_running_and_a_stop_leaves_no_process_and_no_half_file(
    site: Site, state_dir: Path, shared: Shared, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    # Long enough that a fast machine does not get to its end before the stop.
    rows = shared.long_samples // 8
    job_of = shared.extract_long(output, "--last", rows)
    waiting = site.start("launch", *job_of, "--wait", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    poll("the first samples", lambda: len(manifest_rows(output)) >= 5)
    waiting.send_signal(signal.SIGINT)
    out, err = waiting.communicate(timeout=LIMIT_S)
    assert (waiting.returncode, out) == (Exit.CTRL_C, b"")
    last = err.decode().splitlines()[-1]
    assert "goes on" in last
    assert "Traceback" not in err.decode()

    (listed,) = site.run("jobs", "--running", "--json").json
    (record,) = [one for one in listed["jobs"] if one["id"] in last]
    job = JobFolder(state_dir, record["id"])
    job.wait_done(10)
    assert job.processes()
    stopped = site.run("stop", job.id[:-1], "--wait", "--json").json
    assert (stopped["state"], job.state) == ("interrupted", "interrupted")
    assert job.processes() == {}
    assert_nothing_half(output)
    kept = manifest_rows(output)
    assert 10 <= len(kept) < rows

    again = site.run("stop", job.id, "--json").json
    assert again["already_ended"] is True

    # The same once more takes only what is missing.
    resumed = site.run("restart", job.id, "--wait", "--json").json
    assert resumed["state"] == "done"
    assert_whole(output, rows)
    assert manifest_rows(output)[: len(kept)] == kept


def test_a_forced_stop_loses_nothing_that_was_listed(
    launch: Launcher, site: Site, shared: Shared, tmp_path: Path
) -> None:
    job = launch(*shared.extract_long(tmp_path / "out"))
    job.wait_done(5)
    stopped = site.run("stop", job.id, "--force", "--wait", "--json").json
    assert stopped["state"] in ("killed", "interrupted")
    assert job.processes() == {}
    kept = manifest_rows(job.output)
    assert len(kept) >= 5
    assert all((job.output / f"hs_{row}.safetensors").is_file() for row in kept)


def test_the_end_of_the_wait_is_the_end_of_the_job(
    launch: Launcher, site: Site, shared: Shared, tmp_path: Path
) -> None:
    job = launch(*shared.extract_long(tmp_path / "out"))
    waiting = site.start("restart", job.id, "--wait", stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    _, err = waiting.communicate(timeout=240)
    assert waiting.returncode == Exit.BAD_INPUT, "a job that runs cannot be started again"
    assert job.id in err.decode()
    follower = site.start("logs", job.id, "-f", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    job.wait_done(1)
    site.run("stop", job.id, "--wait", "--yes")
    out, err = follower.communicate(timeout=240)
    assert (follower.returncode, err) == (Exit.OK, b"")
    assert out == (job.path / "log").read_bytes()


def test_what_a_log_gave_back_to_the_disk_is_told_and_never_printed_as_bytes(
    site: Site, state_dir: Path, shared: Shared, tmp_path: Path
) -> None:
    done = site.run("launch", *shared.extract(tmp_path / "out", "--last", 1), "--wait")
    log = JobFolder(state_dir, done.out.strip()).path / "log"
    head, hole = log.read_bytes().ljust(1 << 16, b"."), 1 << 18
    log.write_bytes(head + b"x" * hole + b"the end\n")
    punch = ["fallocate", "--punch-hole", "--offset", str(len(head)), "--length", str(hole), str(log)]
    subprocess.run(punch, check=True)
    for more in ((), ("-f",)):
        printed = subprocess.run(
            site.command("logs", done.out.strip(), *more), env=site.env, cwd=site.home, capture_output=True, check=True
        )
        assert printed.stdout == head + b"the end\n"
        assert f"{hole:,} bytes of the log were given back to the disk" in printed.stderr.decode()


def test_ids_may_be_shortened_while_they_are_clear(site: Site) -> None:
    (listed,) = site.run("jobs", "--json").json
    ids = [one["id"] for one in listed["jobs"]]
    assert len(ids) > 1
    unclear = site.run("logs", "20", code=Exit.BAD_INPUT)
    assert "'20'" in unclear.line
    none = site.run("logs", "none-such", code=Exit.NOT_FOUND)
    assert "none-such" in none.line
    assert site.run("stop", "none-such", "--json", code=Exit.NOT_FOUND).json["exit_code"] == Exit.NOT_FOUND


def test_the_demo_ends_with_one_line_of_json(site: Site, tmp_path: Path) -> None:
    done = site.run("demo", "--output", tmp_path / "demo", "--samples", 30, "--recompute", 2)
    result = json.loads(done.out.splitlines()[-1])
    assert tuple(result) == RESULT_KEYS
    assert result["verified"] == result["samples"] >= 30
    assert result["recomputed_worst_error"] <= 1e-5
    assert Path(result["manifest"]).is_file()
    assert Path(result["model"], "config.json").is_file()
    assert any("of 30 samples" in line or "samples" in line for line in done.out.splitlines()[:-1])
