"""FX graphs as data: nodes, text, shared storages, and the user's line behind a node."""
