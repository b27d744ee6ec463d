"""The only place where torchguard uses private names of torch."""
