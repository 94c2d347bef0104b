"""What a direct transport is given and gives back, and what it says where it cannot work."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch

from deployments.direct_store import as_array, as_tensor, open_store
from deployments.handles import RayObjectStore
from deployments.metrics import ReplicaMetrics
from deployments.transfer_meter import MeteredStore
from tests.fakes import MemoryObjectStore


def test_bfloat16_travels_as_such_and_comes_back_as_uint16() -> None:
    rows = torch.arange(6.0).view(2, 3).bfloat16()
    array = rows.view(torch.uint16).numpy()
    tensor = as_tensor(array)
    assert torch.equal(tensor, rows)
    assert as_array(tensor).dtype == np.uint16
    assert as_array(tensor).tolist() == array.tolist()


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_other_arrays_keep_type_and_memory(dtype: type) -> None:
    array = np.arange(6, dtype=dtype).reshape(2, 3)
    back = as_array(as_tensor(array))
    assert (back.dtype, back.tolist()) == (array.dtype, array.tolist())
    assert np.shares_memory(back, array)


@pytest.mark.filterwarnings("error")
def test_a_read_only_array_is_copied_without_a_warning() -> None:
    array = np.arange(6, dtype=np.float32)
    array.flags.writeable = False
    assert not np.shares_memory(as_tensor(array).numpy(), array)


def test_a_tensor_stays_as_it_is() -> None:
    tensor = torch.zeros(2, 3)
    assert as_tensor(tensor) is tensor


def test_the_object_store_needs_nothing() -> None:
    assert type(open_store("object_store")) is RayObjectStore


def test_without_its_package_nixl_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"embedding_transfer is 'nixl', but the package nixl is not installed"):
        open_store("nixl")


def test_nixl_that_does_not_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def get_nixl_agent(self) -> None:
            raise RuntimeError("no backend")

    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr("deployments.direct_store.get_tensor_transport_manager", lambda _: Broken())
    with pytest.raises(ValueError, match="does not start here: RuntimeError: no backend"):
        open_store("nixl")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_cuda_ipc_says_so() -> None:
    with pytest.raises(ValueError, match=r"embedding_transfer is 'cuda_ipc', but this replica sees no CUDA device"):
        open_store("cuda_ipc")


async def test_bytes_and_seconds_are_counted_in_each_direction_and_losses_are_not() -> None:
    inner, metrics = MemoryObjectStore(), ReplicaMetrics("VisionEncoder", "r")
    ticks = iter(range(100))
    store = MeteredStore(inner, "nixl", metrics, clock=lambda: float(next(ticks)))
    refs = [store.put(np.zeros((2, 3), np.float32)) for _ in range(2)]
    assert (await store.get(refs[0])).shape == (2, 3)
    inner.lose(refs[1])
    with pytest.raises(Exception, match="gone"):
        await store.get(refs[1])
    samples = {
        (sample.name.removeprefix("sightline_embedding_transfer_"), sample.labels["direction"]): sample.value
        for metric in metrics.collect()
        for sample in metric.samples
        if "direction" in sample.labels and sample.labels["backend"] == "nixl" and "le" not in sample.labels
    }
    assert samples == {
        ("bytes_total", "put"): 48.0,
        ("bytes_total", "get"): 24.0,
        ("seconds_count", "put"): 2.0,
        ("seconds_count", "get"): 1.0,
        ("seconds_sum", "put"): 2.0,
        ("seconds_sum", "get"): 1.0,
    }
