"""What a job was started with, one key away on the Jobs screen."""

from __future__ import annotations

from dflash_tui.app.screens.command import CommandScreen
from dflash_tui.app.screens.jobs import JobsScreen
from dflash_tui.fleet.facts import JobsArrived
from dflash_tui.fleet.started import StartedServer, StartedWith, runner_text
from dflash_tui.link import RequestRefused

from .scripted import NOW, ScriptedLink, console, launch_file, live, running_job, shown, until, until_open, until_shown

JOB = running_job()
STARTED = StartedWith(
    argv=(
        "/opt/worker/bin/python",
        "-u",
        "/home/ops/.cache/dflash-tui/6f/backends/__main__.py",
        "extract",
        "/home/ops/jobs/a b/spec.json",
        "--events",
        "/home/ops/jobs/a b/events.jsonl",
    ),
    cwd="/home/ops",
    time=NOW - 70,
    environment={"CUDA_VISIBLE_DEVICES": "GPU-1", "HF_HOME": "/data/hf", "PATH": "/usr/bin", "WANDB_API_KEY": None},
    hidden=("WANDB_API_KEY",),
    added=("CUDA_VISIBLE_DEVICES", "HF_HOME", "WANDB_API_KEY"),
    secrets=("HF_TOKEN",),
    host="gpu-1.cluster",
    system="Linux 6.8.0 x86_64",
    driver="570.86",
    servers=(
        StartedServer(
            0,
            31_007,
            ("/opt/vllm/bin/python", "-m", "vllm.entrypoints.cli.main", "serve", "/models/qwen3-8b", "--port", "41233"),
            "/data/states/.vllm/0/empty",
            {"CUDA_VISIBLE_DEVICES": "GPU-1"},
        ),
    ),
    versions={"python": "3.12.3", "torch": "2.11.0", "transformers": "5.17.0", "vllm": "0.26.0"},
)


def node(**more: object) -> ScriptedLink:
    values = {"command_answer": STARTED, "files": {(JOB.id, "launch"): launch_file(JOB)}, **more}
    return ScriptedLink("gpu-1", [*live("gpu-1"), JobsArrived("gpu-1", (JOB,))], **values)


async def test_one_key_shows_the_command_its_servers_the_versions_and_the_environment_without_secrets() -> None:
    link = node()
    app = console(link)
    async with app.run_test(size=(120, 60)) as pilot:
        await pilot.press("2")
        await until_shown(pilot, JOB.id)
        await pilot.press("i")
        await until_shown(
            pilot,
            "/opt/worker/bin/python -u",
            "cd /home/ops && \\",
            "--events '/home/ops/jobs/a b/events.jsonl'",
            'WANDB_API_KEY="$WANDB_API_KEY"',
            "vLLM server 0, process 31007",
            "--port 41233",
            "vllm 0.26.0",
            "NVIDIA driver 570.86",
            "#   WANDB_API_KEY=***",
            "#   PATH=/usr/bin",
            "HF_TOKEN through a pipe",
        )
        assert link.questions("command") == [{"job": JOB.id}]
        await pilot.press("escape")
        await until_open(pilot, JobsScreen)


async def test_the_runners_command_is_copied_as_it_can_be_run() -> None:
    app = console(node())
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("2")
        await until_shown(pilot, JOB.id)
        await pilot.press("i")
        await until_shown(pilot, "/opt/worker/bin/python -u")
        await pilot.press("y")
        await until_shown(pilot, "was given to the terminal's clipboard")
        assert app.clipboard == runner_text(STARTED)


async def test_a_refusal_and_a_job_from_before_are_told() -> None:
    link = node(command_answer=RequestRefused("not-found", "this node has no job x", "list them"))
    app = console(link)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("2")
        await until_shown(pilot, JOB.id)
        await pilot.press("i")
        await until_shown(pilot, "this node has no job x: list them")
        await pilot.press("y")
        await until_shown(pilot, "there is no command to copy")
        await pilot.press("escape")
        link.command_answer = StartedWith()
        await pilot.press("i")
        await until(
            pilot, lambda: isinstance(app.screen, CommandScreen) and "not written down" in shown(app), "the word"
        )
