"""Which cards a server is given: UUIDs where its vLLM takes them, else their places among all cards of the machine."""

from __future__ import annotations

import os

import pytest

from backends.errors import JobError
from backends.vllm import devices


@pytest.fixture(autouse=True)
def three_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver with three cards, which shows those of CUDA_VISIBLE_DEVICES alone."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-c,GPU-b")
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)

    def shown() -> dict[str, tuple[int, int]]:
        assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
        chosen = os.environ.get("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c").split(",")
        return dict.fromkeys(chosen, (9, 0))

    monkeypatch.setattr(devices, "cards_by_uuid", shown)


def test_a_vllm_that_takes_uuids_gets_them_and_nothing_is_asked() -> None:
    for version in ("0.26.0", "0.32.0+cpu", "1.0"):
        assert devices.visible(["GPU-c", "GPU-b"], version) == "GPU-c,GPU-b"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-c,GPU-b"


def test_an_older_one_gets_their_places_among_all_cards_in_the_order_chosen() -> None:
    for version in ("0.20.1", "0.25.3", "unreadable"):
        assert devices.visible(["GPU-c", "GPU-b"], version) == "2,1"


def test_a_card_that_the_driver_does_not_show_is_named() -> None:
    with pytest.raises(JobError, match="the driver shows no GPU GPU-x"):
        devices.visible(["GPU-a", "GPU-x"], "0.20.1")
