"""The rules that graphs are checked with."""
