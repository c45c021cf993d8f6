"""Be a Ray cluster on this machine: a head without a core for work, and as many nodes as are asked for on stdin.

``python ray_nodes.py PORT FOLDER`` prints the address of its control server. It then reads ``add`` and ``end``; each
line is answered with ``done``. Each node is a raylet of its own, as on a machine of its own.
"""

import sys
import threading
import time

from ray.cluster_utils import Cluster


def reap(cluster: Cluster) -> None:
    """Take notice of raylets that were killed: their workers end once they are gone, and not while they are zombies."""
    while True:
        for node in list(cluster.worker_nodes):
            node.dead_processes()
        time.sleep(0.2)


def main() -> None:
    port, folder = int(sys.argv[1]), sys.argv[2]
    head = {"num_cpus": 0, "include_dashboard": False, "ray_client_server_port": port, "temp_dir": folder}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    threading.Thread(target=reap, args=(cluster,), daemon=True).start()
    print(cluster.address, flush=True)
    for line in sys.stdin:
        if line.strip() == "end":
            break
        cluster.add_node(num_cpus=1)
        print("done", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
