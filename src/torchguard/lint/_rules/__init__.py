"""The rules, one file a topic."""
