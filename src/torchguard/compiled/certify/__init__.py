"""Certificates: claims about a compiled function, each checked by one of four layers."""
