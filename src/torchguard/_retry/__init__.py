"""`Retry`: a training step that is not finite is run again without its bad samples.

The step is checked by what it computes anyway: its losses and the norm of its gradients. If these are not finite, all
that the step changed is put back (`tensor_state.py`, `python_state.py`, `random_state.py`), the bad samples are sought
(`sample_search.py`), and the step is run again without them (`recoverable_step.py`). The result is that of the batch
without the bad samples, whatever the model does with its rows, since that is what was run.
"""

from torchguard._health import TensorHealth, check_grads, check_params
from torchguard._retry.closure import is_retrying
from torchguard._retry.report import RetryReport
from torchguard._retry.retry import Retry
from torchguard.exceptions import RetryError

__all__ = ["Retry", "RetryError", "RetryReport", "TensorHealth", "check_grads", "check_params", "is_retrying"]
