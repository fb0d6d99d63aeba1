"""The caches, one module each: what P0, P1 and the workers keep."""
