"""batch: a step reads nothing back, and rows stop by themselves."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from toolr0_core.batch import Batch
from toolr0_core.kv_cache import PagePool, Span

CPU = torch.device("cpu")
WAITS = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique", "item"}


class Ops(TorchDispatchMode):
    """The names of all operations."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def started(model, stops=(), limit=6):
    """A batch of one row that has read two tokens, and its pool."""
    pool = PagePool(model.config, 8, 4, CPU, torch.float32)
    pages = pool.take(3)
    with torch.no_grad():
        model(torch.tensor([5, 6]), torch.arange(2), pool.extend([Span(pages, 0, [5, 6])]))
    b = Batch(4, 3, 2, CPU)
    b.add(pages, stops, token=7, length=2, drawn=0, limit=limit, seed=3, temperature=1.0, top_k=0, top_p=1.0, record=0)
    return b, pool


@torch.no_grad()
@pytest.mark.parametrize("truncates", [False, True])
def test_a_step_never_waits_for_a_result(tiny, truncates, monkeypatch):
    """On a GPU, which this cannot show itself; checks of values are made on a CPU alone and are taken out."""
    monkeypatch.setenv("TOOLR0_KERNELS", "torch")
    for name in ("pages", "places", "sample"):
        monkeypatch.setattr(f"toolr0_kernels.checks.{name}", lambda *args: None)
    model = tiny()
    b, pool = started(model)
    with Ops() as ops:
        b._step(model, pool, 4, truncates)
    assert len(ops.names) > 50 and not WAITS & set(ops.names)


@torch.no_grad()
def test_rows_stop_by_themselves_and_then_stand_still(tiny):
    model = tiny()
    b, pool = started(model, limit=3)
    seen = []
    for _ in range(5):
        b.run(model, pool)
        seen.append([b.host[x][0].item() for x in ("alive", "drawn", "length", "token")])
    assert [x[:3] for x in seen] == [[True, 1, 3], [True, 2, 4], [False, 3, 5], [False, 3, 5], [False, 3, 5]]
    assert seen[2][3] == seen[3][3] == seen[4][3]
    again, pool = started(model, stops=(seen[0][3],))
    again.run(model, pool)
    assert not again.host["alive"][0] and again.host["token"][0] == seen[0][3]


@torch.no_grad()
def test_padding_rows_change_nothing(tiny):
    model = tiny()
    drawn = []
    for rows in (1, 4):
        b, pool = started(model)
        before = pool.k_LPKBE.clone()
        b._step(model, pool, rows, False)
        drawn.append([b.results[name][0, 0].item() for name in b.results])
        changed = (pool.k_LPKBE != before).any(-1).any(2).any(0)  # [pages, offsets]
        assert changed[1:].sum() == 1
    assert drawn[0] == pytest.approx(drawn[1], abs=1e-6)
