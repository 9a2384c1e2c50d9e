"""The folder of one case on one implementation: what was known before the call, then what it left.

    case.json             the case
    verdict.txt           what ``replay`` says of it
    maps.txt              error maps and their legend
    TENSOR.png            the same as a picture, with matplotlib
    numbers.safetensors   NAME.input, .expected, .written (which cells are), .bound, .observed

Inputs and expected numbers are written before the call, so a process that dies of it leaves them.
"""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save

from ci.failures import case_id, write_atomically
from ci.maps import pictures, text
from ci.runs import Run
from impl.contract import Implementation, UnavailableError
from impl.devices.base import Device
from oracle.calls.serve import Serve
from oracle.case import Case
from oracle.codec import SCHEMA, CaseFile, canonical, dumps
from oracle.expect import expect
from oracle.expectation import Expected
from oracle.tracked import arithmetic
from oracle.values import build, checksum

Tensor = torch.Tensor
CASE, VERDICT, MAPS, NUMBERS = "case.json", "verdict.txt", "maps.txt", "numbers.safetensors"
PENDING = (
    "No maps: the call did not return. The process that made it ended, or was stopped (verdict.txt).\n"
    "numbers.safetensors holds the inputs and what was expected.\n"
)
SCRIPT_PENDING = (
    "No maps: the script did not come to its end. The process that ran it ended, or was stopped\n"
    "(verdict.txt). numbers.safetensors holds the tokens of its events.\n"
)
NO_WRONG_CALL = (
    "No maps: every call of the script is right. Serving has a map of the first call that goes wrong,\n"
    "by design: only its memory is there when the script ends.\n"
)
MOST_NAME = 80


def folder_of(root: Path, case: Case, implementation: str) -> Path:
    """``<case id>-<implementation>`` below ``root``; a name that no file may have gets its hash."""
    plain = re.sub(r"[^A-Za-z0-9._@+=-]+", "-", implementation).strip("-")[:MOST_NAME]
    if plain != implementation:
        plain += "-" + hashlib.blake2b(implementation.encode(), digest_size=4).hexdigest()
    return root / f"{case_id(case)}-{plain}"


class Dump:
    """Writes one folder: ``prepare`` before the call, ``keep`` for every call, ``finish`` at the end."""

    def __init__(self, folder: Path, case: Case, implementation: Implementation, device: Device) -> None:
        refusal = implementation.takes(case)
        if refusal:
            raise UnavailableError(refusal)
        self._folder, self._case = folder, case
        self._facts = {
            "case": canonical(case).decode(),
            "implementation": implementation.name,
            "device": device.name,
        }
        self._script = isinstance(case.call, Serve)
        values = build(case)
        self._inputs: Mapping[str, Tensor] = values.tensors
        self._expected = Expected({})
        if not self._script:
            self._expected = expect(case, values, arithmetic(implementation.arithmetic, device.name))
        self._run: Run | None = None

    def prepare(self) -> None:
        """Write what is known before the call, over what a run before this one left."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for old in (*self._folder.glob("*.png"), self._folder / VERDICT):
            old.unlink(missing_ok=True)
        entry = CaseFile(kdafuzz=SCHEMA, case=self._case, checksum=checksum(self._case))
        self._write(CASE, dumps(entry))
        self._write(MAPS, (SCRIPT_PENDING if self._script else PENDING).encode())
        self._numbers(self._inputs, self._expected, {})

    def keep(self, run: Run) -> None:
        """Remember the first call with something wrong; else the first one, of a script none."""
        if self._run is None or (self._run.ok and not run.ok):
            self._run = None if self._script and run.ok else run

    def finish(self) -> None:
        """Write what the call left: maps and numbers. Serving without a wrong call has no more."""
        run = self._run
        if run is None:
            self._write(MAPS, NO_WRONG_CALL.encode())
            return
        self._numbers(run.inputs or self._inputs, run.expected, run.seen.after)
        self._write(MAPS, text.render(run).encode())
        if pictures.available():
            for name, data in pictures.pictures(run):
                self._write(f"{name}.png", data)

    def _numbers(
        self, inputs: Mapping[str, Tensor], expected: Expected, observed: Mapping[str, Tensor]
    ) -> None:
        tensors = {f"{name}.input": x for name, x in inputs.items()}
        for name, cells in expected.cells.items():
            tensors |= {f"{name}.expected": cells.value, f"{name}.written": cells.written}
            if cells.bound is not None:
                tensors[f"{name}.bound"] = cells.bound
        tensors |= {f"{name}.observed": x for name, x in observed.items()}
        whole = {name: x.detach().cpu().contiguous().clone() for name, x in tensors.items()}
        self._write(NUMBERS, save(whole, metadata=self._facts))

    def _write(self, name: str, data: bytes) -> None:
        write_atomically(self._folder / name, data)
