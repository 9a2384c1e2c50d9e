"""A case file gives its case back, and everything else is refused in one line."""

import contextlib
import json
import os
import pickle
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oracle.calls.verify import Verify
from oracle.case import Case, image
from oracle.codec import (
    MAX_FILE_BYTES,
    SCHEMA,
    CaseError,
    CaseFile,
    canonical,
    case_from_json,
    dumps,
    loads,
    read,
)
from oracle.values import checksum
from tests.meta.mutated_corpus import limited
from tests.meta.test_case import CALL
from tests.strategies.verify import verify_cases

ENTRY = CaseFile(
    kdafuzz=SCHEMA, case=Case(call=Verify(**CALL)), checksum="00", why="a test", found={"a": "b"}
)


@given(verify_cases())
def test_round_trip(case: Case) -> None:
    data = canonical(case)
    assert len(data) < 2000
    assert case_from_json(data) == case
    assert canonical(case_from_json(data)) == data
    entry = CaseFile(kdafuzz=SCHEMA, case=case, checksum=checksum(case), why="drawn")
    again = loads(dumps(entry))
    assert again == entry
    assert dumps(again) == dumps(entry)
    assert dumps(entry).endswith(b"}\n")
    assert checksum(again.case) == entry.checksum
    if case.relation is not None:
        assert image(case).relation is None


def refused(data: bytes) -> str:
    """The one-line message with which ``data`` is refused."""
    with pytest.raises(CaseError) as caught:
        loads(data, "some/file.json")
    return check_message(caught.value)


def check_message(error: CaseError) -> str:
    text = str(error)
    assert "\n" not in text
    assert text.startswith("some/file.json: ")
    assert len(text) < 400
    assert error.__cause__ is None
    return text


def changed(**fields: Any) -> bytes:
    """The valid entry with some fields of its envelope replaced."""
    return json.dumps(json.loads(dumps(ENTRY)) | fields).encode()


def test_what_a_refusal_says() -> None:
    assert "written by a newer kdafuzz (schema 2; this one reads 1); upgrade" in refused(changed(kdafuzz=2))
    assert "written by a newer kdafuzz" in refused(b'{"kdafuzz": 9, "case": "of another kind"}')
    assert "unknown schema 0" in refused(changed(kdafuzz=0))
    assert "unknown schema -1" in refused(changed(kdafuzz=-1))
    assert "not a case file" in refused(b"")
    assert "not a case file" in refused(b"[]")
    assert "not a case file" in refused(changed(kdafuzz="1"))
    assert "not a valid case" in refused(changed(case={}))
    assert "not a valid case" in refused(changed(extra=1))
    assert "`str`, got `int`" in refused(changed(why=3))
    assert "bytes is no case file" in refused(b" " * (MAX_FILE_BYTES + 1))


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 500_000,
        b'{"a":' * 100_000,
        b'{"kdafuzz":1,"case":' + b"[" * 500_000,
        b'{"kdafuzz":1,"case":{"call":' * 30_000,
        b"\xff\xfe\x00",
        b'{"kdafuzz":1,"why":"\xff\xff"}',
        changed(why="x").replace(b'"x"', b'"\xc3\x28"'),
        changed(why="x").replace(b'"x"', b'"\\ud800"'),
        changed(case={"call": {"op": "verify"}}),
        changed(case={"call": {"op": "commit"}}),
        changed(case={"call": None}),
        changed(case=None),
        changed(kdafuzz=10**400),
        changed(kdafuzz=float("nan")),
        changed(kdafuzz=1.5),
        changed(kdafuzz=True),
        b"NaN",
        dumps(ENTRY).replace(b'"heads": 1', b'"heads": ' + b"9" * 5000),
        dumps(ENTRY).replace(b'"heads": 1', b'"heads": 1e999'),
        dumps(ENTRY).replace(b'"heads": 1', b'"heads": -1'),
        dumps(ENTRY).replace(b'"heads": 1', b'"lower_bound": NaN, "heads": 1'),
        dumps(ENTRY).replace(b'"heads": 1', b'"lower_bound": -1e999, "heads": 1'),
        dumps(ENTRY).replace(b'"heads": 1', b'"lower_bound": 1.0, "heads": 1'),
        dumps(ENTRY) + b"{}",
    ],
)
def test_hostile_files(data: bytes) -> None:
    refused(data)


def test_every_truncation_is_refused() -> None:
    data = dumps(ENTRY).rstrip()
    for length in range(len(data)):
        refused(data[:length])
    assert loads(data) == ENTRY


def harmless(data: bytes) -> None:
    """Reading ``data`` gives a case file or a one-line ``CaseError``, and nothing else."""
    for reader in (loads, case_from_json):
        with contextlib.suppress(CaseError):
            reader(data)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from((0, -1, 1, 2**31, 2**53, 2**63, 2**64, 10**40))
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(("verify", "q", "state", "normal", "repeat", "rename", "relayout", "bfloat16")),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(("kind", "op", "q", "offset", "gaps", "members", "")), inner, max_size=3
        )
    ),
    max_leaves=6,
)


@given(st.binary(max_size=300) | st.text(max_size=100).map(str.encode) | JSON.map(json.dumps).map(str.encode))
def test_arbitrary_data(data: bytes) -> None:
    harmless(data)


@given(verify_cases(), st.data())
def test_a_valid_file_with_bytes_changed(case: Case, data: st.DataObject) -> None:
    raw = bytearray(dumps(CaseFile(kdafuzz=SCHEMA, case=case)))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        length = data.draw(st.sampled_from((0, 1, 1, 5, 40)))
        raw[at : at + length] = data.draw(
            st.binary(max_size=4) | st.sampled_from((b"9" * 30, b"-", b'"', b"["))
        )
    harmless(bytes(raw))


@given(verify_cases(), st.data())
def test_a_valid_file_with_a_value_changed(case: Case, data: st.DataObject) -> None:
    tree = json.loads(dumps(CaseFile(kdafuzz=SCHEMA, case=case)))
    for _ in range(data.draw(st.integers(1, 3))):
        node: Any = tree
        while True:
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            if not keys:
                break
            key = data.draw(st.sampled_from(keys))
            if isinstance(node[key], dict | list) and data.draw(st.booleans()):
                node = node[key]
                continue
            if data.draw(st.integers(0, 5)) == 5:
                del node[key]
            else:
                node[key] = data.draw(JSON)
            break
    harmless(json.dumps(tree).encode())


def test_reading_from_disk(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    with pytest.raises(CaseError, match=r"a\.json: cannot read: No such file or directory$"):
        read(path)
    with pytest.raises(CaseError, match=r"cannot read: Is a directory$"):
        read(tmp_path)
    path.write_bytes(dumps(ENTRY))
    assert read(path) == ENTRY
    path.write_bytes(b" " * (MAX_FILE_BYTES + 10))
    with pytest.raises(CaseError, match="bytes is no case file"):
        read(path)


def test_what_is_no_regular_file_is_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero")):
        sentence = r"cannot read: it is a pipe, a device or a socket, not a file$"
        with limited(10.0), pytest.raises(CaseError, match=sentence):
            read(path)


def test_a_refusal_holds_no_control_characters() -> None:
    for text in ("\0", "a\x1b[2Jb", "\u202e", "\u2028"):
        data = json.loads(dumps(ENTRY))
        data["case"]["call"]["op"] = text
        assert refused(json.dumps(data).encode()).isprintable()


@pytest.mark.parametrize("text", ["", "\ud800", "nonsense", "{}", b"\xff"])
def test_a_bare_case_in_text(text: str | bytes) -> None:
    with pytest.raises(CaseError, match=r"^not a valid case: "):
        case_from_json(text)


@given(verify_cases())
def test_a_case_has_one_form_wherever_it_comes_from(case: Case) -> None:
    """Its id and a run's digest hang on these bytes."""
    packed = msgspec.msgpack.decode(msgspec.msgpack.encode(case), type=Case)
    others = (case_from_json(canonical(case)), pickle.loads(pickle.dumps(case)), packed)  # noqa: S301 (our own bytes)
    for other in (*others, loads(dumps(CaseFile(kdafuzz=SCHEMA, case=case))).case):
        assert canonical(other) == canonical(case)
