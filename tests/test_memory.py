from __future__ import annotations

import gc
import logging
import threading
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import SpeechModel, Step, batch_of
from tiny_asr import TinyDataset, TinyModel, tiny_optimizer, tiny_sampler, training_step
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from lhotse_oomfit import allocator, calibrate
from lhotse_oomfit.calibration import wake_optimizers
from lhotse_oomfit.errors import CalibrationError, InvalidArgumentError
from lhotse_oomfit.memory import Budget, CudaMemory, MemoryBackend, backend_for, live_tensors
from lhotse_oomfit.storages import StorageTracker

MIB = 1024**2


def cpu(limit: str | int = "64MiB", **kwargs: Any) -> MemoryBackend:
    return backend_for("cpu", memory_limit=limit, **kwargs)


def tracker() -> StorageTracker:
    return StorageTracker(lambda: 1 << 50)


# --- the CPU's storages -----------------------------------------------------------------------------------------------


def test_the_peak_is_the_largest_sum_of_tensors_alive_at_once() -> None:
    with cpu().measure() as usage:
        a = torch.zeros(1000)
        b = torch.zeros(500)
        del a
        c = torch.zeros(700)
        del b, c
    assert usage().allocated_bytes == usage().reserved_bytes == 4 * 1500
    assert usage().num_ooms == usage().num_retries == 0


def test_a_view_costs_nothing() -> None:
    with cpu().measure() as usage:
        a = torch.zeros(1000)
        views = [a[10:], a.view(10, 100), a.detach(), a.expand(5, 1000), a.view(10, 100).t()]
    assert len(views) == 5
    assert usage().allocated_bytes == 4000


def test_an_operator_in_place_costs_nothing() -> None:
    with cpu().measure() as usage:
        a = torch.zeros(1000)
        a.add_(1).mul_(2).clamp_(0, 1)
        torch._foreach_add_([a], 1.0)
    assert usage().allocated_bytes == 4000


def test_a_storage_lives_as_long_as_its_last_view() -> None:
    with tracker() as tracked:
        view = torch.zeros(1000)[:1]
        assert tracked.current_bytes == 4000
        del view
        assert tracked.current_bytes == 0


def test_an_output_that_grows_is_measured_again() -> None:
    with tracker() as tracked:
        out = torch.empty(0)
        torch.cat([torch.ones(300), torch.ones(200)], out=out)
        assert tracked.current_bytes == 4 * 500
        out.resize_(900)
        assert tracked.current_bytes == 4 * 900


def test_a_storage_resized_without_an_operator_is_measured_again() -> None:
    with cpu().measure() as usage:
        a = torch.zeros(1000)
        a.untyped_storage().resize_(0)
        a.untyped_storage().resize_(16_000)
    assert usage().allocated_bytes == 16_000
    assert torch.UntypedStorage.resize_ is torch._C.StorageBase.resize_


def test_resizing_a_storage_over_the_limit_is_out_of_memory() -> None:
    with (
        pytest.raises(torch.OutOfMemoryError, match=r"UntypedStorage\.resize_ needs 1\.91 MiB more"),
        cpu("1MiB").measure(),
    ):
        torch.zeros(1000).untyped_storage().resize_(2_004_000)
    assert torch.UntypedStorage.resize_ is torch._C.StorageBase.resize_


def test_a_tensor_from_outside_counts_once_an_operator_touches_it() -> None:
    batch = torch.zeros(2000)
    with cpu().measure() as usage:
        batch.sum()
    assert usage().allocated_bytes == 8000 + 4


def test_resident_tensors_count_from_the_start_and_are_asked_for_each_time() -> None:
    resident = [torch.zeros(100)]
    backend = cpu(resident=lambda: resident)
    with backend.measure() as usage:
        assert usage().allocated_bytes == 400
    resident.append(torch.zeros(50))
    resident.append(resident[0][:10])
    with backend.measure() as usage:
        pass
    assert usage().allocated_bytes == 600


def test_a_list_of_resident_tensors_will_do() -> None:
    with cpu(resident=iter([torch.zeros(100)])).measure() as usage:
        pass
    assert usage().allocated_bytes == 400


def test_what_training_keeps_alive_is_listed_with_gradients_and_optimizer_state() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(10, 10), torch.nn.BatchNorm1d(10))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 10)).sum().backward()
    optimizer.step()
    extra = {"ema": [torch.zeros(7)], "module": torch.nn.Linear(3, 3)}
    listed = list(live_tensors(model, [optimizer], [extra["ema"], extra["module"], "text"]))
    num_parameters, num_buffers = 130, 21
    assert sum(t.numel() for t in listed) == 4 * num_parameters + num_buffers + 4 + 7 + 12


def test_sparse_gradients_are_counted() -> None:
    table = torch.nn.Embedding(10, 8, sparse=True)
    with tracker() as tracked:
        table(torch.tensor([1, 2, 3])).sum().backward()
        assert table.weight.grad is not None
        assert table.weight.grad.layout is torch.sparse_coo
        assert tracked.current_bytes == table.weight.nbytes + 3 * (8 * 4 + 8)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_the_parts_of_a_compressed_tensor_are_counted() -> None:
    compressed = torch.eye(4).to_sparse_csr()
    with cpu().measure() as usage:
        compressed + compressed
    assert usage().allocated_bytes >= (5 * 8 + 4 * 8 + 4 * 4) + 4 * 4


def test_tensors_inside_a_wrapper_subclass_are_counted() -> None:
    two_tensor = pytest.importorskip("torch.testing._internal.two_tensor").TwoTensor
    with tracker() as tracked:
        both = two_tensor(torch.zeros(100), torch.zeros(100))
        total = both + 1
        assert tracked.current_bytes == 4 * 400
        del both, total
        gc.collect()
        assert tracked.current_bytes == 0


def test_recomputing_activations_shows_in_the_peak() -> None:
    from torch.utils.checkpoint import checkpoint

    layers = torch.nn.ModuleList(
        torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64)) for _ in range(6)
    )
    peaks = []
    for recompute in (False, True):
        with cpu(resident=lambda: live_tensors(layers)).measure() as usage:
            x = torch.ones(200, 64, requires_grad=True)
            y = x
            for layer in layers:
                y = checkpoint(layer, y, use_reentrant=False) if recompute else layer(y)
            y.sum().backward()
            del x, y
        peaks.append(usage().allocated_bytes)
        layers.zero_grad()
    assert peaks[1] < 0.75 * peaks[0]


def test_the_peak_of_a_training_step_is_that_of_torchs_own_tracker() -> None:
    from torch.distributed._tools.mem_tracker import MemTracker

    x = batch_of(32, 40)
    peaks = []
    for tracker_class in (None, MemTracker):
        torch.manual_seed(0)
        model = SpeechModel()
        step = Step(model, torch.optim.AdamW(model.parameters(), foreach=True))
        step.forward_backward(x)
        step.optimizer_step()
        step.zero_grad()
        if tracker_class is None:
            with cpu(resident=live_tensors(model, [step.optimizer], [x])).measure() as usage:
                step.forward_backward(x)
                step.optimizer_step()
            peaks.append(usage().allocated_bytes)
        else:
            reference = tracker_class()
            reference.track_external(model, step.optimizer, x)
            with warnings.catch_warnings(), reference:
                warnings.simplefilter("ignore")  # torch's tracker hooks modules in a way that torch itself warns about
                step.forward_backward(x)
                step.optimizer_step()
            peaks.append(reference.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])
    assert peaks[0] == pytest.approx(peaks[1], rel=1e-3)


PROGRAM = st.lists(
    st.tuples(
        st.sampled_from(["new", "view", "in_place", "add", "cat", "drop", "resize", "storage", "split", "grad", "out"]),
        st.integers(0, 7),
        st.integers(0, 7),
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(program=PROGRAM)
def test_tracked_bytes_are_the_sum_of_live_storages_after_every_operator(
    program: list[tuple[str, int, int]],
) -> None:
    backend = cpu()
    with backend.measure(), tracker_of_current_mode() as tracked:
        tensors: list[torch.Tensor] = [torch.zeros(3, requires_grad=True)]
        for operator, i, j in program:
            run_operator(operator, tensors, i % max(1, len(tensors)), j)
            alive = tensors + [t.grad for t in tensors if t.is_leaf and t.grad is not None]
            storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in alive}
            del alive
            assert tracked.current_bytes == sum(storages.values())


class tracker_of_current_mode:
    """The tracker behind a measurement, to look at its count between operators."""

    def __enter__(self) -> StorageTracker:
        mode = _get_current_dispatch_mode_stack()[-1]
        assert isinstance(mode, StorageTracker)
        return mode

    def __exit__(self, *_: object) -> None:
        pass


def run_operator(operator: str, tensors: list[torch.Tensor], i: int, j: int) -> None:
    if operator == "new" or not tensors:
        tensors.append(torch.ones(3 * (j + 1)))
        return
    tensor = tensors[i]
    if operator == "view":
        tensors.append(tensor.detach()[j:])
    elif operator == "in_place":
        tensor.detach().mul_(2)
    elif operator == "add":
        tensors.append(tensor.detach() + 1)
    elif operator == "cat":
        tensors.append(torch.cat([tensor.detach(), tensors[j % len(tensors)].detach()]))
    elif operator == "drop":
        del tensors[i]
    elif operator == "resize" and not tensor.requires_grad:
        tensor.resize_(j * 5)
    elif operator == "storage" and not tensor.requires_grad:
        storage = tensor.untyped_storage()
        storage.resize_(max(storage.nbytes(), 4 * j))
    elif operator == "split":
        tensors.extend(tensor.detach().chunk(2))
    elif operator == "grad" and tensor.is_leaf and tensor.requires_grad:
        (tensor * 2).sum().backward()
    elif operator == "out":
        out = torch.empty(0)
        torch.add(tensor.detach(), 1, out=out)
        tensors.append(out)


def test_storages_that_die_in_other_threads_are_counted_right() -> None:
    with tracker() as tracked:
        piles = [[torch.zeros(100) for _ in range(200)] for _ in range(4)]
        kept = torch.zeros(100)

        def burn(pile: list[torch.Tensor]) -> None:
            while pile:
                pile.pop()

        threads = [threading.Thread(target=burn, args=(pile,)) for pile in piles]
        for thread in threads:
            thread.start()
        for _ in range(300):
            kept = kept + 1
        for thread in threads:
            thread.join()
        assert tracked.current_bytes == 400


# --- the CPU's limit --------------------------------------------------------------------------------------------------


class Fails(torch.autograd.Function):
    """Takes 4 MiB in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad + torch.zeros(MIB)[: grad.numel()].view_as(grad)


def out_of_memory_in(phase: str) -> None:
    x = torch.nn.Parameter(torch.zeros(10))
    if phase == "forward":
        torch.zeros(MIB)
    loss = Fails.apply(x).sum() if phase == "backward" else x.sum()
    loss.backward()
    if phase == "optimizer":
        large = torch.nn.Parameter(torch.zeros(MIB // 16))
        large.grad = torch.zeros_like(large)
        torch.optim.AdamW([large]).step()


@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer"])
def test_exceeding_the_limit_raises_in_the_middle_of_the(phase: str) -> None:
    backend = cpu(MIB)
    message = r"CPU out of memory: .* of a limit of 1\.00 MiB are in use"
    with pytest.raises(torch.OutOfMemoryError, match=message), backend.measure() as usage:
        out_of_memory_in(phase)
    assert usage().num_ooms == 1
    assert usage().allocated_bytes <= MIB
    assert _get_current_dispatch_mode_stack() == []
    assert torch.UntypedStorage.resize_ is torch._C.StorageBase.resize_
    with backend.measure() as usage:
        torch.zeros(10)
    assert usage().num_ooms == 0


def test_the_error_names_operator_need_use_and_limit() -> None:
    kept = torch.zeros(MIB // 8)
    with pytest.raises(torch.OutOfMemoryError) as caught, cpu("1MiB", resident=[kept]).measure():
        kept.repeat(2)
    assert str(caught.value) == (
        "CPU out of memory: aten.repeat.default needs 1.00 MiB more, 512 KiB of a limit of 1.00 MiB are in use"
    )


def test_resident_tensors_beyond_the_limit_fail_at_the_first_allocation() -> None:
    resident = torch.zeros(1000)
    with cpu(1000, resident=[resident]).measure():
        resident.add_(1)
    with pytest.raises(torch.OutOfMemoryError), cpu(1000, resident=[resident]).measure():
        torch.zeros(1)


def test_a_cap_lowers_the_limit_while_inside_and_never_raises_it() -> None:
    backend = cpu("1MiB")
    with backend.cap(1000):
        with pytest.raises(torch.OutOfMemoryError), backend.measure():
            torch.zeros(251)
        with backend.measure():
            torch.zeros(250)
        with backend.cap(2000), pytest.raises(torch.OutOfMemoryError), backend.measure():
            torch.zeros(251)
        assert backend.budget(1.0).bytes == 1000
    with backend.cap(64 * MIB), pytest.raises(torch.OutOfMemoryError), backend.measure():
        torch.zeros(MIB)
    with backend.measure():
        torch.zeros(251)


def test_a_measurement_inside_another_is_refused() -> None:
    backend = cpu()
    message = "a memory measurement must not run inside another one; leave the first one before"
    with backend.measure(), pytest.raises(CalibrationError, match=message), backend.measure():
        pass
    with backend.measure(), pytest.raises(CalibrationError, match=message), cpu().measure():
        pass
    with backend.measure():
        pass


def test_usage_is_readable_inside_the_block_and_stays_after_it() -> None:
    with cpu().measure() as usage:
        first = usage()
        a = torch.zeros(1000)
        second = usage()
    del a
    torch.zeros(10_000)
    assert first.allocated_bytes == 0
    assert second.allocated_bytes == usage().allocated_bytes == 4000
    assert 0.0 <= first.seconds <= second.seconds <= usage().seconds == usage().seconds


def test_a_step_computes_the_same_under_measurement() -> None:
    losses = []
    for measured in (False, True):
        torch.manual_seed(0)
        model = SpeechModel(dropout=0.0)
        model.masking = torch.nn.Identity()
        step = Step(model, torch.optim.AdamW(model.parameters()))
        if measured:
            with cpu().measure():
                step.forward_backward(batch_of(4))
                step.optimizer_step()
        else:
            step.forward_backward(batch_of(4))
            step.optimizer_step()
        losses.append(model.loss(batch_of(3)).item())
    assert losses[0] == losses[1]


def test_an_optimizer_whose_own_step_exceeds_the_budget_is_refused_with_the_reason() -> None:
    def parts() -> dict[str, Any]:
        model = TinyModel(width=64)
        optimizer, scheduler = tiny_optimizer(model)
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler}

    made = parts()
    memory = cpu("100MiB", resident=lambda: live_tensors(made["model"], [made["optimizer"]]))
    peak_bytes = wake_optimizers(Step(made["model"], made["optimizer"]), memory, made["model"].parameters())
    made = parts()
    with pytest.raises(
        CalibrationError, match=r"one step of the optimizer, without any batch, takes .* of a budget of"
    ):
        calibrate(
            tiny_sampler(),
            TinyDataset(),
            training_step=training_step,
            memory_limit=int(1.5 * peak_bytes),
            memory_fraction=0.6,
            cache=False,
            progress=False,
            **made,
        )
    assert len(made["optimizer"].state) == 0


# --- budgets and backends ---------------------------------------------------------------------------------------------


@given(
    total=st.integers(1, 2**40),
    free=st.integers(0, 2**40),
    reserve=st.integers(0, 2**30),
    fraction=st.floats(0.01, 1.0),
)
def test_a_budget_stays_inside_the_fraction_and_what_is_free(
    total: int, free: int, reserve: int, fraction: float
) -> None:
    budget = Budget(total_bytes=total, free_bytes=free, reserve_bytes=reserve, fraction=fraction)
    assert budget.bytes + reserve <= min(fraction * total, free) < budget.bytes + reserve + 1


@pytest.mark.parametrize("fraction", [0.0, -0.5, 1.5, float("nan")])
def test_a_fraction_outside_its_range_is_refused(fraction: float) -> None:
    with pytest.raises(InvalidArgumentError, match=r"memory_fraction must lie above 0 and at most at 1, it is .*0\.9"):
        cpu().budget(fraction)


def test_a_negative_reserve_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="reserve must not be negative, it is -1 bytes; pass 0"):
        cpu().budget(0.9, reserve_bytes=-1)


def test_the_cpus_budget_is_the_fraction_of_its_limit_less_the_reserve() -> None:
    assert cpu("100MiB").budget(0.5).bytes == 50 * MIB
    assert cpu("100MiB").budget(1.0, reserve_bytes=MIB).bytes == 99 * MIB


def test_a_cpu_without_a_limit_is_refused_with_what_to_pass() -> None:
    with pytest.raises(InvalidArgumentError, match=r'memory_limit must be given on a CPU.*memory_limit="600MiB"'):
        backend_for("cpu")


@pytest.mark.parametrize("limit", [0, -5, "0MiB", "many", "", True])
def test_a_limit_that_is_no_size_is_refused(limit: Any) -> None:
    with pytest.raises(InvalidArgumentError):
        backend_for("cpu", memory_limit=limit)


def test_another_kind_of_device_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"must be a CUDA card or the CPU .* it is 'meta'; pass batch sizes"):
        backend_for("meta")


def test_the_cpu_tells_what_it_is() -> None:
    backend = cpu("600MiB")
    assert backend.name == "cpu"
    assert backend.device == torch.device("cpu")
    assert backend.prepare() == "cpu-tracker"
    assert backend.fields() == {"device": "cpu", "device_memory": str(600 * MIB)}
    backend.release()


# --- a card's allocator, without a card -------------------------------------------------------------------------------


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> CudaMemory:
    """A card of 1,000 MiB of which 700 MiB are free and 100 MiB reserved, on a torch that can switch nothing on."""
    for variable in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        monkeypatch.delenv(variable, raising=False)
    properties = SimpleNamespace(total_memory=1000 * MIB, name="Card", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (700 * MIB, 1000 * MIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 100 * MIB)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch.cuda.memory, "get_per_process_memory_fraction", lambda device: 1.0, raising=False)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"allocator_settings": {"expandable_segments": False}})
    return CudaMemory(torch.device("cuda", 0))


def test_what_a_card_can_give_this_process_includes_what_it_holds_already(card: CudaMemory) -> None:
    assert card.budget(1.0, reserve_bytes=0).bytes == 800 * MIB
    assert card.budget(0.5, reserve_bytes=0).bytes == 500 * MIB


def test_memory_outside_the_allocator_is_kept_only_where_the_fraction_leaves_none(card: CudaMemory) -> None:
    assert card.budget(1.0).bytes == (800 - 512) * MIB
    assert card.budget(0.5).bytes == (800 - 512) * MIB
    assert card.budget(0.25).bytes == 250 * MIB
    assert card.budget(0.25).reserve_bytes == 0


def test_a_memory_limit_stands_for_a_larger_cards_size(card: CudaMemory) -> None:
    limited = CudaMemory(torch.device("cuda", 0), limit_bytes=200 * MIB)
    assert limited.budget(1.0, reserve_bytes=0).bytes == 200 * MIB
    assert limited.fields()["device_memory"] == str(200 * MIB)
    assert CudaMemory(torch.device("cuda", 0), limit_bytes=2000 * MIB).budget(1.0, reserve_bytes=0).bytes == 800 * MIB


def test_an_allocator_that_the_user_configured_is_left_alone(
    card: CudaMemory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512")
    monkeypatch.setattr(allocator, "_switch_on_expandable_segments", lambda: pytest.fail("switched"))
    with caplog.at_level(logging.WARNING):
        assert card.prepare() == "default"
    assert "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:512 is kept as it is" in caplog.text
    assert "add expandable_segments:True to it" in caplog.text


def test_expandable_segments_that_are_on_already_stay_on(
    card: CudaMemory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"allocator_settings": {"expandable_segments": True}})
    with caplog.at_level(logging.INFO):
        assert card.prepare() == "expandable_segments"
    assert caplog.text == ""


def test_an_allocator_that_cant_be_switched_says_why_and_what_to_do(
    card: CudaMemory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(settings: str) -> None:
        raise RuntimeError("not here\nstack")

    monkeypatch.setattr(allocator, "_SETTERS", ((SimpleNamespace(set=refuse), "set"),))
    assert card.prepare() == "default"
    assert "can't be switched on (not here)" in caplog.text
    assert "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before the program starts" in caplog.text
    caplog.clear()
    monkeypatch.setattr(allocator, "_SETTERS", ((SimpleNamespace(set=lambda settings: None), "set"),))
    assert card.prepare() == "default"
    assert "(the allocator took the setting and ignored it)" in caplog.text
    caplog.clear()
    monkeypatch.setattr(allocator, "_SETTERS", ((SimpleNamespace(), "set"),))
    assert card.prepare() == "default"
    assert "has no function for it" in caplog.text


def test_a_cap_of_the_users_own_bounds_the_budget(card: CudaMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.memory, "get_per_process_memory_fraction", lambda device: 0.3, raising=False)
    assert card.budget(0.9, reserve_bytes=0).bytes == 300 * MIB


def test_an_older_torch_that_cant_tell_its_cap_counts_as_without_one(
    card: CudaMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    fractions: list[float] = []
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda fraction, device: fractions.append(fraction)
    )
    monkeypatch.delattr(torch.cuda.memory, "get_per_process_memory_fraction")
    with card.cap(250 * MIB):
        pass
    assert fractions == [0.25, 1.0]


def test_another_allocator_backend_is_named_and_left_alone(card: CudaMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    assert card.prepare() == "cudaMallocAsync"


def test_a_cap_is_a_share_of_the_card_and_the_former_one_comes_back(
    card: CudaMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    fractions: list[float] = []
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda fraction, device: fractions.append(fraction)
    )
    monkeypatch.setattr(torch.cuda.memory, "get_per_process_memory_fraction", lambda device: 0.7, raising=False)
    with pytest.raises(KeyError), card.cap(250 * MIB):
        raise KeyError
    with card.cap(5000 * MIB):
        pass
    assert fractions == [0.25, 0.7, 0.7, 0.7]
