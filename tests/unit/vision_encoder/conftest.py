from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def one_torch_thread() -> None:
    """Tiny matrices: more threads only wait for each other."""
    torch.set_num_threads(1)
