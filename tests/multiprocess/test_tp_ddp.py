"""TP+DDP on four real ranks, two replicas of a model over two ranks each."""

from tests.launch import run_ranks


def test_tp_ddp_trains_as_one_process_and_hides_nothing() -> None:
    results = run_ranks("tests.multiprocess.workers.tp_ddp", 4, timeout_s=100)
    assert all(result.stdout.count("ok ") == 13 for result in results)
