"""Implementations by name, as ``--impl`` takes them."""

import importlib
import re
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from impl.contract import Implementation, UnavailableError, one_line

FORMS = "triton, cute, fla, vllm, vllm:PATH, vllm@VERSION, vllm:REPO@REV (+ :cute for CuTe) or module:factory"

LONGEST = 1000
"""Letters of a name."""


@cache
def resolve(text: str) -> Implementation:
    """The implementation called ``text``; ``UnavailableError`` in one line if it cannot be had."""
    if text == "triton":
        return _own_triton()
    if text == "cute":
        from impl.cute.adapter import implementation as own_cute

        return own_cute()
    if text == "fla":
        from impl.fla import implementation as fla

        return fla()
    if re.match(r"vllm($|[:@])", text):
        from impl.vllm.adapter import implementation

        return implementation(text)
    module, colon, factory = text.partition(":")
    if not colon or not module or not factory:
        raise UnavailableError(f"unknown implementation {text!r}; it must be {FORMS}")
    return _third_party(text, module, factory)


def split(text: str) -> tuple[str, ...]:
    """The names of a comma-separated ``--impl`` list, in order, each once."""
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not names:
        raise UnavailableError(f"--impl names nothing; it takes a list of {FORMS}")
    if not all(name.isprintable() for name in names):
        raise UnavailableError(f"--impl {one_line(repr(text))} has letters that cannot be printed")
    if max(map(len, names)) > LONGEST:
        raise UnavailableError(f"--impl {one_line(text, 40)}.. has a name of more than {LONGEST} letters")
    return names


def _own_triton() -> Implementation:
    import triton

    from impl.triton.commit import KDARecoverSSMCommitContext, set_conv_state_dim_first
    from impl.triton.conv import causal_conv1d_fn, causal_conv1d_update
    from impl.triton.packed_conv import packed_causal_conv1d_fn
    from impl.triton.verify import kda_recoverssm_verify, kda_recoverssm_verify_by_slot

    return Implementation(
        name="triton",
        version=f"triton {triton.__version__}",
        operations={
            "verify": (kda_recoverssm_verify, kda_recoverssm_verify_by_slot),
            "conv_update": causal_conv1d_update,
            "conv_prefill": causal_conv1d_fn,
            "packed_conv": packed_causal_conv1d_fn,
            "commit": KDARecoverSSMCommitContext,
        },
        arithmetic="sequential-fp32",
        path=lambda: "triton",
        set_conv_state_dim_first=set_conv_state_dim_first,
    )


def _third_party(text: str, module: str, factory: str) -> Implementation:
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # last, so that a folder there cannot hide a package of ours
    try:
        made = getattr(importlib.import_module(module), factory)()
    except ImportError as error:
        raise UnavailableError(f"{text}: cannot import {module}: {_first_line(error)}") from None
    except AttributeError as error:
        raise UnavailableError(f"{text}: {_first_line(error)}") from None
    except (Exception, SystemExit) as error:
        raise UnavailableError(
            f"{text}: {factory}() failed: {type(error).__name__}: {_first_line(error)}"
        ) from None
    if not isinstance(made, Implementation):
        raise UnavailableError(f"{text}: {factory}() must return an impl.contract.Implementation")
    try:
        for operation in made.operations:
            made.variants(operation)
    except Exception as error:
        raise UnavailableError(f"{text}: {factory}() is not usable: {_first_line(error)}") from None
    return made


def _first_line(error: BaseException) -> str:
    return one_line(error) or type(error).__name__


def require_device(implementation: Implementation, device: str) -> None:
    """Raise ``UnavailableError`` unless the implementation declares that it runs on ``device``."""
    refuse_device(implementation.name, device, implementation.devices)


def refuse_device(name: str, device: str, devices: Sequence[str]) -> None:
    """The same from names alone."""
    if device not in devices:
        places = ", ".join(devices)
        raise UnavailableError(f"{name} does not run on {device}; it runs on {places} (give one as --device)")
