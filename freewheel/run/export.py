"""Exports a trained policy to files that work without Freewheel: weights, JSON and a numpy loader, or an ONNX graph."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import numpy as np

from freewheel.core import NDArray
from freewheel.errors import SetupError, UsageError
from freewheel.files.reach import typed
from freewheel.policies.spec import CLIP, HEADS, actor_layout
from freewheel.run.checkpoints import checkpoint
from freewheel.run.policy import Policy

LOADER, GRAPH = "predict.py", "policy.onnx"
MASKED = -1e9  # logit of an action that is not allowed
ACTIVATIONS = {
    "tanh": "np.tanh(x)",
    "relu": "np.maximum(x, 0)",
    "elu": "np.where(x > 0, x, np.expm1(np.minimum(x, 0)))",
    "silu": "x / (1 + np.exp(-np.maximum(x, -80)))",
}
Format = Literal["numpy", "onnx"]


def export(policy: Policy, out: Path, form: Format = "numpy") -> Path:
    """Write the policy into a new folder atomically; an earlier export at this path is replaced."""
    _refuse(policy, form)
    params = {name: np.ascontiguousarray(policy.saved.params[name]) for name in actor_layout(policy.spec)}
    files = {LOADER: loader(policy).encode()}
    if form == "onnx":
        files[GRAPH] = _graph(policy)
    own = {
        checkpoint.WEIGHTS: checkpoint.encode_arrays(params),
        checkpoint.POLICY: checkpoint.encode_json(_about(policy)),
    }
    try:
        if out.exists() and not (out.is_dir() and (not any(out.iterdir()) or (out / LOADER).is_file())):
            raise UsageError(f"{out} exists and is not an export; choose another --out")
        out.parent.mkdir(parents=True, exist_ok=True)
        checkpoint.write(place := typed(out.parent) / out.name, own, files, mode=0o755)
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror}; choose another --out") from None
    return place


def _refuse(policy: Policy, form: Format) -> None:
    if policy.spec.module:
        raise SetupError(
            f"{policy.env} has a network of your own ({policy.spec.module}), which cannot be written as {form}: use "
            "freewheel.load(run).predict, or torch.export on the module with the weights of the checkpoint"
        )
    if not HEADS[policy.spec.head].greedy:
        raise SetupError(f"the head '{policy.spec.head}' cannot be exported: it does not say how it acts (Head.greedy)")
    if form == "onnx" and importlib.util.find_spec("onnx") is None:
        raise SetupError("--format onnx needs a package that is missing: pip install 'freewheel[onnx]'")


def _about(policy: Policy) -> dict[str, Any]:
    """Return the checkpoint's metadata, the columns of the network's input, and how its outputs become actions."""
    columns, stop = list[dict[str, Any]](), 0
    for part in policy.inputs:
        start, stop = stop, stop + part.stop - part.start
        columns.append({**asdict(part), "start": start, "stop": stop})
    inputs = {"obs": columns, "mask": None if policy.spec.mask is None else policy.spec.action_size}
    return {**policy.saved.about, "step": policy.step, "inputs": inputs, "greedy": HEADS[policy.spec.head].greedy}


def _width(policy: Policy) -> int:
    return sum(part.stop - part.start for part in policy.inputs)


def loader(policy: Policy) -> str:
    """Return the source of predict.py."""
    spec, layers, width = policy.spec, len(policy.spec.hidden), _width(policy)
    lines = ["x = np.atleast_2d(np.asarray(obs, np.float32))"]
    if spec.rescales:
        runs = ", ".join(f"{part.start}:{part.stop}" for part in policy.inputs)
        these = "" if width == spec.obs_size else f"[np.r_[{runs}]]"
        lines.append(f'x = (x - W["norm.mean"]{these}) * W["norm.scale"]{these}')
        if np.isfinite(limits := _limits(policy)).any():
            lines.append(f"x = np.clip(x, -{_literal(limits)}, {_literal(limits)})")
    lines += [
        f"for i in range({layers}):",
        '    x = x @ W[f"actor.{i}.weight"] + W[f"actor.{i}.bias"]',
        f"    x = {ACTIVATIONS[spec.activation]}",
        f'x = x @ W["actor.{layers}.weight"] + W["actor.{layers}.bias"]',
        *_answer(policy),
    ]
    arguments, shapes = "obs", f"obs [N, {width}]"
    if spec.mask is not None:
        arguments, shapes = "obs, mask", f"{shapes}, mask [N, {spec.action_size}]"
    body = "\n".join(f"    {line}" for line in lines)
    return f'''"""Greedy actions of {policy.env} after {policy.step} steps of training, with numpy and safetensors alone.

Actions are those of {policy.layout.action}; "inputs" in policy.json says what the columns of obs are.
"""

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

W = load_file(Path(__file__).with_name("{checkpoint.WEIGHTS}"))


def predict({arguments}):  # {shapes} -> N actions
{body}
'''


def _answer(policy: Policy) -> Iterator[str]:
    """Yield the source lines that turn the network's outputs into actions of the environment."""
    spec, action, greedy = policy.spec, policy.layout.action, HEADS[policy.spec.head].greedy
    if greedy == "argmax":
        if spec.mask is not None:
            yield f"x = np.where(np.atleast_2d(mask), x, {MASKED})"
        yield "return x.argmax(-1)" + (f" + {int(action.low[0])}" if action.low[0] else "")
        return
    if greedy == "tanh":
        yield f"x = np.tanh(x[:, :{spec.action_size}])"
    (half, centre), low, high = action.affine, np.array(action.low), np.array(action.high)
    scaled = f"{_literal(half)} * x + {_literal(centre)}" if (half != 1).any() or centre.any() else "x"
    if np.isfinite(low).any() or np.isfinite(high).any():
        scaled = f"np.clip({scaled}, {_literal(low)}, {_literal(high)})"
    if np.issubdtype(action.dtype, np.integer):
        scaled = f"np.rint({scaled})"
    shape = "".join(f", {size}" for size in action.shape)
    yield f'return ({scaled}).astype("{action.dtype}").reshape(-1{shape})'


def _limits(policy: Policy) -> NDArray:
    """Return the clipping limit of each input column's normalised value; inf: it is not clipped."""
    limits = np.full(policy.spec.obs_size, np.inf)
    for start, stop in policy.spec.normalised:
        limits[start:stop] = CLIP
    return np.concatenate([limits[part.start : part.stop] for part in policy.inputs])


def _literal(values: NDArray) -> str:
    """Return numbers as Python source: a single number if all are equal."""
    texts = [repr(float(value)).replace("inf", "np.inf") for value in values]
    return texts[0] if len(set(texts)) == 1 else f"np.array([{', '.join(texts)}])"


class _Nodes:
    """The nodes and constants of an ONNX graph, collected from its input to its output."""

    def __init__(self) -> None:
        from onnx import helper, numpy_helper

        self._node, self._constant = helper.make_node, numpy_helper.from_array
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def add(self, kind: str, *inputs: str | NDArray, **attributes: Any) -> str:
        """Add one operation and return the name of its result; arrays become constants."""
        names = [value if isinstance(value, str) else self._kept(value) for value in inputs]
        out = f"{kind.lower()}_{len(self.nodes)}"
        self.nodes.append(self._node(kind, names, [out], **attributes))
        return out

    def _kept(self, array: NDArray) -> str:
        name = f"constant_{len(self.constants)}"
        self.constants.append(self._constant(np.ascontiguousarray(array).reshape(array.shape), name))
        return name


def _graph(policy: Policy) -> bytes:
    """Return the network as ONNX, which maps obs [N, D] (and mask [N, K]) to actions of the environment."""
    from onnx import TensorProto, checker, helper

    spec, action, made = policy.spec, policy.layout.action, _Nodes()
    weights = policy.saved.params
    inputs = [helper.make_tensor_value_info("obs", TensorProto.FLOAT, ["N", _width(policy)])]
    if spec.mask is not None:
        inputs.append(helper.make_tensor_value_info("mask", TensorProto.FLOAT, ["N", spec.action_size]))
    x = "obs"
    if spec.rescales:
        mean, scale = (
            np.concatenate([weights[f"norm.{name}"][part.start : part.stop] for part in policy.inputs])
            for name in ("mean", "scale")
        )
        x = made.add("Mul", made.add("Sub", x, mean), scale)
        if np.isfinite(limits := _limits(policy).astype(np.float32)).any():
            x = made.add("Min", made.add("Max", x, -limits), limits)
    for layer in range(len(spec.hidden) + 1):
        x = made.add("Add", made.add("MatMul", x, weights[f"actor.{layer}.weight"]), weights[f"actor.{layer}.bias"])
        if layer < len(spec.hidden):
            x = _activation(made, spec.activation, x)
    made.nodes.append(helper.make_node("Identity", [_action(made, policy, x)], ["action"]))
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(action.dtype))
    output = helper.make_tensor_value_info("action", kind, ["N", *action.shape])
    graph = helper.make_graph(made.nodes, "policy", inputs, [output], made.constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    checker.check_model(model, full_check=True)
    data: bytes = model.SerializeToString()
    return data


def _activation(made: _Nodes, name: str, x: str) -> str:
    if name == "silu":
        return made.add("Mul", x, made.add("Sigmoid", x))
    return made.add({"tanh": "Tanh", "relu": "Relu", "elu": "Elu"}[name], x)


def _action(made: _Nodes, policy: Policy, x: str) -> str:
    """Add the nodes that turn the network's outputs into actions of the environment."""
    from onnx import helper

    spec, action, greedy = policy.spec, policy.layout.action, HEADS[policy.spec.head].greedy
    if greedy == "argmax":
        if spec.mask is not None:
            allowed = made.add("Greater", "mask", np.zeros(1, np.float32))
            x = made.add("Where", allowed, x, np.full(1, MASKED, np.float32))
        return made.add("Add", made.add("ArgMax", x, axis=1, keepdims=0), np.full(1, int(action.low[0]), np.int64))
    if greedy == "tanh":
        first, last, axis = (np.array([value], np.int64) for value in (0, spec.action_size, 1))
        x = made.add("Tanh", made.add("Slice", x, first, last, axis))
    half, centre, low, high = (np.asarray(side, np.float32) for side in (*action.affine, action.low, action.high))
    x = made.add("Add", made.add("Mul", x, half), centre)
    x = made.add("Min", made.add("Max", x, low), high)
    if np.issubdtype(action.dtype, np.integer):
        x = made.add("Round", x)
    x = made.add("Cast", x, to=helper.np_dtype_to_tensor_dtype(np.dtype(action.dtype)))
    return made.add("Reshape", x, np.array([-1, *action.shape], np.int64))
