"""Runs a script on a Ray cluster of two raylets of this machine, one CPU each, on loopback.

    RAY_TMPDIR=FOLDER python under_ray.py SCRIPT [ARGUMENTS]

The folder's path is short, for the sockets in it.
"""

import os
import runpy
import sys

# Before ray is imported: no reports, loopback alone, and workers with the usual priority.
os.environ |= {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_worker_niceness": "0",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300",
}

import ray
from ray.cluster_utils import Cluster


def main() -> None:
    node = {"num_cpus": 1, "object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
    try:
        cluster.add_node(**node)
        ray.init(address=cluster.address)
        sys.argv = sys.argv[1:]
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
