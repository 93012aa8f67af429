"""The kernels of graphcore: source, launcher and reference side by side.

Importing this loads no NumPy, torch, CuPy or CUDA library; kernels are compiled when first used.
"""

# bound here and now: a module of the package has the kernel's name, and whoever imported that
# module first would otherwise get the module in place of the kernel
from graphcore_kernels._drivers import Operand as Operand
from graphcore_kernels._drivers import Place as Place
from graphcore_kernels._drivers import choose_place as choose_place
from graphcore_kernels._gemm_faults import Fault as Fault
from graphcore_kernels._gemm_faults import GemmFault as GemmFault
from graphcore_kernels._gemm_faults import read_fault as read_fault
from graphcore_kernels.copy_plan import CopyClass as CopyClass
from graphcore_kernels.expert_gather import GatherPlan as GatherPlan
from graphcore_kernels.expert_gather import expert_gather as expert_gather
from graphcore_kernels.moe_grouped_gemm import GroupedGemmPlan as GroupedGemmPlan
from graphcore_kernels.moe_grouped_gemm import moe_grouped_gemm as moe_grouped_gemm
from graphcore_kernels.route_layout import RoutePolicy as RoutePolicy
from graphcore_kernels.route_layout import RouteStatus as RouteStatus
from graphcore_kernels.route_plan import RoutePlan as RoutePlan
from graphcore_kernels.route_plan import route_plan as route_plan
from graphcore_kernels.stage_plan import StagePlan as StagePlan
from graphcore_kernels.stage_plan import stage_plan as stage_plan
from graphcore_kernels.strided_copy import CopyPlan as CopyPlan
from graphcore_kernels.strided_copy import strided_copy as strided_copy

__all__ = [
    "CopyClass",
    "CopyPlan",
    "Fault",
    "GatherPlan",
    "GemmFault",
    "GroupedGemmPlan",
    "Operand",
    "Place",
    "RoutePlan",
    "RoutePolicy",
    "RouteStatus",
    "StagePlan",
    "choose_place",
    "expert_gather",
    "moe_grouped_gemm",
    "read_fault",
    "route_plan",
    "stage_plan",
    "strided_copy",
]
