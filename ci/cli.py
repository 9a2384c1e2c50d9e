"""The ``kdafuzz`` command: options are declared here, the work is done in the modules beside.

Exit codes everywhere: 0 clean, 1 failures found, 2 could not run, 130 interrupted.
"""

import io
import math
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from ci.bisect.exits import StepCommand
from ci.executor import SuiteError
from ci.processes import PIPE_BROKEN, TerminatedError, raise_on_sigterm
from ci.sanitize import TOOLS
from impl.contract import OPERATIONS, UnavailableError, one_line
from impl.cute.emulator.settings import DEFAULT_SCHEDULES, SCHEDULES_VARIABLE, parse_schedules
from impl.devices.registry import NAMES
from oracle.codec import CaseError

F = TypeVar("F", bound=Callable[..., Any])


class Number(click.FloatRange):
    """A range of numbers; not-a-number is in none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """A float within the range."""
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="kdafuzz")
def cli() -> None:
    """Fuzz, replay and examine GPU kernels of Kimi Delta Attention against an fp64 oracle."""


def implementation_option(default: str) -> Callable[[F], F]:
    """The option --impl."""
    text = (
        "Comma-separated: triton, cute, vllm, vllm:PATH, vllm@VERSION, vllm:REPO@REV (each vllm also with "
        ":cute behind it: its CuTe kernels), module:factory."
    )
    return click.option("--impl", "implementations", default=default, show_default=bool(default), help=text)


def operations_option(default: str = ",".join(OPERATIONS)) -> Callable[[F], F]:
    """The option --op."""
    text = "Comma-separated operations."
    return click.option("--op", "operations", default=default, show_default=True, help=text)


json_option = click.option(
    "--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), help="Write the results."
)

device_option = click.option(
    "--device",
    type=click.Choice(NAMES),
    help="cpu is Triton's interpreter, emulator runs CuTe kernels on the CPU.  [default: the best at hand]",
)


def _set_schedules(context: click.Context, param: click.Parameter, value: str | None) -> None:
    """Tell the processes that open the emulator, which inherit the environment."""
    if value is None:
        return
    try:
        parse_schedules(value, 0)
    except ValueError as error:
        raise click.BadParameter(str(error), context, param) from None
    before = os.environ.get(SCHEDULES_VARIABLE)
    os.environ[SCHEDULES_VARIABLE] = value

    def restore() -> None:
        if before is None:
            del os.environ[SCHEDULES_VARIABLE]
        else:
            os.environ[SCHEDULES_VARIABLE] = before

    context.call_on_close(restore)


timeout_option = click.option(
    "--timeout",
    type=Number(0.1, 86400),
    default=60.0,
    show_default=True,
    help="Seconds for one case before it counts as hung.",
)

sanitize_option = click.option(
    "--sanitize",
    type=click.Choice(TOOLS),
    help="Run kernels behind this tool of NVIDIA's compute-sanitizer (a GPU, and patience).",
)

schedules_option = click.option(
    "--schedules",
    expose_value=False,
    callback=_set_schedules,
    help="On the emulator: comma-separated eager, lazy, priority or priority:SEED (without: the case's). "
    f"All must leave the same bytes.  [default: {DEFAULT_SCHEDULES}]",
)


@cli.command()
@implementation_option("triton,vllm")
@click.option(
    "--kernels",
    is_flag=True,
    help="Instead, compile the CuTe kernels and tell what each takes of an SM; needs no GPU.",
)
@click.option(
    "--arch", "arches", default="sm_90a,sm_100a", show_default=True, help="Of --kernels; comma-separated."
)
@click.option(
    "--window",
    "windows",
    default="1,2,3,4,5,6,7,8",
    show_default=True,
    help="Of --kernels; comma-separated.",
)
def doctor(implementations: str, kernels: bool, arches: str, windows: str) -> None:
    """Machine, versions, devices, and each implementation: available, or why not."""
    from ci.aot import EVERY, chosen
    from ci.doctor import show, show_kernels

    if kernels:
        show_kernels(chosen(arches, EVERY, windows))
    else:
        show(implementations)


@cli.command()
@implementation_option("triton")
@operations_option()
@click.option("--examples", type=click.IntRange(1, 10_000_000), default=150, show_default=True)
@click.option("--minutes", type=Number(0, 100_000, min_open=True), help="Run for a time instead.")
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), help="[default: a new one, printed]")
@device_option
@schedules_option
@sanitize_option
@click.option(
    "--jobs",
    type=click.IntRange(1, 512),
    help="Worker processes.  [default: one a core, on GPUs what fits them]",
)
@click.option(
    "--save",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(".kdafuzz/failures"),
    show_default=True,
    help="Where failing cases go.",
)
@click.option(
    "--palette",
    type=click.IntRange(0, 100_000),
    help="Distinct kernel variants; 0 is no limit.  [default: 0 on cpu; examples / 50, 16 to 256, on cuda]",
)
@timeout_option
@click.option(
    "--shrink-seconds",
    type=Number(0, 86400),
    default=90.0,
    show_default=True,
    help="How long Hypothesis may shrink a failing case, before rows, heads and tokens go; 0: neither.",
)
@click.option("--keep-going", is_flag=True, help="Go on with an implementation after its first failure.")
@click.option("--no-known", is_flag=True, help="Report known findings (corpora/known.toml) as failures too.")
@click.option(
    "--json",
    "json_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the results, every example's ratio included.",
)
@click.option(
    "--resume",
    metavar="LOG|latest",
    help="Go on with a run that was cut short: its log, SAVE/runs/*.jsonl, or the latest there.",
)
@click.pass_context
def fuzz(context: click.Context, **given: Any) -> None:
    """Draw cases, run them, judge every byte; shrink and save what fails."""
    from ci.campaign import command

    if given["resume"] is not None:
        _refuse_beside_resume(context, "jobs", "save", "json_path", "schedules")
    sys.exit(command(**given))


@cli.command()
@implementation_option("triton")
@operations_option()
@click.option(
    "--examples",
    type=click.IntRange(10, 10_000_000),
    default=400,
    show_default=True,
    help="Judgements an operation: two fifths at random, the others aimed.",
)
@click.option("--minutes", type=Number(0, 100_000, min_open=True), help="Run for a time instead.")
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), help="[default: a new one, printed]")
@device_option
@schedules_option
@click.option("--jobs", type=click.IntRange(1, 512), help="Worker processes, as of fuzz.")
@click.option(
    "--save",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(".kdafuzz/worst"),
    show_default=True,
    help="Where the nearest cases go, and those past their bound.",
)
@click.option(
    "--timeout",
    type=Number(0.1, 86400),
    default=60.0,
    show_default=True,
    help="Seconds for one case before it counts as hung.",
)
@click.option(
    "--json",
    "json_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the results, every random example's ratio included.",
)
def worst(**given: Any) -> None:
    """Search for the cases that come nearest to their bounds, per operation, dtypes and tensor.

    Beside each stands what a usual test would say, which allows twice the largest error of plain fp32
    PyTorch: our bound over that one, and how many right results it would have called wrong.
    """
    from ci.worst.command import command

    sys.exit(command(**given))


def _refuse_beside_resume(context: click.Context, *allowed: str) -> None:
    """What a run was asked is in its log."""
    for option in context.command.params:
        chosen = context.get_parameter_source(option.name or "") is click.core.ParameterSource.COMMANDLINE
        if chosen and option.name not in ("resume", *allowed):
            raise click.UsageError(f"--resume goes on as the run was asked; leave out {option.opts[0]}")


dump_option = click.option(
    "--dump",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Write error maps (text; PNG with matplotlib) and all numbers to DIR/<case id>-<implementation>.",
)


@cli.command()
@click.argument("paths", nargs=-1, required=True, metavar="PATH|ID...")
@implementation_option("")
@device_option
@schedules_option
@sanitize_option
@timeout_option
@dump_option
def replay(
    paths: tuple[str, ...],
    implementations: str,
    device: str | None,
    timeout: float,
    sanitize: str | None,
    dump: Path | None,
) -> None:
    """Judge saved cases again; by default on the implementation that failed when each was saved.

    A failure that corpora/known.toml explains is KNOWN and counts as clean; the case of a known
    finding that passes where it must fail is STALE and counts as a failure.
    """
    from ci.replay import command

    sys.exit(command(paths, implementations, device, timeout, sanitize or "", dump))


def judging_options(function: F) -> F:
    """The options that say how one item of a bisection is judged."""
    options = (
        device_option,
        schedules_option,
        click.option("--repeats", type=click.IntRange(1, 1000), default=3, help="Judgements of each item."),
        click.option("--metric", type=click.Choice(["ratio"]), help="Go by a number; needs --threshold."),
        click.option("--threshold", type=Number(0, 1e300), help="A larger ratio is bad."),
        click.option(
            "--mixed",
            type=click.Choice(["skip", "bad"]),
            default="skip",
            help="What judgements that disagree mean.  [default: skip, they tell nothing]",
        ),
        click.option(
            "--timeout",
            type=Number(0.1, 86400),
            default=60.0,
            show_default=True,
            help="Seconds for one case.",
        ),
    )
    for option in reversed(options):
        function = option(function)
    return function


def _judging(given: dict[str, Any]) -> dict[str, Any]:
    """Those options as the commands take them."""
    metric, threshold = given.pop("metric"), given.pop("threshold")
    if (metric is None) != (threshold is None):
        raise click.UsageError("--metric ratio and --threshold go together")
    return given | {"threshold": threshold, "any_run": given.pop("mixed") == "bad"}


@cli.command()
@click.argument("case", required=False, metavar="CASE")
@click.option("--repo", type=click.Path(path_type=Path, file_okay=False), help="A checkout of vLLM.")
@click.option("--good", metavar="REV", help="Of --repo: a revision that passes.")
@click.option("--bad", metavar="REV", help="Of --repo: one that fails, older or newer.")
@click.option("--first-parent", is_flag=True, help="Of --repo: of merges, follow the first parent alone.")
@click.option(
    "--path",
    "paths",
    multiple=True,
    help="Of --repo: only revisions that touch this; again for more.  [default: all that can be loaded]",
)
@click.option("--versions", metavar="A..B", help="Releases of vLLM, at hand or on the package index.")
@click.option(
    "--wheels", type=click.Path(path_type=Path, file_okay=False), help="A folder with wheels of vLLM."
)
@click.option(
    "--package",
    metavar="NAME=A..B|NAME=A,B,..",
    help="Versions of a package beside one implementation, as triton=3.6.0..3.7.1.",
)
@click.option(
    "--impl",
    "implementation",
    default="",
    help="vllm or vllm:cute; with --package any.  [default: vllm; triton; cute for nvidia-cutlass-dsl]",
)
@judging_options
@click.option(
    "--save",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(".kdafuzz/bisect"),
    show_default=True,
    help="Where logs and plots go.",
)
@click.option(
    "--plot", type=click.Path(path_type=Path, dir_okay=False), help="The SVG.  [default: beside the log]"
)
@click.option("--resume", metavar="LOG|latest", help="Go on with a bisection that was cut short.")
@click.pass_context
def bisect(context: click.Context, case: str | None, **given: Any) -> None:
    """Find where CASE (a path or an id) began to fail, or ceased to.

    Both ends are judged first; where one tells nothing, another is looked for. The answer and its
    parents are judged once more. Exit codes: 0 one item, proven;
    1 one of several, or not proven; 2 could not run.
    """
    from ci.bisect.command import Where, command, resume

    if given["resume"] is not None:
        _refuse_beside_resume(context, "save", "plot")
        sys.exit(resume(given["resume"], given["save"], given["plot"]))
    del given["resume"]
    if case is None:
        raise click.UsageError("Missing argument 'CASE'.")
    names = ("repo", "good", "bad", "first_parent", "paths", "versions", "wheels", "package")
    where = {name: given.pop(name) for name in names}
    if sum(where[name] is not None for name in ("repo", "versions", "wheels", "package")) != 1:
        raise click.UsageError("needs one of --repo, --versions, --wheels and --package")
    of_repo = ("good", "bad") if where["repo"] is not None else ()
    if any((where[name] is None) == (name in of_repo) for name in ("good", "bad")):
        raise click.UsageError("--repo, --good and --bad go together")
    if where["repo"] is None and (where["first_parent"] or where["paths"]):
        raise click.UsageError("--first-parent and --path go with --repo")
    sys.exit(command(case, Where(**where), given.pop("implementation"), **_judging(given)))


@cli.command("bisect-step", cls=StepCommand)
@click.argument("case", metavar="CASE")
@click.option("--impl", "implementation", default="vllm:.", show_default=True, help="What to judge.")
@judging_options
@click.option(
    "--like",
    default="",
    metavar="FAILURE",
    help="Only this failure is bad, as a step prints it; another one tells nothing.",
)
def bisect_step(case: str, implementation: str, **given: Any) -> None:
    """Judge CASE once, for git bisect run: in a checkout of vLLM, which is not built.

    Exit codes: 0 good, 1 bad, 125 cannot tell, 255 the suite or the call is at fault.
    """
    from ci.bisect.step import command

    sys.exit(command(case, implementation, **_judging(given)))


@cli.command()
@click.option("--arch", "arches", default="sm_90a,sm_100a", show_default=True, help="Comma-separated.")
@click.option(
    "--out", "folder", type=click.Path(path_type=Path, file_okay=False), required=True, help="Where to."
)
@click.option(
    "--kernel", "kernels", default="commit,verify,verify_ws", show_default=True, help="Comma-separated."
)
@click.option("--window", "windows", default="1,2,3,4,5,6,7,8", show_default=True, help="Comma-separated.")
@click.option(
    "--impl", "implementation", default="cute", show_default=True, help="Or vllm@VERSION:cute: its commit."
)
@click.option("--heads", default="16", show_default=True, help="Of vLLM's commit; comma-separated.")
def aot(arches: str, folder: Path, kernels: str, windows: str, implementation: str, heads: str) -> None:
    """Compile the CuTe kernels into libraries for machines without the CuTe DSL; needs no GPU.

    What the folder holds already stays in it. There: $KDAFUZZ_CUTE_AOT names the folder and
    $CUTE_DSL_RUNTIME the DSL's libcute_dsl_runtime.so.
    """
    from ci.aot import command

    sys.exit(command(arches, folder, kernels, windows, implementation, heads))


@cli.group()
def bench() -> None:
    """How fast things are."""


@bench.command("kernels")
@implementation_option("triton,cute,vllm@0.33.0,vllm@0.33.0:cute")
@operations_option("verify,fused_verify,commit,conv_update,conv_prefill,packed_conv")
@click.option("--rows", default="1,16,64,256", show_default=True, help="Of all but prefills.")
@click.option("--windows", default="1,4,8", show_default=True, help="Likewise.")
@click.option("--heads", type=click.IntRange(1, 256), default=16, show_default=True, help="Likewise.")
@click.option("--layers", type=click.IntRange(1, 64), default=4, show_default=True, help="Of a commit.")
@click.option("--tokens", default="2048,8192,16384", show_default=True, help="Of prefills.")
@click.option(
    "--channels", type=click.IntRange(192, 65536), default=4608, show_default=True, help="Likewise."
)
@click.option("--check", is_flag=True, help="No GPU and no times: make every call once, small.")
@click.option(
    "--once",
    type=click.IntRange(1, 100_000),
    metavar="COUNT",
    help="Instead, make every call COUNT times, between a profiler's start and stop.",
)
@json_option
def bench_kernels(**given: Any) -> None:
    """Kernels against the bytes that they must move, implementations side by side; needs a GPU.

    The floor is a call's bytes at the rate of a device-to-device copy, measured in the same run. GPU time
    is that of a CUDA graph of 24 calls on inputs that are in no cache. Exit code 1 if results disagree.
    """
    from ci.bench.kernels import command

    sys.exit(command(**given))


@bench.command("examples")
@implementation_option("triton")
@operations_option()
@device_option
@click.option("--examples", type=click.IntRange(10, 10_000_000), default=100, show_default=True)
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True)
@click.option("--palette", type=click.IntRange(0, 100_000), help="As of fuzz.")
@click.option(
    "--jobs", default="1", show_default=True, help="Comma-separated: whole searches with so many processes."
)
@timeout_option
@json_option
def bench_examples(**given: Any) -> None:
    """Judged examples a second, where their time goes, and the memory that it takes.

    Everything is done twice and timed the second time, when all kernels are compiled. A failing example
    ends an operation's measurement: kdafuzz fuzz has more to say of it.
    """
    from ci.bench.examples import command

    sys.exit(command(**given))


@bench.command("growth")
@operations_option("verify,fused_verify,commit,conv_update,conv_prefill,packed_conv")
@click.option(
    "--doublings", type=click.IntRange(2, 12), default=6, show_default=True, help="Values of every size."
)
@click.option(
    "--repeats", type=click.IntRange(1, 1000), default=3, show_default=True, help="The least counts."
)
@click.option(
    "--jobs", default="", help="Whole searches too, with so many processes each, as of bench examples."
)
@click.option("--impl", "implementation", default="triton", show_default=True, help="Of --jobs.")
@device_option
@click.option(
    "--examples", type=click.IntRange(10, 1_000_000), default=50, show_default=True, help="Of --jobs."
)
@json_option
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="A picture: PNG, SVG or PDF.")
def bench_growth(**given: Any) -> None:
    """How the suite's own work (values, oracle, judge) grows with a case: processor time and exponents.

    Sizes are the contract's K = V = 128; one of T, H, N, window, channels and layers is doubled at a time.
    """
    from ci.bench.growth import command

    sys.exit(command(**given))


@cli.command()
@implementation_option("triton")
@operations_option()
@device_option
@click.option(
    "--examples",
    type=click.IntRange(1, 1_000_000),
    default=500,
    show_default=True,
    help="Of each operation that reaches the fault; a tenth of serve.",
)
@click.option(
    "--count", type=click.IntRange(1, 1_000_000), help="So many mutants, drawn evenly.  [default: all]"
)
@click.option("--only", multiple=True, metavar="ID", help="These alone, * for any letters; again for more.")
@click.option(
    "--seed", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True, help="Of the examples."
)
@click.option("--jobs", type=click.IntRange(1, 512), help="Mutants at a time.  [default: one a core]")
@timeout_option
@click.option(
    "--palette",
    type=click.IntRange(0, 100_000),
    help="As of fuzz.  [default: 4 on the emulator, which compiles them for each mutant; else 0]",
)
@click.option(
    "--baseline", is_flag=True, help="Also ask a test of the usual kind: fixed shapes, one tolerance."
)
@click.option("--with-listed", is_flag=True, help="Also judge the mutants that equivalents.toml lists.")
@click.option("--list", "list_only", is_flag=True, help="Print the mutants; judge none.")
@json_option
@click.option(
    "--save",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(".kdafuzz/mutants"),
    show_default=True,
    help="Where logs go.",
)
@click.option("--resume", metavar="LOG|latest", help="Go on with a run that was cut short.")
@click.pass_context
def mutants(context: click.Context, **given: Any) -> None:
    """Plant small faults in kernels, one at a time, and count which the suite finds.

    Exit codes: 0 all that are not listed as equivalent are found; 1 some survive.
    """
    from ci.mutants import require_libcst

    require_libcst()
    from ci.mutants.command import command

    if given["resume"] is not None:
        _refuse_beside_resume(context, "jobs", "save", "json_path", "list_only")
    sys.exit(command(**given))


@cli.group()
def corpus() -> None:
    """The folder of saved cases."""


@corpus.command("check")
@click.argument("folder", type=click.Path(path_type=Path), required=False)
def corpus_check(folder: Path | None) -> None:
    """Read every case of FOLDER (default: the suite's corpora) and known.toml; judge none."""
    from ci.corpus import command

    sys.exit(command(folder))


@corpus.command("add")
@click.argument("path", type=click.Path(path_type=Path), metavar="FILE")
@click.option("--why", required=True, help="What the case is there to show.")
@click.option("--name", "words", required=True, help="A few words for its file name.")
@click.option("--to", "folder", type=click.Path(path_type=Path, file_okay=False), help="[default: corpora]")
def corpus_add(path: Path, why: str, words: str, folder: Path | None) -> None:
    """Put a saved case into the corpus."""
    from ci.corpus import add

    sys.exit(add(path, why, folder, words))


@corpus.command("dedupe")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False, exists=True))
@click.option("--remove", is_flag=True, help="Remove the others.")
def corpus_dedupe(folder: Path, remove: bool) -> None:
    """Of failing cases of one kind (implementation, path, stage, tensor) in FOLDER keep the smallest."""
    from ci.corpus import dedupe

    sys.exit(dedupe(folder, remove=remove))


@cli.command("minimize")
@click.argument("path", type=click.Path(path_type=Path), metavar="FILE")
@implementation_option("")
@device_option
@timeout_option
@click.option(
    "--seconds", type=Number(0, 86400), default=300.0, show_default=True, help="Seconds for all of it."
)
@click.option(
    "--save",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(".kdafuzz/failures"),
    show_default=True,
    help="Where the smallest case goes.",
)
@dump_option
def minimize_case(
    path: Path,
    implementations: str,
    device: str | None,
    timeout: float,
    seconds: float,
    folder: Path,
    dump: Path | None,
) -> None:
    """Make a failing case, or a dump (oracle.dump), smaller: rows, heads, tokens; then memory and values."""
    from ci.smaller import command

    sys.exit(command(path, implementations, device, timeout, seconds, folder, dump))


def main() -> None:
    """Entry point: every expected failure is one line and exit 2."""
    raise_on_sigterm()
    # Closed streams are as good as unread ones, and a name may hold bytes that are no text.
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115 (for the whole run)
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = cli.main(standalone_mode=False)
        sys.stdout.flush()
    except BaseException as error:
        code = _told(error)
    if code == PIPE_BROKEN:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(code)


def _told(error: BaseException) -> int:
    """Say what stopped a command, in one line unless the suite is at fault; returns the exit code."""
    match error:
        case SystemExit():
            return int(error.code or 0)
        case TerminatedError():
            return 143
        case KeyboardInterrupt() | click.exceptions.Abort():
            return 130
        case BrokenPipeError():
            return PIPE_BROKEN
        case click.exceptions.NoArgsIsHelpError():
            error.show()
            return 2
        case click.ClickException():
            text = " ".join(error.format_message().split())
        case CaseError() | UnavailableError() | OSError():
            text = one_line(error, 1000)
        case MemoryError():
            text = "there is not enough memory for this"
        case SuiteError():
            text = f"the suite itself failed; please report this:\n{error}"
        case _:
            trace = "".join(traceback.format_exception(error))
            text = f"the suite itself failed; please report this:\n{trace}"
    print(f"kdafuzz: {text}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
