"""A Ray cluster on this machine: a head that runs nothing, and two workers with one CPU each.

    python ray_cluster.py

It prints the addresses for RAY_ADDRESS and for `ray://` as JSON, and ends when its stdin is closed. RAY_TMPDIR is the folder
of all its files.
"""

import json
import os
import socket
import sys

from ray.cluster_utils import Cluster


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


if __name__ == "__main__":
    port, store = free_port(), {"object_store_memory": 80 << 20}
    # A lost worker is noticed in two seconds, not in twenty.
    os.environ |= {"RAY_health_check_period_ms": "500", "RAY_health_check_failure_threshold": "3"}
    # Whatever else runs on this machine: its memory ends no worker, and its user's token isn't asked for.
    os.environ |= {"RAY_memory_monitor_refresh_ms": "0", "RAY_AUTH_MODE": "disabled"}
    # Ray writes to stdout itself.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    head = {"num_cpus": 0, "num_gpus": 0, "include_dashboard": False, "ray_client_server_port": port, **store}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(2):
        cluster.add_node(num_cpus=1, num_gpus=0, resources={"worker": 1}, **store)
    print(json.dumps({"address": cluster.address, "client": f"ray://127.0.0.1:{port}"}), file=answers, flush=True)
    sys.stdin.read()
    cluster.shutdown()
