"""Run PyTorch models through ONNX: compile, wrap, export, extend.

>>> import torch
>>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU()).eval()
>>> with torch.no_grad():
...     torch.compile(model, backend="sardonyx")(torch.ones(2, 4)).shape
torch.Size([2, 8])
"""

from sardonyx.customop import CustomOp, custom_op
from sardonyx.diagnose.explain import explain
from sardonyx.doors.export import export
from sardonyx.doors.module import CompiledModule, compile
from sardonyx.doors.optimize import optimize
from sardonyx.doors.program import Program
from sardonyx.engines import engines
from sardonyx.errors import (
    AutogradError,
    CaptureError,
    DeclarationError,
    EngineError,
    MissingDependency,
    OptionError,
    SardonyxError,
    UnsupportedOperator,
    VerificationError,
)
from sardonyx.options import Options
from sardonyx.telemetry import report_page
from sardonyx.telemetry.intercept import intercept
from sardonyx.telemetry.report import Report


def _html() -> report_page.ReportPage:
    from sardonyx.diagnose import html  # needs jinja2, and only the option `report` uses it

    return html


report_page.set_loader(_html)

__version__ = "0.2.0"

__all__ = [
    "AutogradError",
    "CaptureError",
    "CompiledModule",
    "CustomOp",
    "DeclarationError",
    "EngineError",
    "MissingDependency",
    "OptionError",
    "Options",
    "Program",
    "Report",
    "SardonyxError",
    "UnsupportedOperator",
    "VerificationError",
    "compile",
    "custom_op",
    "engines",
    "explain",
    "export",
    "intercept",
    "optimize",
]
