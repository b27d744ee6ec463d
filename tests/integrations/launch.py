"""What a launcher does for a rank of a trainer, and what accelerate does only on a GPU."""

import os

import torch.distributed as dist


def become_rank() -> None:
    """Have the trainers of this process see the process group, and nothing of what ran before the fork."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update({"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": "0", "WORLD_SIZE": size})
    os.environ.update({"LOCAL_WORLD_SIZE": size, "TORCHELASTIC_RUN_ID": "0", "MASTER_ADDR": "localhost"})
    os.environ["MASTER_PORT"] = "0"


def shard_on_the_cpu() -> None:
    """Have accelerate use the plugin for FSDP that it is given. It ignores it where ranks have no GPU."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    plain = AcceleratorState.__init__

    def init(self, *args, fsdp_plugin=None, **kwargs):
        plain(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin

    AcceleratorState.__init__ = init
