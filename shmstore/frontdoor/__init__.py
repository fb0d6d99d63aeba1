"""What a program that is no engine needs of a store."""
