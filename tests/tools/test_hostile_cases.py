"""Saved cases, values and lists of ops from a stranger: each is refused in one line, and no memory is taken for it."""

from __future__ import annotations

import io
import json
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graphrt import Graph, new_input, ops
from graphrt.backend import Backend, Usage, get_backend
from graphrt.backends.cpu.lowering import Lowering
from graphrt.backends.triton.context import Context
from graphrt.backends.triton.device import INTERPRETER
from graphrt.backends.triton.memory import allocate as device_memory
from graphrt.backends.triton.memory import elements
from graphrt.bounds import span
from graphrt.errors import GraphError, GraphrtError, MemoryPlanError
from graphrt.execute import prepare
from graphrt.tensor import Tensor
from graphrt.testing import Inputs
from graphrt.tools import cli
from graphrt.tools.conformance.cases.test_file import OPS, file_cases
from graphrt.tools.conformance.run.saved import FORMAT, graph_json, load_failure, save_failure
from graphrt.tools.diff.file import file_side
from graphrt.tools.inspect import npz
from graphrt.tools.inspect.npz import open_npz

About = dict[str, Any]


def _case() -> Inputs:
    """SQR of a view of every second row, so that there is an offset and a stride to be wrong."""
    inputs = Inputs("SQR(a)", 0)
    a = inputs("a", "f32", (8, 6))
    inputs.node = ops.sqr(ops.view(a, (8, 2), (64,), offs=32))
    return inputs


def _about(inputs: Inputs) -> About:
    about = {"format": FORMAT, "case": inputs.case, "seed": 0, "message": "", "graph": graph_json(inputs)}
    return json.loads(json.dumps(about))  # type: ignore[no-any-return]


def _write(path: Path, inputs: Inputs, about: About | str) -> Path:
    arrays = {f"input_{i}": v for i, v in enumerate(inputs.values.values())}
    np.savez(path, about=np.array(about if isinstance(about, str) else json.dumps(about)), **arrays)  # type: ignore[arg-type]
    return path


def _set(*at: Any, to: Any) -> Callable[[About], None]:
    """A change of one field of the file's graph."""

    def change(about: About) -> None:
        *steps, last = at
        inner = about["graph"]
        for step in steps:
            inner = inner[step]
        inner[last] = to

    return change


#: Of _case(): tensor 0 is the leaf, 1 the view, 2 the result.
LIES = {
    "an offset without a root": _set(2, "view_offs", to=2**30),
    "a negative offset of a result": _set(2, "view_offs", to=-4096),
    "a negative offset of a leaf": _set(0, "view_offs", to=-64),
    "an offset before the root": _set(1, "view_offs", to=-32),
    "an offset behind the root": _set(1, "view_offs", to=160),
    "params that look behind the root": _set(1, "params", "offs", to=160),
    "an offset of 2^64 + 32": _set(1, "view_offs", to=2**64 + 32),
    "a stride behind the root": _set(1, "nb", to=[4, 4096, 8192, 8192]),
    "a stride that is negative": _set(1, "nb", to=[4, -64, 128, 128]),
    "params with a negative stride": _set(1, "params", "nb", to=[-64, 128, 128]),
    "a result with strides": _set(2, "nb", to=[4, 2**40, 2**41, 2**41]),
    "a leaf with strides": _set(0, "nb", to=[4, 2**40, 2**41, 2**41]),
    "another root": _set(2, "view_src", to=0),
    "no root": _set(1, "view_src", to=None),
    "itself as its source": _set(2, "src", to=[2]),
    "a source that comes later": _set(1, "src", to=[2]),
    "a source that is not there": _set(1, "src", to=[7]),
    "a source from the end": _set(2, "src", to=[-1]),
    "no source": _set(2, "src", to=[None]),
    "a source that is a text": _set(2, "src", to=["a"]),
    "a dimension of 0": _set(0, "ne", to=[8, 0, 1, 1]),
    "a negative dimension": _set(0, "ne", to=[8, -6, 1, 1]),
    "dimensions whose product overflows": _set(0, "ne", to=[2**32, 2**32, 2**32, 1]),
    "a larger leaf than the file has": _set(0, "ne", to=[8, 7, 1, 1]),
    "a larger result": _set(2, "ne", to=[8, 2**20, 1, 1]),
    "another type of a result": _set(2, "type", to="f64"),
    "another type of a leaf": _set(0, "type", to="i32"),
    "a type that is a number": _set(0, "type", to=3),
    "an unknown op": _set(2, "op", to="SYSTEM"),
    "an op that is a list": _set(2, "op", to=[]),
    "an op of other sources": _set(2, "op", to="MUL_MAT"),
    "parameters of another op": _set(1, "params", to={"eps": 1.0}),
    "a NaN that is none of JSON's": _set(1, "params", to=float("nan")),
    "a name that steers terminals": _set(0, "name", to="\x1b[2J"),
    "a number of 4000 digits": _set(1, "view_offs", to=10**4000),
    "a tensor that is none": _set(1, to=None),
    "a view at the end": lambda about: about["graph"].pop(),
    "no tensors": lambda about: about["graph"].clear(),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_a_saved_case_says_of_its_tensors_is_held_against_its_ops(
    lie: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inputs = _case()
    about = _about(inputs)
    assert load_failure(_write(tmp_path / "good.npz", inputs, about)).result.ne == (8, 2, 1, 1)
    LIES[lie](about)
    path = _write(tmp_path / "case.npz", inputs, about)
    with pytest.raises(GraphError) as refused:
        load_failure(path)
    assert len(str(refused.value)) < 1500 and str(refused.value).isprintable()
    for backend in ("cpu", "cpu-fast"):
        assert cli.main(["replay", str(path), "-b", backend]) == 2
        assert capsys.readouterr().err.startswith("graphrt replay: ")


@pytest.mark.parametrize("values", [np.zeros((1, 1, 6, 7)), np.zeros((1, 1, 6, 8)), np.zeros((1, 1, 6, 8), ">f4")])
def test_values_must_fill_their_leaf(values: np.ndarray, tmp_path: Path) -> None:
    inputs = _case()
    about = _about(inputs)
    (leaf,) = inputs.values
    inputs.values[leaf] = values.astype("f4") if values.shape[3] == 7 else values
    with pytest.raises(GraphError, match="the values of 'a', f32.8, 6., must be 192 bytes of float32"):
        load_failure(_write(tmp_path / "case.npz", inputs, about))


def _indexed(what: str, ids: list[int]) -> Inputs:
    """Rows by index: straight, through a view with gaps that hold others, by an order, by what was computed."""
    inputs = Inputs(f"{what}(a)", 0)
    table = inputs("table", "f32", (4, 3))
    given = inputs("ids", "i32", (len(ids),))
    inputs.values[given] = np.array(ids, np.int32).reshape(1, 1, 1, -1)
    if what == "read":
        inputs.node = ops.get_rows(table, given)
    elif what == "read a part":
        inputs.node = ops.get_rows(table, ops.view(given, (2,), offs=4))
    elif what == "written":
        inputs.node = ops.set_rows(inputs("rows", "f32", (4, len(ids))), given, table)
    elif what == "ordered":
        inputs.node = ops.get_rows(table, ops.argmax(inputs("logits", "f32", (len(ids), 2))))
    else:
        inputs.node = ops.get_rows(table, ops.cont(given))
    return inputs


@pytest.mark.parametrize(
    ("what", "ids", "taken"),
    [
        ("read", [0, 2, 1], True), ("read", [0, 3], False), ("read", [-1], False), ("read", [2**31 - 1], False),
        ("read a part", [99, 1, 2, -1], True), ("read a part", [0, 0, 3, 0], False), ("written", [2, 0], True),
        ("written", [3], False), ("written", [-(2**31)], False), ("ordered", [0, 1, 2], True),
        ("ordered", [0, 1, 2, 3], False), ("computed", [0], False),
    ],
)  # fmt: skip
def test_indices_are_rows_of_their_table(what: str, ids: list[int], taken: bool, tmp_path: Path) -> None:
    inputs = _indexed(what, ids)
    path = _write(tmp_path / "case.npz", inputs, _about(inputs))
    if taken:
        load_failure(path)
        return
    with pytest.raises(GraphError, match="must be rows of 'table', 0 to 2|must be an input or an order of one"):
        load_failure(path)


TEXTS = {
    "deep": "[" * 200_000, "no JSON": "{", "a number": "7", "Infinity": '{"format": Infinity}', "null": "null",
    "a surrogate": '"\\ud800"', "fields": '{"format": 1}', "empty": "",
}  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_the_text_of_a_saved_case_is_read_field_by_field(text: str, tmp_path: Path) -> None:
    with pytest.raises(GraphError):
        load_failure(_write(tmp_path / "case.npz", _case(), TEXTS[text]))


def test_infinite_parameters_come_back(tmp_path: Path) -> None:
    inputs = Inputs("FILL(a)", 0)
    inputs.node = ops.fill(inputs("a", "f32", (4,)), -np.inf)
    save_failure(tmp_path / "case.npz", inputs, np.zeros(1), None, "")
    assert load_failure(tmp_path / "case.npz").result.params.value == -np.inf


BIG = {
    "repeats": lambda a: ops.repeat(a, 8, 2**40),
    "multiplies": lambda a: ops.mul_mat(ops.repeat(a, 8, 60_000), ops.repeat(a, 8, 60_000)),
    "attends": lambda a: ops.flash_attn_ext(*(ops.repeat(a, 8, 2**16) for _ in "qkv"), None, 1.0),
    "has a score for each pair": lambda a: ops.flash_attn_ext(
        *(ops.repeat(ops.view(a, (1,)), 1, 2**13) for _ in "qkv"), None, 1.0
    ),
    "looks at the same again and again": lambda a: ops.cross_entropy_loss(
        *(ops.view(a, (8, 2**20), (0,)) for _ in "ab")
    ),
    "loops": lambda a: ops.sample(ops.repeat(a, 8, 2**18), ops.repeat(ops.view(a, (1,)), 2**18)),
}


@pytest.mark.parametrize("what", BIG)
def test_a_small_case_does_not_ask_for_much(what: str, tmp_path: Path) -> None:
    inputs = Inputs("BIG(a)", 0)
    inputs.node = BIG[what](inputs("a", "f32", (8, 1)))
    with pytest.raises(GraphError, match=r"a saved case of \d+ bytes may take \d+"):
        load_failure(_write(tmp_path / "case.npz", inputs, _about(inputs)))


# ---- .npz ----


def _npy(header: str, body: bytes = b"", version: bytes = b"\1\0") -> bytes:
    head = header.encode() + b"\n"
    size = struct.pack("<H" if version == b"\1\0" else "<L", len(head))
    return b"\x93NUMPY" + version + size + head + body


def _zip(members: dict[str, bytes], way: int = zipfile.ZIP_DEFLATED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", way) as file:
        for name, data in members.items():
            file.writestr(name, data)
    return out.getvalue()


def _good() -> bytes:
    return _zip({"a.npy": _npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }", bytes(8))})


def _patched(offset: int, value: bytes) -> bytes:
    """The good file with other bytes in its list of members."""
    data = bytearray(_good())
    at = data.index(b"PK\1\2") + offset
    data[at : at + len(value)] = value
    return bytes(data)


def _one(header: str, body: bytes = b"", **more: Any) -> bytes:
    return _zip({"a.npy": _npy(header, body, **more)})


_F4 = "{'descr': '<f4', 'fortran_order': False, 'shape': "
FILES: dict[str, Callable[[], bytes]] = {
    "empty": bytes,
    "no zip": lambda: b"PK junk",
    "an .npy file": lambda: _npy(_F4 + "(2,), }", bytes(8)),
    "half": lambda: _good()[: len(_good()) // 2],
    "no list": lambda: _good()[:-30],
    "4 TiB in 240 bytes": lambda: _one(_F4 + f"({2**40},), }}"),
    "a size that overflows": lambda: _one(_F4 + f"({2**62}, {2**62}), }}"),
    "a negative size": lambda: _one(_F4 + "(-2,), }", bytes(8)),
    "a longer array than its bytes": lambda: _one(_F4 + "(3,), }", bytes(8)),
    "a shorter array than its bytes": lambda: _one(_F4 + "(1,), }", bytes(8)),
    "objects": lambda: _one("{'descr': '|O', 'fortran_order': False, 'shape': (1,), }", b"cos\nsystem\n(S'true'\ntR."),
    "records": lambda: _one("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (2,), }", bytes(8)),
    "complex": lambda: _one("{'descr': '<c8', 'fortran_order': False, 'shape': (1,), }", bytes(8)),
    "a text": lambda: _one("{'descr': '<U2', 'fortran_order': False, 'shape': (), }", bytes(8)),
    "dates": lambda: _one("{'descr': '<M8[s]', 'fortran_order': False, 'shape': (1,), }", bytes(8)),
    "a size of 0": lambda: _one("{'descr': '<f0', 'fortran_order': False, 'shape': (1,), }"),
    "a header of expressions": lambda: _one("{'descr': '<f4', 'fortran_order': " + "-" * 3000 + "1, 'shape': (1,)}"),
    "a deep header": lambda: _one("(" * 4000),
    "a header of a gigabyte": lambda: _zip({"a.npy": b"\x93NUMPY\2\0" + struct.pack("<L", 2**30) + b" " * 64}),
    "version 9": lambda: _one(_F4 + "(2,), }", bytes(8), version=b"\x09\0"),
    "40 dimensions": lambda: _one(_F4 + "(" + "1, " * 40 + "), }", bytes(4)),
    "a member without .npy": lambda: _zip({"a": _good()}),
    "an empty member": lambda: _zip({"a.npy": b""}),
    "bzip2": lambda: _zip({"a.npy": _npy(_F4 + "(2,), }", bytes(8))}, zipfile.ZIP_BZIP2),
    "lzma": lambda: _zip({"a.npy": _npy(_F4 + "(2,), }", bytes(8))}, zipfile.ZIP_LZMA),
    "an unknown way of packing": lambda: _patched(10, b"\x63\0"),
    "a password": lambda: _patched(8, b"\1\0"),
    "a wrong checksum": lambda: _patched(16, b"\1\2\3\4"),
    "less than it unpacks to": lambda: _patched(24, struct.pack("<L", 100)),
    "more than it unpacks to": lambda: _patched(24, struct.pack("<L", 2**20)),
    "a packed size of 3 bytes": lambda: _patched(20, b"\3\0\0\0"),
    "an offset behind the end": lambda: _patched(42, b"\xff\xff\xff\x7f"),
    "a damaged stream": lambda: _good()[:35] + b"\xff" + _good()[36:],
    "a bomb": lambda: _one(_F4 + f"({2**24},), }}", bytes(2**26)),
}  # fmt: skip


@pytest.mark.parametrize("what", FILES)
def test_a_damaged_npz_is_refused_before_memory_is_taken(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "values.npz"
    path.write_bytes(FILES[what]())
    tracemalloc.start()
    try:
        with pytest.raises(GraphrtError) as refused:
            file_side(str(path))
        taken = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert taken < 48 * 2**20 + 8 * path.stat().st_size
    assert len(str(refused.value)) < 1000 and str(refused.value).isprintable()
    assert cli.main(["replay", str(path), "-b", "cpu"]) == 2
    assert "replay: a case saved by `graphrt test --save` must be an .npz file" in capsys.readouterr().err


def test_a_file_has_so_many_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "values.npz", a=np.ones(1), b=np.ones(1))
    monkeypatch.setattr(npz, "MAX_ARRAYS", 1)
    with pytest.raises(GraphError, match="it has 2 arrays, at most 1 are read"):
        file_side(str(tmp_path / "values.npz"))


def test_a_name_that_comes_twice_is_refused(tmp_path: Path) -> None:
    out = io.BytesIO(_good())
    with zipfile.ZipFile(out, "a") as file, pytest.warns(UserWarning, match="Duplicate"):
        file.writestr("a.npy", b"")
    (tmp_path / "values.npz").write_bytes(out.getvalue())
    with pytest.raises(GraphError, match="a member is an array of its own"):
        file_side(str(tmp_path / "values.npz"))


def test_arrays_come_as_numpy_wrote_them(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "f2": rng.normal(size=(3, 1, 2)).astype("f2"), ">f8": rng.normal(size=(5,)).astype(">f8"), "i8": np.array(-7),
        "bool": rng.random((4, 4)) > 0.5, "fortran": np.asfortranarray(rng.normal(size=(2, 3))),
        "none": np.empty((0, 3)), "large": rng.integers(0, 255, 3 * 2**20, dtype=np.uint8),
    }  # fmt: skip
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "a.npz", **arrays)  # type: ignore[arg-type]
        with open_npz(tmp_path / "a.npz", "values") as file:
            assert file.names == list(arrays)
            for name, a in arrays.items():
                found = file.array(name)
                assert found.dtype == a.dtype and np.array_equal(found, a), name


@pytest.mark.parametrize("special", ["/dev/zero", "/dev/null", ".", "absent", "a\0b"])
def test_only_regular_files_are_read(special: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(GraphError):
        file_side(special)
    with pytest.raises(GraphError):
        file_cases(Path(special))


# ---- addresses ----


def _off(t: Tensor, **fields: Any) -> Tensor:
    for name, value in fields.items():
        setattr(t, name, value)
    return t


OUTSIDE = {
    "behind the end": lambda: (new_input("f32", 8, 9, name="t"), 0),
    "before the start": lambda: (new_input("f32", 8, 1, name="t"), -4),
    "a negative stride": lambda: (_off(new_input("f32", 8, 4, name="t"), nb=(4, -32, 128, 128)), 128),
    "a stride of 2^62": lambda: (_off(new_input("f32", 8, 4, name="t"), nb=(4, 2**62, 2**63, 2**63)), 0),
    "blocks apart": lambda: (_off(new_input("q8_0", 64, 2, name="t"), nb=(0, 34, 68, 68)), 0),
}


@pytest.mark.parametrize("what", OUTSIDE)
def test_no_backend_makes_an_address_outside_a_buffer(what: str) -> None:
    t, offset = OUTSIDE[what]()
    cpu, gpu = get_backend("cpu").alloc(256, Usage.COMPUTE), device_memory(256, Usage.COMPUTE, "cpu")
    lowering, context = Lowering(lambda t: (cpu, offset), 16), Context(lambda t: (gpu, offset), INTERPRETER, True)
    makers: list[Callable[[], object]] = [
        lambda: span(t, offset, 256), lambda: lowering.at(t), lambda: lowering.look(t), lambda: context.view(t),
        lambda: elements(gpu, offset, t, gpu.memory.dtype),
    ]  # fmt: skip
    for make in makers:
        with pytest.raises(MemoryPlanError, match="must lie inside its memory of 256 bytes, 't'"):
            make()


@pytest.mark.parametrize("exact", [True, False])
def test_ids_outside_a_table_touch_no_other_memory(exact: bool) -> None:
    backend: Backend = get_backend("cpu", exact=exact)
    table, ids = new_input("f32", 4, 3, name="table"), new_input("i32", 4, name="ids")
    rows, target = new_input("f32", 4, 4, name="rows"), new_input("f32", 4, 3, name="target")
    picked, written = ops.get_rows(table, ids, name="picked"), ops.set_rows(rows, ids, target, name="written")
    exe = prepare(Graph(picked, written), [backend])
    exe.write_all({table: np.ones((1, 1, 3, 4), np.float32), rows: np.full((1, 1, 4, 4), 2.0, np.float32)})
    exe.write_all({target: np.zeros((1, 1, 3, 4), np.float32), ids: np.array([-1, 2, 3, 2**31 - 1], np.int32)})
    exe.run()
    assert np.array_equal(exe.read(written)[0, 0], [[0] * 4, [0] * 4, [2] * 4])
    assert np.isnan(exe.read(picked)[0, 0, [0, 2, 3]]).all() and (exe.read(picked)[0, 0, 1] == 1).all()


# ---- lists of ops ----

LINES = {
    "a parameter of 33 bits": f"38 0 8 6 1 1 1 {2**32} 1 0 8 6 1 1 4 32 192 192 n",
    "too few fields": "38 0 8 6",
    "a number of words": "x 0 8 6 1 1 0 0 n",
    "10^30 sources": f"38 0 8 6 1 1 0 {10**30} n",
}


@pytest.mark.parametrize("line", LINES)
def test_a_damaged_list_of_ops_is_refused(line: str, tmp_path: Path) -> None:
    (tmp_path / "ops.txt").write_text(LINES[line])
    with pytest.raises(GraphError, match="line 1 of"):
        file_cases(tmp_path / "ops.txt")


def test_an_op_with_too_few_sources_or_words_is_left_out(tmp_path: Path) -> None:
    shape = "0 8 6 1 1 4 32 192 192"
    lines = [f"{OPS.index(op)} 0 8 6 1 1 0 {n} {' '.join([shape] * n)} n" for op in OPS for n in (0, 1, 2)]
    (tmp_path / "ops.txt").write_text("\n".join(lines))
    cases, left_out = file_cases(tmp_path / "ops.txt")
    assert cases and left_out.total() > len(OPS)


def test_a_listed_case_says_what_memory_it_needs(tmp_path: Path) -> None:
    (tmp_path / "ops.txt").write_text(f"9 0 {2**40} 1 1 1 0 1 0 {2**40} 1 1 1 4 {2**42} {2**42} {2**42} n")
    (case,) = file_cases(tmp_path / "ops.txt")[0]
    assert case.op == "SQR" and case.needs_bytes > 2**43


# ---- the command line ----


@pytest.mark.parametrize(("error", "said"), [(MemoryError(), "enough memory;"), (RecursionError("deep"), "too deeply")])
def test_lack_of_memory_is_one_line(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(args: object) -> int:
        raise error

    monkeypatch.setattr("graphrt.tools.verbs.devices.main", fail)
    assert cli.main(["devices"]) == 2
    told = capsys.readouterr().err
    assert said in told and told.count("\n") == 1 and told.startswith("graphrt devices: ")
