"""The store of the default process group, in which ranks leave notes for each other.

`_get_default_store` is the same in torch 2.11 to 2.15, and required.
"""

from typing import Any


def default_store() -> Any:
    """A connection of its own to the store that the default process group was made with.

    `init_process_group` makes the store and keeps it to itself. A connection can wait for one thing at a time, so a
    thread needs another. Required by `name_failures`.
    """
    from torch.distributed import distributed_c10d

    store: Any = distributed_c10d._get_default_store()
    return store.clone()
