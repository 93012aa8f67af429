"""Pictures of graphs: a neutral Drawing, and its forms in SVG, HTML, DOT, Mermaid and text."""

from graphcore.drawing.document import Document
from graphcore.drawing.model import FOLD_LIMIT, RACE, Box, Change, Drawing, Link, Notice, Section

__all__ = [
    "FOLD_LIMIT",
    "RACE",
    "Box",
    "Change",
    "Document",
    "Drawing",
    "Link",
    "Notice",
    "Section",
]
