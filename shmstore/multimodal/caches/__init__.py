"""The caches of preprocessed items, and the parts that they share."""
