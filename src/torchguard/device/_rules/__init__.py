"""Rules that a graph may break."""
