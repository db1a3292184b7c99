"""The rows that run: one column a row of everything that a step needs, and the step from embedding to the drawn tokens.

On a CPU the host's arrays and the device's tensors are the same memory. On a GPU the step is a captured graph, rows stop by
themselves, and the host looks every LOOK steps: `pull` fetches what was drawn, `push` sends what the host has changed.

Shape suffixes: S rows, M pages a row, W stop tokens a row, T steps between two looks.
"""

from __future__ import annotations

import numpy as np
import torch
from toolr0_kernels import linear_sample
from torch import Tensor

from toolr0_core.kv_cache import PagePool
from toolr0_core.model import Model

LOOK = {"cpu": 1, "cuda": 8}  # steps between two looks of the host
OWN_MEMORY = {"cpu": False}  # of the device; where it has none, `push` and `pull` have nothing to do
CAPTURED = {"cuda"}  # where a step is a graph
BUCKETS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192)  # rows of a captured graph; then every 64
COLUMNS = {"token": np.int64,  # the last token, which the next step reads
           "length": np.int64,  # tokens whose keys are in the cache
           "drawn": np.int64, "limit": np.int64,  # tokens behind the prompt so far, and when they are enough
           "seed": np.int64, "temperature": np.float32, "top_k": np.int64, "top_p": np.float32,
           "alive": np.bool_, "record": np.int64}  # record: where the host keeps this row's tokens


class Batch:
    """Columns for `slots` rows, of which the first `rows` are taken."""

    def __init__(self, slots: int, table_width: int, stop_width: int, device: torch.device):
        self.slots, self.device, self.rows = slots, device, 0
        self.look, self.mirrored = LOOK.get(device.type, LOOK["cuda"]), OWN_MEMORY.get(device.type, True)
        shapes = {name: ((slots,), dtype) for name, dtype in COLUMNS.items()}
        shapes |= {"table": ((slots, table_width), np.int32), "stops": ((slots, stop_width), np.int64)}
        self.host = {name: np.zeros(*shape) for name, shape in shapes.items()}
        self.results = {name: np.zeros((self.look, slots), dtype) for name, dtype in
                        (("tokens", np.int64), ("logprobs", np.float32), ("entropies", np.float32))}
        self.on_device = {name: torch.from_numpy(x).to(device, copy=self.mirrored)
                          for name, x in (self.host | self.results).items()}
        self.tick = torch.zeros(1, dtype=torch.long, device=device)
        self.graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}

    def keep(self, rows: np.ndarray) -> None:
        """Only these rows stay, moved together."""
        for column in self.host.values():
            column[: len(rows)] = column[: self.rows][rows]
        self.host["alive"][len(rows): self.rows] = False
        self.rows = len(rows)

    def add(self, pages: list[int], stops: tuple[int, ...], **values: float) -> None:
        """One more row."""
        i, self.rows = self.rows, self.rows + 1
        for name, value in values.items():
            self.host[name][i] = value
        self.host["alive"][i] = True
        self.host["table"][i, : len(pages)] = pages
        self.host["stops"][i] = -1
        self.host["stops"][i, : len(stops)] = stops

    def push(self) -> None:
        if self.mirrored:
            for name, column in self.host.items():
                self.on_device[name].copy_(torch.from_numpy(column), non_blocking=True)

    def pull(self) -> None:
        """What the steps since the last look have drawn and where every row stands now."""
        if self.mirrored:
            for name in ("token", "length", "drawn", "alive"):
                torch.from_numpy(self.host[name]).copy_(self.on_device[name])
            for name, column in self.results.items():
                torch.from_numpy(column).copy_(self.on_device[name])

    # -- steps ---------------------------------------------------------------------------------------------------------

    def run(self, model: Model, pool: PagePool) -> None:
        """As many steps as fit between two looks; rows that have ended stand still."""
        active = self.host["temperature"][: self.rows] > 0
        truncates = bool((active & ((self.host["top_k"][: self.rows] > 0) | (self.host["top_p"][: self.rows] < 1))).any())
        self.tick.zero_()
        if self.device.type not in CAPTURED:
            for _ in range(self.look):
                self._step(model, pool, self.rows, truncates)
            return
        rows = min(self.slots, next((b for b in BUCKETS if b >= self.rows), -(-self.rows // 64) * 64))
        if (rows, truncates) not in self.graphs:
            self.graphs[rows, truncates] = self._capture(model, pool, rows, truncates)
        for _ in range(self.look):
            self.graphs[rows, truncates].replay()
        torch.cuda.current_stream().synchronize()  # what comes now is the host's time

    def _capture(self, model: Model, pool: PagePool, rows: int, truncates: bool) -> torch.cuda.CUDAGraph:
        """The graph of one step. The steps that warm up and record run without a live row, so that they change nothing."""
        self.on_device["alive"].zero_()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._step(model, pool, rows, truncates)
            self.tick.zero_()
        torch.cuda.current_stream().wait_stream(stream)
        graph, shared = torch.cuda.CUDAGraph(), next(iter(self.graphs.values()), None)
        with torch.cuda.graph(graph, pool=shared.pool() if shared else None):
            self._step(model, pool, rows, truncates)
        self.push()
        return graph

    def _step(self, model: Model, pool: PagePool, rows: int, truncates: bool) -> None:
        """One more token for every live row. Nothing in it waits for the device or depends on what is there."""
        b = {name: column[:rows] for name, column in self.on_device.items() if name not in self.results}
        alive_S, length_S, table_SM = b["alive"], b["length"], b["table"]
        place_S = (length_S // pool.page_size).clamp(max=table_SM.shape[1] - 1)
        page_S = table_SM.gather(1, place_S[:, None])[:, 0].long() * alive_S
        seen_S = ((length_S + 1) * alive_S).int()
        attend = pool.decode(page_S, length_S % pool.page_size, table_SM, seen_S)
        truncation = (b["top_k"], b["top_p"]) if truncates else ()
        drawn = model(b["token"], length_S, attend, lambda hidden_SD, weight_VD: linear_sample(
            hidden_SD, weight_VD, b["seed"], b["drawn"], b["temperature"], *truncation))
        for name, column_S in zip(self.results, drawn):
            self.on_device[name][:, :rows].index_copy_(0, self.tick, column_S[None])
        self._advance(b, drawn[0])

    def _advance(self, b: dict[str, Tensor], token_S: Tensor) -> None:
        b["length"] += b["alive"]
        b["drawn"] += b["alive"]
        stopped_S = (token_S[:, None] == b["stops"]).any(1)
        b["token"].copy_(torch.where(b["alive"], token_S, b["token"]))
        b["alive"] &= ~stopped_S & (b["drawn"] < b["limit"])
        self.tick += 1
