"""Interprets the host function that TileLang generates beside a kernel: argument checks, TMA descriptors, launches.

Evaluating it, instead of recomputing grids and descriptors here, puts the emulated kernel behind the very checks and
numbers that the GPU sees. Tensors are torch tensors on the CPU; the program believes that they are on device 0.
"""

from dataclasses import dataclass, field

import torch

TENSOR, INTEGER, REAL = 70, 1, 3  # type indices of TVM's foreign function interface

# Fields of tvm_struct_get (TVMStructFieldKind).
_DATA, _SHAPE, _STRIDES, _NDIM, _CODE, _BITS, _LANES, _BYTE_OFFSET, _DEVICE_ID, _DEVICE_TYPE = range(1, 11)
_TYPE_INDEX, _VALUE = 13, 15

_CUDA = 2
_DTYPES = {  # DLPack type code and bits
    torch.float32: (2, 32),
    torch.float64: (2, 64),
    torch.float16: (2, 16),
    torch.bfloat16: (4, 16),
    torch.int8: (0, 8),
    torch.int16: (0, 16),
    torch.int32: (0, 32),
    torch.int64: (0, 64),
    torch.uint8: (1, 8),
    torch.bool: (6, 8),
}

# CUtensorMapDataType: bytes of an element.
_MAP_BYTES = {0: 1, 1: 2, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 8: 8, 9: 2, 10: 4, 11: 4, 12: 4}
_MAP_FLOAT32 = 7
_SWIZZLE_BYTES = (0, 32, 64, 128)


class HostError(RuntimeError):
    """The host function refuses its arguments, as it would on the GPU."""


@dataclass(frozen=True)
class Data:
    """Pointer to a tensor's first element."""

    tensor: torch.Tensor
    name: str

    @property
    def bytes(self) -> int:
        if self.tensor.numel() == 0:
            return 0
        last = sum((size - 1) * stride for size, stride in zip(self.tensor.shape, self.tensor.stride(), strict=True))
        return (last + 1) * self.tensor.element_size()


@dataclass(frozen=True)
class TensorMap:
    """Sizes in elements, innermost first; strides in bytes."""

    data: Data
    element_bytes: int
    float32: bool
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle_bytes: int


@dataclass
class LaunchRequest:
    kernel: str
    arguments: list
    grid: list[int] = field(default_factory=lambda: [1, 1, 1])
    block: list[int] = field(default_factory=lambda: [1, 1, 1])
    shared_bytes: int = 0


def make_tensor_map(data: Data, dtype: int, numbers: list[int]) -> TensorMap:
    """A checked descriptor from cuTensorMapEncodeTiled's numbers: sizes, strides, box, element strides, then modes.

    Raises HostError where the driver would refuse.
    """
    rank = (len(numbers) - 4) // 4
    sizes, strides, box, steps = (tuple(numbers[i * rank : (i + 1) * rank]) for i in range(4))
    interleave, swizzle, _, fill = numbers[4 * rank :]
    size = _MAP_BYTES[dtype]
    span = _SWIZZLE_BYTES[swizzle]
    inner = box[0] * size
    problems = {
        f"rank {rank}": not 1 <= rank <= 5,
        f"address {data.tensor.data_ptr():#x} is not a multiple of 16": data.tensor.data_ptr() % 16 != 0,
        f"sizes {sizes}": any(not 1 <= n <= 2**32 for n in sizes),
        f"strides {strides} are not multiples of 16 below 2^40": any(s % 16 or not 0 < s < 2**40 for s in strides[1:]),
        f"box {box}": any(not 1 <= n <= 256 for n in box),
        f"inner box of {inner} bytes is not a multiple of 16": inner % 16 != 0,
        f"inner box of {inner} bytes under a {span}-byte swizzle": bool(span) and inner != span,
        f"element strides {steps}, interleave {interleave}, fill {fill} are not emulated": (
            set(steps) != {1} or interleave != 0 or fill != 0
        ),
    }
    if wrong := [text for text, bad in problems.items() if bad]:
        raise HostError(f"tensor map of {data.name}: {'; '.join(wrong)}")
    return TensorMap(data, size, dtype == _MAP_FLOAT32, sizes, strides, box, span)


_BINARY = {
    "Add": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
    "Mul": lambda a, b: a * b,
    "FloorDiv": lambda a, b: a // b,
    "FloorMod": lambda a, b: a % b,
    "Div": lambda a, b: int(a / b),
    "Mod": lambda a, b: a - b * int(a / b),
    "Min": min,
    "Max": max,
    "EQ": lambda a, b: a == b,
    "NE": lambda a, b: a != b,
    "LT": lambda a, b: a < b,
    "LE": lambda a, b: a <= b,
    "GT": lambda a, b: a > b,
    "GE": lambda a, b: a >= b,
}


class HostProgram:
    """One host function. `launches(arguments)` gives the kernel launches that it asks for, in order."""

    def __init__(self, function, device_functions: dict[str, tuple[str, ...]]):
        """device_functions: kernel name -> launch parameters ("blockIdx.x", ..., use of dynamic shared memory)."""
        self._function = function
        self._device = device_functions
        self._values: dict = {}
        self._requests: list[LaunchRequest] = []

    def launches(self, arguments) -> list[LaunchRequest]:
        self._arguments = list(arguments)
        self._requests = []
        self._values = {self._function.params[1]: "arguments", self._function.params[2]: len(self._arguments)}
        self._run(self._function.body)
        return self._requests

    def _run(self, statement) -> None:
        kind = type(statement).__name__
        if kind == "SeqStmt":
            for inner in statement.seq:
                self._run(inner)
        elif kind == "Bind":
            value = self._value(statement.value)
            name = str(statement.var.name)
            self._values[statement.var] = Data(value, name) if isinstance(value, torch.Tensor) else value
        elif kind == "AssertStmt":
            if not self._value(statement.condition):
                message = " ".join(str(part.value) for part in statement.message_parts)
                raise HostError(message)
        elif kind == "AttrStmt":
            self._run(statement.body)
        elif kind == "DeclBuffer":
            self._values[statement.buffer.data] = self._value(statement.buffer.data)
            if hasattr(statement, "body"):
                self._run(statement.body)
        elif kind == "IfThenElse":
            if self._value(statement.condition):
                self._run(statement.then_case)
            elif statement.else_case is not None:
                self._run(statement.else_case)
        elif kind == "Evaluate":
            self._value(statement.value)
        else:
            raise NotImplementedError(f"host statement {kind}: {statement}")

    def _value(self, e):
        kind = type(e).__name__
        if kind == "Var":
            if e not in self._values:
                raise HostError(f"host variable {e} has no value")
            return self._values[e]
        if kind in ("IntImm", "FloatImm", "StringImm"):
            return e.value
        if kind in _BINARY:
            return _BINARY[kind](self._value(e.a), self._value(e.b))
        if kind == "And":
            return self._value(e.a) and self._value(e.b)
        if kind == "Or":
            return self._value(e.a) or self._value(e.b)
        if kind == "Not":
            return not self._value(e.a)
        if kind == "Cast":
            return self._value(e.value)
        if kind == "Select":
            return self._value(e.true_value if self._value(e.condition) else e.false_value)
        if kind == "BufferLoad":
            (index,) = e.indices
            return self._value(e.buffer.data)[self._value(index)]
        if kind == "Call":
            return self._call(e.op.name, e.args)
        raise NotImplementedError(f"host expression {kind}: {e}")

    def _call(self, name: str, args):
        name = name.removeprefix("tirx.").removeprefix("tir.")
        if name == "tvm_struct_get":
            return self._field(self._value(args[0]), self._value(args[1]), self._value(args[2]))
        if name == "isnullptr":
            return self._value(args[0]) is None
        if name == "handle_add_byte_offset":  # past an object's header, to its tensor
            return self._value(args[0])
        if name == "if_then_else":
            return self._value(args[1] if self._value(args[0]) else args[2])
        if name in ("shift_left", "shift_right"):
            a, b = self._value(args[0]), self._value(args[1])
            return a << b if name == "shift_left" else a >> b
        if name in ("bitwise_and", "bitwise_or", "bitwise_xor"):
            a, b = self._value(args[0]), self._value(args[1])
            return {"bitwise_and": a & b, "bitwise_or": a | b, "bitwise_xor": a ^ b}[name]
        if name == "tvm_stack_alloca":
            return []
        if name in ("tvm_call_packed", "call_packed"):
            return self._packed(args)
        if name == "ret":
            return None
        raise NotImplementedError(f"host call {name}")

    def _field(self, owner, index: int, what: int):
        if owner == "arguments":
            value = self._arguments[index]
            if what == _TYPE_INDEX:
                return TENSOR if isinstance(value, torch.Tensor) else REAL if isinstance(value, float) else INTEGER
            if what == _VALUE:
                return value
        tensor = owner.tensor if isinstance(owner, Data) else owner
        if not isinstance(tensor, torch.Tensor):
            raise HostError(f"field {what} of {owner!r}")
        code, bits = _DTYPES[tensor.dtype]
        return {
            _DATA: tensor if tensor.numel() else None,
            _SHAPE: tuple(tensor.shape),
            _STRIDES: tuple(tensor.stride()),
            _NDIM: tensor.ndim,
            _CODE: code,
            _BITS: bits,
            _LANES: 1,
            _BYTE_OFFSET: 0,
            _DEVICE_ID: 0,
            _DEVICE_TYPE: _CUDA,
        }[what]

    def _packed(self, args):
        name = self._value(args[0])
        if name == "__tvm_set_device":
            return None
        if name == "__tvm_tensormap_create_tiled":
            place, dtype, _, data, *numbers = (self._value(a) for a in args[1:])
            place.append(make_tensor_map(data, dtype, numbers))
            return None
        if name not in self._device:
            raise NotImplementedError(f"host call of {name}")
        values = [self._value(a) for a in args[1:]]
        tags = self._device[name]
        request = LaunchRequest(name, values[: len(values) - len(tags)])
        for tag, value in zip(tags, values[len(values) - len(tags) :], strict=True):
            if tag.startswith("blockIdx."):
                request.grid["xyz".index(tag[-1])] = value
            elif tag.startswith("threadIdx."):
                request.block["xyz".index(tag[-1])] = value
            elif tag.endswith("use_dyn_shared_memory"):
                request.shared_bytes = value
            else:
                raise NotImplementedError(f"launch parameter {tag}")
        self._requests.append(request)
        return None
