"""What shipped kernels do outside the contract, or against it: leads, each shown on every release at hand.

One process a subject makes all observations (``python -m tests.test_vllm_leads NAME`` prints them);
own kernels are a subject too. A lead that is not here: where x is strided so that the compiler moves
a layout between a product and its sum, outputs of the convolutions may differ in bits from the dense
layout's. The interpreter fuses nothing, so only a GPU can show that.
"""

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from impl.contract import Implementation, Records
from impl.devices.registry import open_device
from impl.registry import resolve
from tests.test_vllm_load import RELEASES, REPOSITORY, real

Lead = dict[str, Any]
OWN = "triton"
BOUNDARY_FIXED = ("0.32.0", "0.33.0", OWN)
"""Subjects whose final column is that of the last token."""
POISON = 77.0


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


# Observations, in the child process


def public(subject: Implementation, operation: str) -> Any:
    """The public callable of an operation, to be called outside the contract."""
    return subject.variants(operation)[""]


def before_the_pool(subject: Implementation) -> Lead:
    """Slot -1 where a row [10, 20, 30] lies in memory right before the pool; taps [1, 2, 3, 4], input 1."""
    taps = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    seen: Lead = {}
    for name in ("update", "prefill"):
        memory = torch.full((3, 1, 3), POISON)
        memory[0] = torch.tensor([10.0, 20.0, 30.0])
        x, out = torch.ones(1, 1), torch.full((1, 1), POISON)
        if name == "update":
            public(subject, "conv_update")(
                x=x,
                conv_state=memory[1:],
                weight=taps,
                conv_state_indices=ints(-1),
                query_start_loc=ints(0, 1),
                max_query_len=1,
                out=out,
            )
        else:
            out = prefill(subject, x, memory[1:], taps, -1)
        seen[name] = {"before": memory[0, 0].tolist(), "pool": memory[1:].flatten().tolist()}
        seen[name]["out"] = out.flatten().tolist()
    return seen


def prefill(
    subject: Implementation,
    x: torch.Tensor,
    states: torch.Tensor,
    taps: torch.Tensor,
    slot: int,
    *,
    continued: bool = True,
) -> torch.Tensor:
    """One sequence x ``[T, C]`` without activation; returns ``[T, C]``."""
    result: torch.Tensor = public(subject, "conv_prefill")(
        x=x.T,
        weight=taps,
        bias=None,
        conv_states=states,
        query_start_loc=ints(0, len(x)),
        cache_indices=ints(slot),
        has_initial_state=torch.tensor([continued]),
        activation=None,
    )
    return result.T


def short_query(subject: Implementation) -> Lead:
    """The row [10, 20, 30] after one token 1 where max_query_len is 2 or 1, without accepted counts."""
    seen: Lead = {}
    for longest in (1, 2):
        state = torch.tensor([[[0.0, 0.0, 0.0]], [[10.0, 20.0, 30.0]]])
        public(subject, "conv_update")(
            x=torch.ones(1, 1),
            conv_state=state,
            weight=torch.zeros(1, 4),
            conv_state_indices=ints(1),
            query_start_loc=ints(0, 1),
            max_query_len=longest,
            out=torch.zeros(1, 1),
        )
        seen[str(longest)] = state[1, 0].tolist()
    return seen


def wide_prefill(subject: Implementation) -> Lead:
    """Prefill of two tokens by width, a new sequence and a continued one: everything in it is 1."""
    seen: Lead = {}
    for width in (4, 5, 6):
        for name in ("new", "continued"):
            x, states, taps = torch.ones(2, 1), torch.ones(2, 1, width - 1), torch.ones(1, width)
            try:
                out = prefill(subject, x, states, taps, 1, continued=name == "continued")
            except Exception as error:
                seen[f"{name} {width}"] = f"{type(error).__name__}: {error}"
            else:
                seen[f"{name} {width}"] = out.flatten().tolist()
    return seen


def commit(subject: Implementation, table: torch.Tensor, computed: int, accepted: int) -> Lead:
    """The plan and the states after one row of slot 1 commits, Q = 2, B = 4; state ``s`` starts as s."""
    slots, window, dim = 5, 2, 16
    state = torch.arange(slots).float().reshape(slots, 1, 1, 1).repeat(1, 1, dim, dim)
    records = Records(torch.zeros(slots, 1, window, dim), torch.ones(slots, 1, window, 2 * dim))
    by_slot = subject.version in RELEASES and RELEASES[subject.version] == "slot"
    layer = SimpleNamespace(
        kv_cache=(torch.zeros(slots, 1, window + 2), state)
        + ((records.correction, records.key_gate) if by_slot else ()),
        A_log=torch.zeros(1),
        dt_bias=torch.zeros(dim),
        local_num_heads=1,
        head_dim=dim,
        gate_lower_bound=-1e-6,  # as good as no decay: a slot holds the number of the state it got
        recoverssm_records=records,
    )
    subject.set_conv_state_dim_first(True)
    made = public(subject, "commit").create([layer], spec_query_len=window, max_num_reqs=1)
    made.commit(
        num_accepted_tokens=ints(accepted),
        state_indices=ints(1),
        query_start_loc=ints(0, 2),
        block_table=table,
        num_computed_tokens=ints(computed),
        mamba_block_size=4,
    )
    return {
        "final": made.final_state_indices.tolist(),
        "boundary": made.boundary_state_indices.tolist(),
        "states": [round(x) for x in state[:, 0, 0, 0].tolist()],
    }


def narrow_table(subject: Implementation) -> Lead:
    """A table of one column where the block that fills up is the second; memory goes on with a 4."""
    memory = torch.tensor([[3, 4]], dtype=torch.int32)
    return commit(subject, memory[:, :1], computed=7, accepted=2)


def final_column(subject: Implementation) -> Lead:
    """A commit of one token that ends its block, and one that does not; slot 2 is the first block's."""
    return {
        "ends": commit(subject, ints(2, 3)[None], computed=3, accepted=1),
        "ends, next null": commit(subject, ints(2, 0)[None], computed=3, accepted=1),
        "stays": commit(subject, ints(2, 3)[None], computed=2, accepted=1),
    }


OBSERVATIONS = (before_the_pool, short_query, wide_prefill, narrow_table, final_column)


def main() -> None:
    """Print everything observed of the implementation named on the command line."""
    open_device("cpu")
    subject = resolve(sys.argv[1])
    print(json.dumps({observe.__name__: observe(subject) for observe in OBSERVATIONS}))


# What they show


@pytest.fixture(scope="module", params=[OWN, *RELEASES])
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Lead:
    """Everything observed of one subject, and its ``name``."""
    name = request.param
    with pytest.MonkeyPatch.context() as environment:
        if name != OWN:
            real(name, tmp_path_factory.getbasetemp() / "releases", environment)
        command = [sys.executable, "-m", __spec__.name, name if name == OWN else f"vllm@{name}"]
        done = subprocess.run(
            command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=False
        )
    assert done.returncode == 0, done.stderr
    return {"name": name, **json.loads(done.stdout.splitlines()[-1])}


def test_slot_minus_one_is_the_row_before_the_pool(seen: Lead) -> None:
    """A limit of the shipped convolutions (1.5): only null_block_id itself is null to them."""
    for name in ("update", "prefill"):
        lead = seen["before_the_pool"][name]
        assert lead["pool"] == [POISON] * 6
        if seen["name"] == OWN:
            assert lead["before"] == [10.0, 20.0, 30.0]
        else:
            assert (lead["before"], lead["out"]) == ([20.0, 30.0, 1.0], [144.0])
    if seen["name"] == OWN:
        assert seen["before_the_pool"]["update"]["out"] == [POISON]


def test_the_stored_row_after_a_short_query_without_counts(seen: Lead) -> None:
    """Known finding cb1cefd4: the row loses its order where max_query_len is more than the query."""
    lead = seen["short_query"]
    assert lead["1"] == [20.0, 30.0, 1.0]
    assert lead["2"] == ([20.0, 30.0, 1.0] if seen["name"] == OWN else [20.0, 1.0, 30.0])


def test_prefill_of_width_5_and_6(seen: Lead) -> None:
    """Shipped prefill says nothing and multiplies the first tap by the oldest column, W times; ours refuses.

    So a new sequence gives zeros and a continued one does not. With 6 taps no column is read: the
    interpreter only finds that out where one is needed.
    """
    lead = seen["wide_prefill"]
    assert (lead["new 4"], lead["continued 4"]) == ([1.0, 2.0], [4.0, 4.0])
    if seen["name"] == OWN:
        for width in (5, 6):
            for name in ("new", "continued"):
                refused = f"ValueError: causal_conv1d_fn takes 2 to 4 taps; found {width}"
                assert lead[f"{name} {width}"] == refused
        return
    assert (lead["new 5"], lead["continued 5"]) == ([0.0, 0.0], [5.0, 5.0])
    assert lead["new 6"] == [0.0, 0.0]
    assert "UnboundLocalError" in lead["continued 6"]


def test_a_table_too_narrow_for_the_boundary(seen: Lead) -> None:
    """Outside the contract (1.6): shipped plans read past the table's row; ours takes no boundary."""
    lead = seen["narrow_table"]
    assert lead["final"] == [3]
    if seen["name"] == OWN:
        assert (lead["boundary"], lead["states"]) == ([0], [0, 1, 2, 1, 4])
    else:
        assert (lead["boundary"], lead["states"]) == ([4], [0, 1, 2, 1, 1])


def test_the_final_column_of_a_commit_that_ends_its_block(seen: Lead) -> None:
    """Known finding f1d32444: before 0.32 the column is that of the token after the last one."""
    lead = seen["final_column"]
    assert lead["stays"] == {"final": [2], "boundary": [0], "states": [0, 1, 1, 3, 4]}
    fixed = seen["name"] in BOUNDARY_FIXED
    if fixed:
        assert lead["ends"] == {"final": [2], "boundary": [2], "states": [0, 1, 1, 3, 4]}
        assert lead["ends, next null"] == lead["ends"]
    else:
        # The block's own slot gets the state as a boundary; the next one should not get anything.
        assert lead["ends"] == {"final": [3], "boundary": [2], "states": [0, 1, 1, 1, 4]}
        assert lead["ends, next null"] == {"final": [0], "boundary": [2], "states": [0, 1, 2, 3, 4]}


if __name__ == "__main__":
    main()
