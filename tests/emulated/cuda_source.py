"""Turns the CUDA text that TileLang emits for Hopper into C++ for the emulator in `cuda/`.

The text stays as it is, except where a pointer would hide what it points to: kernel parameters, arrays in dynamic
shared memory and barriers become objects that know their bounds.
"""

import re
from dataclasses import dataclass

HEADER = '#include "launch.h"\n'

_PREPROCESSOR = re.compile(
    r"#if defined\(_MSC_VER\).*?#endif\n|#ifdef ENABLE_BF16\n.*?#endif\n|#include <[^>]*>\n|#pragma unroll[^\n]*\n",
    re.S,
)
_KERNEL = re.compile(r'extern "C" __global__ void (?:__launch_bounds__\([^)]*\) )?(\w+)\(([^)]*)\)( \{|;)')
_DYNAMIC = re.compile(r"extern __shared__ (?:__align__\(\d+\) )?uchar buf_dyn_shmem\[\];")
_ARRAY = re.compile(r"void\* (\w+) = \(\(void\*\)\(\(char\*\)buf_dyn_shmem \+ (\d+)\)\);")
_BARRIERS = re.compile(
    r"__shared__ __align__\(16\) uint64_t (\w+)_mem\[(\d+)\];\s*auto \1 = reinterpret_cast<Barrier\*>\(\1_mem\);"
)
_BIT_VIEW = re.compile(r"&\((\w+)\)")


@dataclass(frozen=True)
class Parameter:
    """kind: "tensor", "map" (a TMA descriptor) or "scalar"; ctype: the C++ element or scalar type."""

    name: str
    kind: str
    ctype: str


@dataclass(frozen=True)
class CudaKernel:
    name: str
    parameters: tuple[Parameter, ...]


def _parameter(text: str) -> Parameter:
    text = text.replace("__restrict__", "").replace("__grid_constant__", "").strip()
    kind, name = text.rsplit(None, 1)
    if name.startswith("*"):
        kind, name = kind + "*", name[1:]
    kind = kind.strip()
    if kind.endswith("*"):
        return Parameter(name, "tensor", kind[:-1].strip())
    if "CUtensorMap" in kind:
        return Parameter(name, "map", "CUtensorMap")
    return Parameter(name, "scalar", kind)


def _declaration(parameter: Parameter) -> str:
    if parameter.kind == "tensor":
        return f"tl_emulator::Pointer<{parameter.ctype}> {parameter.name}"
    const = "const " if parameter.kind == "map" else ""
    return f"{const}{parameter.ctype} {parameter.name}"


def _argument(i: int, parameter: Parameter) -> str:
    if parameter.kind == "map":
        return f"tl_emulator::tensor_map({i})"
    call = "tensor" if parameter.kind == "tensor" else "scalar"
    return f"tl_emulator::{call}<{parameter.ctype}>({i})"


def _entry(kernel: CudaKernel) -> str:
    arguments = ", ".join(_argument(i, p) for i, p in enumerate(kernel.parameters))
    return (
        f"\nstatic void {kernel.name}_thread() {{ {kernel.name}({arguments}); }}\n"
        f'extern "C" int emulate_{kernel.name}(const tl_emulator::Launch* launch, char* message, size_t capacity) {{\n'
        f"  return tl_emulator::run_and_report(*launch, &{kernel.name}_thread, message, capacity);\n}}\n"
    )


def _shared_arrays(body: str, disjoint: bool) -> str:
    found = [(name, int(offset)) for name, offset in _ARRAY.findall(body)]
    bounds = sorted({offset for _, offset in found})

    def declare(match):
        name, offset = match[1], int(match[2])
        after = [b for b in bounds if b > offset]
        size = after[0] - offset if disjoint and after else 0
        return f'const auto {name} = tl_emulator::shared_array("{name}", {offset}, {size});'

    body = _DYNAMIC.sub('const auto buf_dyn_shmem = tl_emulator::shared_array("buf_dyn_shmem", 0, 0);', body)
    body = _ARRAY.sub(declare, body)
    names = "|".join(["buf_dyn_shmem", *(re.escape(name) for name, _ in found)])
    return re.sub(rf"\(([\w ]+?) ?\*\) ?({names})\b", r"\2.as<\1>()", body)


def _canonical_nans(body: str) -> str:
    """Wrap float arithmetic whose result the kernel reinterprets as bits."""
    for name in set(_BIT_VIEW.findall(body)):

        def wrap(match):
            plain = re.sub(r"\[[^\]]*\]", "", match[2])
            if not re.search(r"[\w)] [-+*/] [\w(]", plain):
                return match[0]
            return f"float {match[1]} = tl_emulator::canonical_nan({match[2]});"

        body = re.sub(rf"float ({name}) = ([^;]*);", wrap, body)
    return body


def rewrite(source: str, *, disjoint_arrays: bool) -> tuple[str, list[CudaKernel]]:
    """C++ text and the kernels it holds, each behind an entry `emulate_<name>`.

    Args:
        source: CUDA text as `tilelang.lower` gives it.
        disjoint_arrays: whether shared arrays never overlap (TL_DISABLE_SHARED_MEMORY_REUSE); then each is bounded by
            its neighbour, else only by the whole allocation.

    Raises ValueError for shared-memory declarations that are not understood.
    """
    text = _PREPROCESSOR.sub("", source)
    kernels = []

    def define(match):
        parameters = tuple(_parameter(p) for p in match[2].split(",") if p.strip())
        if match[3] == ";":
            return ""
        kernels.append(CudaKernel(match[1], parameters))
        return f"static void {match[1]}({', '.join(map(_declaration, parameters))}) {{"

    text = _KERNEL.sub(define, text)
    text = _BARRIERS.sub(r'const tl_emulator::MbarrierArray \1("\1", \2);', text)
    text = _shared_arrays(text, disjoint_arrays)
    text = _canonical_nans(text)
    for name in {p.name for kernel in kernels for p in kernel.parameters if p.kind == "tensor"}:
        # An address may lie outside where a predicate keeps it from being used; whoever uses it checks it.
        text = re.sub(rf"&\({name}\[", f"&({name}.unchecked()[", text)
    if unknown := re.search(r"[^\n]*__shared__[^\n]*", text):
        raise ValueError(f"shared memory declaration that the emulator does not know: {unknown[0].strip()}")
    if not kernels:
        raise ValueError("no kernel found in the CUDA text")
    return HEADER + text + "".join(map(_entry, kernels)), kernels
