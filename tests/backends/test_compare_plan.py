"""What `plan` says of a comparison: facts of both sides, or in one line why it cannot be; and which folders it may write to."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from vllm_environments import environment, python_of

from backends.compare.folder import Folder
from backends.errors import JobError
from backends.hub import wanted_by
from backends.hubname import uses_hub
from backends.plan import plan
from backends.plan.compare import plan_compare
from backends.spec import CompareSpec, SpecError


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    environment(root, "0.20.1")
    environment(root, "0.26.0")
    return root


@pytest.fixture
def fields(
    models: dict[str, Path], dataset: Path, tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    monkeypatch.setenv("XDG_DATA_HOME", str(data))
    # The disk of the tests is others' too, who fill and free it meanwhile.
    monkeypatch.setattr("backends.plan.extract.free_bytes", lambda folder: 10**9)
    out = str(tmp_path / "out")
    return {"model": str(models["qwen3"]), "dataset": str(dataset), "output": out, "min_free_bytes": 0, "samples": 20}


def planned(fields: dict[str, Any], **more: Any) -> dict[str, Any]:
    answer = plan(CompareSpec.from_json({**fields, **more}))
    assert json.loads(json.dumps(answer)) == answer
    return answer


def refused(fields: dict[str, Any], **more: Any) -> str:
    answer = planned(fields, **more)
    assert answer["ok"] is False
    assert "\n" not in answer["error"] + answer["remedy"]
    return f"{answer['error']}: {answer['remedy']}"


def test_a_plan_has_the_facts_of_both_sides_and_the_bytes_of_both(fields: dict[str, Any]) -> None:
    answer = planned(fields)
    assert answer["ok"] is True
    assert (answer["samples"], answer["whole_dataset_samples"], answer["together"]) == (20, 24, False)
    assert answer["bytes_total"] == 2 * answer["tokens"] * answer["bytes_per_token"]
    assert answer["whole_dataset_tokens"] > answer["tokens"]
    assert set(answer["sides"]) == {"hf", "vllm"}
    assert answer["sides"]["vllm"]["packing"] != answer["sides"]["hf"]["packing"]
    assert answer["vllm"]["version"] == "0.26.0"
    assert answer["vllm"]["command"]
    assert not Path(fields["output"]).exists()


def test_a_wrong_field_is_named_as_the_comparisons_own(fields: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=r"^compare: pack_tokens must be a whole number of at least 1, not 0$"):
        CompareSpec.from_json({**fields, "pack_tokens": 0})


def test_a_dataset_with_fewer_samples_is_compared_as_a_whole_and_said_so(fields: dict[str, Any]) -> None:
    answer = planned(fields, samples=256)
    assert answer["samples"] == 24
    assert "the dataset has 24 samples, fewer than 256: all of them are compared" in answer["warnings"]
    assert "from row 20 on the dataset has 4 samples" in " ".join(planned(fields, first=20)["warnings"])
    assert "first is 24, but the dataset has 24 samples" in refused(fields, first=24)


def test_where_vllm_cannot_the_reason_is_said_and_that_hf_can(
    fields: dict[str, Any], models: dict[str, Path], data: Path
) -> None:
    told = refused(fields, model=str(models["qwen3_next"]), vllm_python=python_of(data, "0.20.1"))
    assert told.startswith("vLLM cannot be compared: vLLM 0.20.1")
    assert "the hf backend can extract it" in told


@pytest.mark.parametrize(
    ("gpus", "more", "told"),
    [
        ((), {"device": "cuda"}, "together needs GPUs for each side, and none were chosen"),
        (("GPU-a",), {}, "together gives each side half of the GPUs, and 1 cannot be halved"),
        (("GPU-a", "GPU-b", "GPU-c"), {}, "and 3 cannot be halved"),
        (("GPU-a", "GPU-b"), {"tensor_parallel": 2}, "together leaves 1 GPUs to vLLM, which are no whole groups of"),
    ],
)
def test_gpus_that_cannot_be_halved_are_refused(
    fields: dict[str, Any], gpus: tuple[str, ...], more: dict[str, Any], told: str
) -> None:
    assert told in refused(fields, together=True, gpus=list(gpus), **more)


def test_together_on_a_cpu_is_done_with_a_warning_that_they_share_it(fields: dict[str, Any]) -> None:
    answer = planned(fields, together=True)
    assert answer["ok"] is True
    assert any("at a time on the same CPU" in line for line in answer["warnings"])


def test_a_disk_without_room_for_both_is_refused_with_what_would_fit(fields: dict[str, Any]) -> None:
    answer = planned(fields)
    # Room for one side and a half.
    floor = answer["disk_free_bytes"] - answer["bytes_total"] * 3 // 4
    told = refused(fields, min_free_bytes=floor)
    assert f"both sides together write {answer['bytes_total']:,} bytes" in told
    assert "compare fewer samples (" in told


def test_only_a_new_an_empty_and_an_earlier_comparisons_folder_is_written_to(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    assert planned(fields)["ok"] is True
    (out / "notes.txt").write_text("mine")
    assert f"the output {out} exists and holds no comparison: give a new folder" in refused(fields)
    (out / "compare.json").write_text('{"compare": 1, "finished": true}')
    assert any("taken away" in line for line in planned(fields)["warnings"])
    (out / "compare.json").write_text('{"compare": 2}')
    assert "is of version 2" in refused(fields)
    (out / "compare.json").write_text("[1")
    assert "is no report of a comparison" in refused(fields)
    assert "is a file" in refused(fields, output=str(out / "notes.txt"))


def test_an_earlier_comparison_is_taken_away_whole_and_nothing_else_is(fields: dict[str, Any], tmp_path: Path) -> None:
    spec = CompareSpec.from_json(fields)
    first = Folder(spec)
    with pytest.raises(JobError, match="another comparison writes to"):
        Folder(spec)
    for name in ("hf", "vllm", "mine"):
        (first.output / name).mkdir()
        (first.output / name / "hs_0.safetensors").write_bytes(bytes(1000))
    for name in ("parity.json", "hf.spec.json", "vllm.events.jsonl", "notes.txt"):
        (first.output / name).write_text("{}")
    first.close()
    Folder(spec).close()
    assert {path.name for path in first.output.iterdir()} == {"compare.json", ".compare.lock", "mine", "notes.txt"}


def test_a_comparison_that_failed_at_its_first_write_does_not_lock_its_folder_out(
    fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = CompareSpec.from_json(fields)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as changed:
        changed.setattr("backends.compare.folder.write_json", full)
        with pytest.raises(JobError, match="No space left on device"):
            Folder(spec)
    assert planned(fields)["ok"] is True
    folder = Folder(spec)
    # As one that has begun a moment ago and has written nothing yet.
    (folder.output / "compare.json").unlink()
    with pytest.raises(JobError, match="another comparison writes to"):
        Folder(spec)
    folder.close()


def test_what_an_earlier_comparison_kept_counts_as_room(fields: dict[str, Any]) -> None:
    answer = planned(fields)
    floor = answer["disk_free_bytes"] - answer["bytes_total"] * 3 // 4
    folder = Folder(CompareSpec.from_json(fields))
    (folder.output / "hf").mkdir()
    (folder.output / "hf" / "hs_0.safetensors").write_bytes(bytes(answer["bytes_total"]))
    folder.close()
    found = plan_compare(CompareSpec.from_json({**fields, "min_free_bytes": floor - answer["bytes_total"]}))
    assert found.problem is None
    assert found.specs["hf"].output == os.path.join(fields["output"], "hf")  # noqa: PTH118 - as the spec has it
    assert found.specs["vllm"].worker_restarts == 1


def test_a_comparison_may_name_its_model_on_the_hub(fields: dict[str, Any]) -> None:
    spec = CompareSpec.from_json({**fields, "model": "org/name@main"})
    assert uses_hub(spec)
    wanted = wanted_by(spec)
    assert wanted is not None
    assert (wanted[0].name, wanted[0].revision) == ("org/name", "main")
    assert not uses_hub(CompareSpec.from_json(fields))


def test_a_key_among_the_servers_arguments_is_not_in_the_report(fields: dict[str, Any]) -> None:
    folder = Folder(CompareSpec.from_json({**fields, "extra_args": ["--hf-token", "SECRET", "--seed", "3"]}))
    written = folder.path("compare.json").read_text()
    folder.close()
    assert "SECRET" not in written
    assert json.loads(written)["spec"]["extra_args"] == ["--hf-token", "***", "--seed", "3"]
