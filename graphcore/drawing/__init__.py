"""Pictures of graphs: a neutral Drawing, and its forms in SVG, HTML, DOT, Mermaid and text."""

from graphcore.drawing.model import FOLD_LIMIT, Box, Drawing, Link, Section

__all__ = ["FOLD_LIMIT", "Box", "Drawing", "Link", "Section"]
