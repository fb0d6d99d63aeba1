"""Plug-ins for inference engines; nothing here is imported unless its engine is."""
