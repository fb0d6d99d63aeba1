"""What is cached: items, their fields, sizes, hashes and bytes."""
