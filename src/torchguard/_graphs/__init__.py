"""FX graphs as data: one codec, one listing, and the user's source line behind a node."""
