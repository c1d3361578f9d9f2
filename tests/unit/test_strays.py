"""What is said of the memory of processes that outlived their job's supervisor."""

from dflash_tui.fleet.facts import Stray
from dflash_tui.fleet.strays import held

GIB = 1 << 30


def test_memory_of_several_is_added_by_kind_and_what_is_not_known_is_left_out() -> None:
    engine = Stray(1, 1, "VLLM::EngineCore", 70 * GIB, 3 * GIB)
    tracker = Stray(2, 1, "tracker", None, GIB)
    assert held(engine) == "70.0 GiB of GPU memory, 3.0 GiB of memory"
    assert held(tracker) == "1.0 GiB of memory"
    assert held(engine, tracker) == "70.0 GiB of GPU memory, 4.0 GiB of memory"
    assert held(Stray(3, 1)) == held() == ""
