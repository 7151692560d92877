"""A program that reads until it is killed; says "ready" when it has something in its hands."""

import sys
import time

import paramd


def main() -> None:
    mesh = paramd.connect(job="main", timeout=20)
    what = sys.argv[1]
    if what == "view":
        with mesh.view("*"):
            print("ready", flush=True)
            time.sleep(60)
        return
    deltas = what == "deltas"
    frames = mesh.grads("*") if what == "grads" else mesh.follow("*", deltas=deltas)
    for _ in frames:
        print("ready", flush=True)


if __name__ == "__main__":
    main()
