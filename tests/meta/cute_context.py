"""A finished commit plan over random layers, as the CuTe fold takes it, and what it must leave."""

from dataclasses import dataclass, field

import torch

K = 128
BOUND = -5.0


@dataclass(eq=False)
class Plan:
    """The fields of a commit context that the fold reads; rows take slots 1, 2, .. as their sources."""

    heads: int
    window: int
    lengths: tuple[int, ...]
    finals: tuple[int, ...]
    boundaries: tuple[int, ...] = ()
    boundary_lengths: tuple[int, ...] = ()
    layers: int = 1
    by_slot: bool = False
    slots: tuple[int, ...] = ()
    lower_bound: float | None = BOUND
    gap: int = 0
    """Elements between slots and between record rows; a multiple of 8."""
    sources: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        count = len(self.lengths)
        nothing = (0,) * count
        pool = 1 + max(*self.finals, *self.boundaries, *(self.slots or range(1, count + 1)))

        def rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            size = torch.Size(shape[1:]).numel()
            flat = torch.randn(shape[0], size + self.gap, generator=generator).to(dtype)
            rows: torch.Tensor = flat[:, :size].unflatten(1, shape[1:])
            return rows

        def int32(values: tuple[int, ...]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32)

        H, Q, L = self.heads, self.window, range(self.layers)
        R = pool if self.by_slot else count
        bf16 = torch.bfloat16
        self.spec_query_len = Q
        self.checkpoints = [rand(pool, H, K, K, dtype=bf16) for _ in L]
        self.correction_caches = [rand(R, H, Q, K) for _ in L]
        self.kg_caches = [rand(R, H, Q, 2 * K, dtype=bf16) for _ in L]
        self.A_log = torch.randn(self.layers, H, generator=generator) * 0.3
        self.dt_bias = torch.randn(self.layers, H, K, generator=generator)
        self.sources = int32(self.slots or tuple(range(1, count + 1)))
        self.commit_lens = int32(self.lengths)
        self.final_state_indices = int32(self.finals)
        self.boundary_state_indices = int32(self.boundaries or nothing)
        self.boundary_recovery_lens = int32(self.boundary_lengths or nothing)
        self.address()
        self.before = [x.clone() for x in self.checkpoints]

    def address(self) -> None:
        """Fill the tables from the tensors."""
        self.state_base_addrs, self.state_block_strides = _both(self.checkpoints)
        self.correction_cache_base_addrs, self.correction_cache_block_strides = _both(self.correction_caches)
        self.kg_cache_base_addrs, self.kg_cache_block_strides = _both(self.kg_caches)

    def record(self, row: int) -> int:
        """Where a row's records lie."""
        return int(self.sources[row]) if self.by_slot else row

    def folded(self, layer: int, row: int, tokens: int) -> torch.Tensor:
        """The row's state ``[H, V, K]`` after its first tokens, by the recurrence (contract 1.3)."""
        at = self.record(row)
        state = self.before[layer][self.sources[row]].double()
        for t in range(tokens):
            key, gate = self.kg_caches[layer][at, :, t].double().split(K, -1)
            key = key * (key.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
            rate = self.A_log[layer].double().exp()[:, None]
            log = BOUND * torch.sigmoid(rate * (gate + self.dt_bias[layer].double()))
            u = self.correction_caches[layer][at, :, t].double()
            state = state * log.exp()[:, None] + u[..., None] * key[:, None]
        return state

    def expected(self, align: bool) -> list[torch.Tensor]:
        """Every layer's states after the fold."""
        found = [x.double() for x in self.before]
        for layer, states in enumerate(found):
            for row, (n, final) in enumerate(zip(self.lengths, self.finals, strict=True)):
                if n == 0 or final <= 0 or self.sources[row] <= 0:
                    continue
                m = int(self.boundary_recovery_lens[row])
                boundary = int(self.boundary_state_indices[row])
                if align and boundary > 0 and m > 0:
                    states[boundary] = self.folded(layer, row, m)
                states[final] = self.folded(layer, row, n)
        return found

    def restore(self) -> None:
        """Give the states their first bytes again."""
        for state, before in zip(self.checkpoints, self.before, strict=True):
            state.copy_(before)


def _both(tensors: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Addresses and leading strides."""
    return torch.tensor([x.data_ptr() for x in tensors]), torch.tensor([x.stride(0) for x in tensors])
