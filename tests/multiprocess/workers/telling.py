"""A rank that tells the others messages of all sizes, and checks what it hears."""

from paramd.trainer.attaching.exchange import SHORT_BYTES, Exchange
from tests.rank import run

SIZES = (0, 1, SHORT_BYTES - 20, SHORT_BYTES - 1, SHORT_BYTES, SHORT_BYTES + 1, 300_000)


def main() -> None:
    """Each size once on each rank, while the others' messages are short."""
    exchange = Exchange(timeout_s=60.0)
    everybody = range(exchange.world_size)
    for size in SIZES:
        for longest in everybody:
            lengths = [size if rank == longest else rank for rank in everybody]
            mine = "é" * lengths[exchange.rank]
            heard = exchange.gather({"text": mine})
            assert [one["text"] for one in heard] == ["é" * length for length in lengths]
            found = exchange.collect(mine.encode())
            wanted = [("é" * length).encode() for length in lengths]
            assert found == (wanted if exchange.rank == 0 else [])
    print("heard", flush=True)
    exchange.close()


if __name__ == "__main__":
    run(main)
