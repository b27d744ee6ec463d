"""`python -m torchguard`."""

from torchguard.cli import main

if __name__ == "__main__":
    main()
