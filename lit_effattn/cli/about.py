"""`lit-effattn --version --verbose`: versions, devices, the compiler and the kernels in use, for reports of errors."""

from __future__ import annotations

import os
import platform
import warnings
from importlib.metadata import PackageNotFoundError, version

import torch

from lit_effattn.ops.favor import dispatch as favor
from lit_effattn.ops.gated_linear import pytorch as gated_linear
from lit_effattn.ops.linear import dispatch as linear
from lit_effattn.ops.runtime import cpp_build
from lit_effattn.ops.runtime.selection import KERNELS

PACKAGES = ("torch", "lightning", "torchmetrics", "jsonargparse", "numpy", "torchvision", "torchaudio", "triton")
VARIABLES = (KERNELS, "CXX", "OMP_NUM_THREADS", "TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES")
"""Environment variables that change which device, compiler or kernels are used."""
NO_FLOAT64 = "Apple's GPUs have no float64, in which losses are summed"
_FORMS = {"cpu": "c++", "cuda": "triton"}


def about() -> str:
    """Return the versions, devices, compiler and kernels, one per line. Compiles the C++ kernels if necessary."""
    vectors = torch.backends.cpu.get_cpu_capability()
    rows = [
        ("lit-effattn", version("lit-effattn")),
        ("python", f"{platform.python_version()} on {platform.platform()}"),
        *((name, _version(name)) for name in PACKAGES),
        ("compiler", _compiler()),
        ("cpu", f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, {vectors}"),
    ]
    devices = [torch.device("cpu")]
    for index in range(torch.cuda.device_count()):
        devices.append(torch.device("cuda", index))
        capability = ".".join(map(str, torch.cuda.get_device_capability(index)))
        rows.append((f"cuda:{index}", f"{torch.cuda.get_device_name(index)}, compute capability {capability}"))
    if torch.backends.mps.is_available():
        rows.append(("mps", f"not used by --trainer.accelerator auto: {NO_FLOAT64}"))
    rows.append(("auto", f"{'cuda' if torch.cuda.is_available() else 'cpu'} (--trainer.accelerator auto)"))
    rows += [("kernels", line) for device in devices for line in _kernels(device)]
    rows += [("environment", f"{name}={os.environ[name]}") for name in VARIABLES if name in os.environ]
    return "\n".join(f"{name:<14}{text}" for name, text in rows)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _compiler() -> str:
    try:
        return cpp_build.compiler_version()
    except cpp_build.CompilerError as error:
        return str(error)


def _kernels(device: torch.device) -> list[str]:
    """Return which form of each operation runs in float32 on `device`, and why the plain form does."""
    q = torch.empty(1, 1, 1, 64, device=device)
    lines = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name, use in (
            ("linear attention", lambda: linear.use_kernels(q, q, elu=True)),
            ("Performer", lambda: favor.use_kernels(q, q, 256)),
            (gated_linear.WHAT, lambda: gated_linear.use_kernels(q, q, q, q)),
        ):
            caught.clear()
            try:
                form = f"{name}: {(os.environ.get(KERNELS) or _FORMS[device.type]) if use() else 'plain'}"
            except ValueError as error:
                form = f"{name}: {error}"
            lines.append(f"{device}, {caught[-1].message if caught else form}")
    return lines
