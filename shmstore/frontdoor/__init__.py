"""What programs use that are not engines."""
