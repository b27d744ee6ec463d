"""Trainers, loggers, servers."""
