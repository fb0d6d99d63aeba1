"""shmstore: a shared-memory object store for the tensors of inference engines."""
