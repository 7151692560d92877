"""Parameters that get new memory at each update, under FSDP1: copied back, without a search."""

from tests.launch import run_ranks


def test_original_parameters_of_fsdp1_are_copied_back_at_each_boundary() -> None:
    run_ranks("tests.multiprocess.workers.new_memory", 2, timeout_s=300.0)
