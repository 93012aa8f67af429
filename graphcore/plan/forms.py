"""The forms a plan takes outside: a table, pictures, JSON."""

from __future__ import annotations

from dataclasses import replace

from graphcore.drawing import Drawing, Notice
from graphcore.plan.declarations import PlanDeclarations


class PlanForms(PlanDeclarations):
    """How a plan is shown and saved."""

    def drawing(self) -> Drawing:
        """The plan as a neutral drawing: order as links, races as links of kind "race".

        Problems that :meth:`validate` finds stand as notes at their nodes, and are counted on top.
        """
        from graphcore.plan.levels import Level
        from graphcore.plan.picture import draw_plan

        problems = self.validate()
        drawing = draw_plan(Level(self, ""), problems)
        if not problems:
            return drawing
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems, the first"
        notice = Notice(f"cannot be built: {count}: {problems[0]}", "bad")
        return replace(drawing, notices=(notice,))

    def to_text(self, *, width: int = 100, full: bool = False) -> str:
        """A table for a terminal, folded past 200 nodes unless ``full``."""
        return self.drawing().to_text(width=width, full=full)

    def to_dot(self) -> str:
        """Graphviz source."""
        return self.drawing().to_dot()

    def to_mermaid(self) -> str:
        """Mermaid source, folded past 200 nodes."""
        return self.drawing().to_mermaid()

    def to_svg(self) -> str:
        """A picture that stands on its own, folded past 200 nodes."""
        return self.drawing().to_svg()

    def to_json(self) -> str:
        """The plan as versioned JSON; :meth:`GraphPlan.from_json` reads it.

        Kernels are saved by name, signature, source and compiler options; their Python references
        and loaders are not.

        Raises:
            PlanError: A node that calls Python code or embeds a graph of the driver; names it.
        """
        from graphcore.plan.serial import to_json

        return to_json(self)

    def _repr_html_(self) -> str:
        return self.drawing().to_html()

    def __repr__(self) -> str:
        sort = "body" if self.is_body else "plan"
        names = ", ".join(
            f"{buffer.name} {buffer.dtype}{list(buffer.shape)}"
            for buffer in list(self._registry.buffers.values())[:_SHOWN]
        )
        more = len(self._registry.buffers) - _SHOWN
        buffers = f"{names} and {more} more" if more > 0 else names
        title = f"GraphPlan {sort} {self.name!r}" if self.name else f"GraphPlan {sort}"
        return f"{title}, buffers: {buffers or 'none'}\n{self.to_text()}"


_SHOWN = 8
