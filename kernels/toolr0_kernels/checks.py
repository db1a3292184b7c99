"""Arguments of the public functions, before anything is launched: one sentence with the value and the rule.

Values that live on a GPU are not looked at: that would wait for it. Out of range, they give NaN instead.
"""

from __future__ import annotations

import torch
from torch import Tensor


def head(hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, temperature: float) -> None:
    if hidden_ND.ndim != 2 or weight_VD.ndim != 2 or hidden_ND.shape[1] != weight_VD.shape[1]:
        raise ValueError(f"hidden is {_shape(hidden_ND)} and weight {_shape(weight_VD)}; they have to be [N, D] and [V, D]")
    if not len(weight_VD):
        raise ValueError(f"weight is {_shape(weight_VD)}; the vocabulary needs at least one entry")
    if target_N.shape != hidden_ND.shape[:1]:
        raise ValueError(f"there are {_shape(target_N)} targets for {len(hidden_ND)} rows of hidden; it has to be one each")
    if target_N.dtype != torch.int64:
        raise ValueError(f"targets are {target_N.dtype}; they have to be torch.int64")
    if not hidden_ND.is_floating_point() or hidden_ND.dtype != weight_VD.dtype:
        raise ValueError(f"hidden is {hidden_ND.dtype} and weight {weight_VD.dtype}; they have to be floats of one dtype")
    _one_device(hidden=hidden_ND, weight=weight_VD, target=target_N)
    if not isinstance(temperature, (int, float)) or not 1e-6 <= temperature <= 1e6:
        raise ValueError(f"temperature is {temperature!s:.40}; it has to be a number from 1e-6 to 1e6 (of greedy ones, 1)")


def targets(target_N: Tensor, vocabulary: int) -> tuple[Tensor, Tensor | None]:
    """Targets that can be looked up, and on a GPU which of them could not."""
    bad_N = (target_N < 0) | (target_N >= vocabulary)
    if not target_N.is_cpu:
        return target_N.masked_fill(bad_N, 0).contiguous(), bad_N
    if bool(bad_N.any()):
        row = int(bad_N.nonzero()[0])
        raise IndexError(f"target {row} is {int(target_N[row])}; it has to be in 0..{vocabulary - 1}")
    return target_N.contiguous(), None


def per_row(rows: int, inputs: dict[str, Tensor | float | None]) -> None:
    for name, x in inputs.items():
        if isinstance(x, Tensor) and x.shape != (rows,) and not (name.startswith("clip") and x.ndim == 0):
            raise ValueError(f"{name} is {_shape(x)}; it has to be [{rows}], one value a row")


def linear(x: Tensor, weight_FD: Tensor, bias_F: Tensor | None) -> None:
    fits = x.ndim >= 1 and weight_FD.ndim == 2 and x.shape[-1] == weight_FD.shape[1]
    if not fits or (bias_F is not None and bias_F.shape != weight_FD.shape[:1]):
        raise ValueError(f"x is {_shape(x)}, weight {_shape(weight_FD)} and bias {bias_F if bias_F is None else _shape(bias_F)}; "
                         f"they have to be [..., D], [F, D] and [F] or None")
    if x.dtype != weight_FD.dtype:
        raise ValueError(f"x is {x.dtype} and weight {weight_FD.dtype}; they have to be of one dtype")


def norm(x: Tensor, weight_D: Tensor) -> None:
    if x.ndim < 1 or weight_D.shape != x.shape[-1:]:
        raise ValueError(f"x is {_shape(x)} and weight {_shape(weight_D)}; weight has to be x's last dimension")
    if x.dtype != weight_D.dtype or not x.is_floating_point():
        raise ValueError(f"x is {x.dtype} and weight {weight_D.dtype}; they have to be floats of one dtype")
    _one_device(x=x, weight=weight_D)


def same(**tensors: Tensor) -> None:
    (a, x), (b, y) = tensors.items()
    if x.shape != y.shape or x.dtype != y.dtype:
        raise ValueError(f"{a} is {_shape(x)} of {x.dtype} and {b} {_shape(y)} of {y.dtype}; they have to be alike")
    _one_device(**tensors)


def rope(q_NHE: Tensor, k_NKE: Tensor, cos_NF: Tensor, sin_NF: Tensor) -> None:
    N, E = (q_NHE.shape[0], q_NHE.shape[-1]) if q_NHE.ndim == 3 else (0, 1)
    if q_NHE.ndim != 3 or k_NKE.ndim != 3 or k_NKE.shape[0] != N or k_NKE.shape[2] != E or E % 2:
        raise ValueError(f"q is {_shape(q_NHE)} and k {_shape(k_NKE)}; they have to be [N, heads, E] with one N and one even E")
    if cos_NF.shape != (N, E // 2) or sin_NF.shape != cos_NF.shape:
        raise ValueError(f"cos is {_shape(cos_NF)} and sin {_shape(sin_NF)}; they have to be [{N}, {E // 2}]")
    _one_device(q=q_NHE, k=k_NKE, cos=cos_NF, sin=sin_NF)


def decode(q_SHE: Tensor, k_PKBE: Tensor, v_PKBE: Tensor, table_SM: Tensor, length_S: Tensor) -> None:
    S = len(q_SHE) if q_SHE.ndim else 0
    if q_SHE.ndim != 3 or k_PKBE.ndim != 4 or k_PKBE.shape != v_PKBE.shape or q_SHE.shape[2] != k_PKBE.shape[3] \
            or 0 in k_PKBE.shape[1:] or q_SHE.shape[1] % k_PKBE.shape[1]:
        raise ValueError(f"q is {_shape(q_SHE)}, keys {_shape(k_PKBE)} and values {_shape(v_PKBE)}; they have to be [S, H, E] "
                         f"and twice [pages, K, B, E] with H a multiple of K")
    if not q_SHE.dtype == k_PKBE.dtype == v_PKBE.dtype or not (k_PKBE.is_contiguous() and v_PKBE.is_contiguous()):
        raise ValueError(f"q is {q_SHE.dtype}, keys {k_PKBE.dtype} and values {v_PKBE.dtype}; they have to be of one dtype, "
                         f"and the caches contiguous")
    if table_SM.ndim != 2 or len(table_SM) != S or length_S.shape != (S,) \
            or not table_SM.dtype == length_S.dtype == torch.int32:
        raise ValueError(f"table is {_shape(table_SM)} of {table_SM.dtype} and length {_shape(length_S)} of {length_S.dtype}; "
                         f"they have to be int32, [{S}, pages a sequence] and [{S}]")
    _one_device(q=q_SHE, keys=k_PKBE, values=v_PKBE, table=table_SM, length=length_S)


def pages(k_PKBE: Tensor, table_SM: Tensor, length_S: Tensor) -> None:
    """On a CPU: lengths and pages that are there."""
    if not k_PKBE.is_cpu or not len(length_S):
        return
    B, M = k_PKBE.shape[2], table_SM.shape[1]
    if int(length_S.min()) < 0 or int(length_S.max()) > M * B:
        raise ValueError(f"lengths go from {int(length_S.min())} to {int(length_S.max())}; {M} pages of {B} hold 0 to {M * B}")
    used_SM = torch.arange(M) * B < length_S[:, None]
    pages = table_SM[used_SM]
    if len(pages) and not 0 <= int(pages.min()) <= int(pages.max()) < len(k_PKBE):
        raise ValueError(f"page numbers go from {int(pages.min())} to {int(pages.max())}; the cache has 0..{len(k_PKBE) - 1}")


def write(k_SKE: Tensor, v_SKE: Tensor, k_PKBE: Tensor, v_PKBE: Tensor, page_S: Tensor, offset_S: Tensor) -> None:
    fits = k_SKE.ndim == 3 and k_PKBE.ndim == 4 and k_SKE.shape[1:] == (k_PKBE.shape[1], k_PKBE.shape[3])
    if not fits or v_SKE.shape != k_SKE.shape or k_PKBE.shape != v_PKBE.shape:
        raise ValueError(f"keys are {_shape(k_SKE)}, values {_shape(v_SKE)} and the caches {_shape(k_PKBE)} and {_shape(v_PKBE)}; "
                         f"they have to be twice [S, K, E] and twice [pages, K, B, E]")
    if not k_SKE.dtype == v_SKE.dtype == k_PKBE.dtype == v_PKBE.dtype or not (k_PKBE.is_contiguous() and v_PKBE.is_contiguous()):
        raise ValueError(f"keys are {k_SKE.dtype} and the caches {k_PKBE.dtype}; they have to be of one dtype, and the caches "
                         f"contiguous")
    if not page_S.shape == offset_S.shape == k_SKE.shape[:1] or not page_S.dtype == offset_S.dtype == torch.int64:
        raise ValueError(f"pages are {_shape(page_S)} of {page_S.dtype} and offsets {_shape(offset_S)} of {offset_S.dtype}; they "
                         f"have to be int64, [{len(k_SKE)}]")
    _one_device(keys=k_SKE, values=v_SKE, key_cache=k_PKBE, value_cache=v_PKBE, page=page_S, offset=offset_S)


def places(k_PKBE: Tensor, page_S: Tensor, offset_S: Tensor) -> None:
    """On a CPU: places that are there."""
    for name, x, size in (("pages", page_S, k_PKBE.shape[0]), ("offsets", offset_S, k_PKBE.shape[2])):
        if x.is_cpu and len(x) and not 0 <= int(x.min()) <= int(x.max()) < size:
            raise ValueError(f"{name} go from {int(x.min())} to {int(x.max())}; the cache has 0..{size - 1}")


def sample(logits_SV: Tensor, seed_S: Tensor, position_S: Tensor, temperature_S: Tensor, top_k_S: Tensor | None,
           top_p_S: Tensor | None) -> None:
    if logits_SV.ndim != 2 or not logits_SV.shape[1] or not logits_SV.is_floating_point():
        raise ValueError(f"logits are {_shape(logits_SV)} of {logits_SV.dtype}; they have to be floats, [S, V] with at least "
                         f"one entry")
    kinds = {"seed": (seed_S, torch.int64), "position": (position_S, torch.int64),
             "temperature": (temperature_S, torch.float32), "top_k": (top_k_S, torch.int64), "top_p": (top_p_S, torch.float32)}
    for name, (x, dtype) in kinds.items():
        if x is not None and (x.shape != logits_SV.shape[:1] or x.dtype != dtype):
            raise ValueError(f"{name} is {_shape(x)} of {x.dtype}; it has to be [{len(logits_SV)}] of {dtype}")
    _one_device(logits=logits_SV, **{name: x for name, (x, _) in kinds.items() if x is not None})
    if not logits_SV.is_cpu or not len(logits_SV):
        return
    warm_S = (temperature_S >= 1e-6) & (temperature_S <= 1e6)
    for name, ok, rule in (("temperature", (temperature_S == 0) | warm_S, "0 (greedy) or from 1e-6 to 1e6"),
                           ("top_k", None if top_k_S is None else top_k_S >= 0, "0 (off) or more"),
                           ("top_p", None if top_p_S is None else top_p_S > 0, "above 0 (1: off)")):
        if ok is not None and not bool(ok.all()):
            raise ValueError(f"{name} is {kinds[name][0][~ok][0].item():g} in a row; it has to be {rule}")


def _one_device(**tensors: Tensor) -> None:
    if len({x.device for x in tensors.values()}) > 1:
        raise ValueError("; ".join(f"{name} is on {x.device}" for name, x in tensors.items()) + "; one device has to hold all")


def _shape(x: Tensor) -> str:
    return f"[{', '.join(map(str, x.shape))}]"
