"""The same work by shmstore and by what people use today: one module for each peer, behind `interface.Peer`.

``python -m bench.peers`` measures all of them in one session, interleaved, and writes the page and its plots.
"""

PEERS: dict[str, str] = {
    "memcpy": "bench.peers.limits:Memcpy",
    "channel": "bench.peers.limits:Channel",
    "shmstore": "bench.peers.shm_store:ShmStore",
    "pipe": "bench.peers.pipe:PicklePipe",
    "queue": "bench.peers.queue:PickleQueue",
    "shared_memory": "bench.peers.shared_memory:BlockPerObject",
    "shared_memory_reused": "bench.peers.shared_memory:OneBlock",
    "torch_file_descriptor": "bench.peers.torch_mp:FileDescriptor",
    "torch_file_system": "bench.peers.torch_mp:FileSystem",
    "zmq_copy": "bench.peers.zmq_ipc:Copying",
    "zmq_nocopy": "bench.peers.zmq_ipc:NoCopy",
    "ray": "bench.peers.ray_objects:RayObjects",
    "iceoryx2": "bench.peers.iceoryx:Iceoryx",
    "lmdb": "bench.peers.lmdb_shm:Lmdb",
}
"""Name: where its class is. The first two are no peers but what any of them is measured against."""

LIMITS = ("memcpy", "channel")
OURS = "shmstore"
COMMON = "pipe"
"""What a program does that has nothing else."""
STDLIB = ("memcpy", "channel", "shmstore", "pipe", "queue", "shared_memory", "shared_memory_reused")
"""Those that need nothing beyond what shmstore itself needs."""
