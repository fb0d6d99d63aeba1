"""What is cached: items, their fields, sizes, hashes and bytes."""

from shmstore.serde.tensors import load_torch

load_torch("shmstore.multimodal")  # before its modules import it: the error says what to install
