"""What a command does for ``--dump``: run the case, and say where its maps are."""

from pathlib import Path

from rich.console import Console

from ci.executor import Executor
from ci.failures import require_writable, write_atomically
from ci.maps.files import MAPS, VERDICT, folder_of
from ci.maps.pictures import NEEDED, available
from ci.report import describe
from oracle.case import Case
from oracle.judge import Verdict

OPTION = "--dump"


class Dumps:
    """The folder given with ``--dump``, if one was; says once what pictures would need."""

    def __init__(self, root: Path | None) -> None:
        if root is not None:
            require_writable(root, OPTION)
        self._root, self._told = root, available()

    def judge(self, executor: Executor, case: Case, file: Path, device: str) -> Verdict:
        """The verdict on the case, with its maps and numbers written; ``tell`` shows them."""
        if self._root is None:
            return executor.check(case)
        folder = folder_of(self._root, case, executor.implementation)
        verdict = executor.dumped(case, folder)
        lines = ["right"] if verdict.ok else describe(case, verdict, file, executor.implementation, device)
        write_atomically(folder / VERDICT, ("\n".join(lines) + "\n").encode())
        return verdict

    def tell(self, out: Console, case: Case, implementation: str, verdict: Verdict) -> None:
        """Where the dump is; of a failure its maps too."""
        if self._root is None:
            return
        folder = folder_of(self._root, case, implementation)
        out.print(f"     dump {folder}", soft_wrap=True, markup=False, highlight=False)
        if not self._told:
            self._told = True
            out.print(f"     {NEEDED}", soft_wrap=True, markup=False)
        if not verdict.ok:
            for line in (folder / MAPS).read_text().splitlines():
                out.print(f"     {line}".rstrip(), soft_wrap=True, markup=False, highlight=False)
