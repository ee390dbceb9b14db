"""A trace as a picture: one line a span, its parts below it, on one axis of time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from observing.collector import Seen

_LINE, _LEFT, _WIDTH, _RIGHT, _TOP = 19, 330, 620, 300, 44
_COLOURS = ("#4878a8", "#c9722f", "#4f9a5c", "#8c5aa8", "#b0483e", "#7a6a50")
_SHOWN = ("item", "items", "patches", "source", "outcome", "attempt", "landing", "error.type")


def ordered(spans: Sequence[Seen]) -> Iterator[tuple[int, Seen]]:
    """Each span behind its parent, with its depth; those whose parent is not here are roots."""
    ids = {span.id for span in spans}

    def below(parent: str, depth: int) -> Iterator[tuple[int, Seen]]:
        for span in spans:
            if span.parent == parent:
                yield depth, span
                yield from below(span.id, depth + 1)

    for span in spans:
        if span.parent not in ids:
            yield 0, span
            yield from below(span.id, 1)


def draw(spans: Sequence[Seen], title: str) -> str:
    """An SVG of the spans of one trace."""
    lines = list(ordered(spans))
    first = min(span.began_ns for span in spans)
    length = max(span.ended_ns for span in spans) - first
    services = sorted({span.service for span in spans})
    colours = dict(zip(services, _COLOURS * len(services), strict=False))
    height = _TOP + _LINE * len(lines) + 30
    width = _LEFT + _WIDTH + _RIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="8" y="17" font-size="14" font-weight="bold">{escape(title)}</text>',
    ]
    for place, name in enumerate(services):
        left = 8 + 130 * place
        parts.append(f'<rect x="{left}" y="25" width="11" height="11" fill="{colours[name]}"/>')
        parts.append(f'<text x="{left + 16}" y="35">{escape(name)}</text>')
    bottom = _TOP + _LINE * len(lines)
    for tick in range(6):
        x = _LEFT + _WIDTH * tick / 5
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom}" stroke="#ddd"/>')
        at = f"{length * tick / 5 / 1e6:.0f} ms"
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{at}</text>')
    for row, (depth, span) in enumerate(lines):
        y = _TOP + _LINE * row
        x = _LEFT + _WIDTH * (span.began_ns - first) / length
        wide = max(_WIDTH * (span.ended_ns - span.began_ns) / length, 1.5)
        edge = ' stroke="#d00" stroke-width="2"' if span.error is not None else ""
        parts.append(f'<text x="{8 + 13 * depth}" y="{y + 13}">{escape(span.name[:44])}</text>')
        parts.append(
            f'<rect x="{x:.1f}" y="{y + 3}" width="{wide:.1f}" height="{_LINE - 6}" '
            f'fill="{colours[span.service]}"{edge}/>'
        )
        took = f"{(span.ended_ns - span.began_ns) / 1e6:.1f} ms {_said(span)}"
        after = min(x + wide + 5, _LEFT + _WIDTH + 5)
        parts.append(f'<text x="{after:.1f}" y="{y + 13}" fill="#555">{escape(took)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _said(span: Seen) -> str:
    told = {name.removeprefix("sglang.epd."): value for name, value in span.attributes.items()}
    return ", ".join(f"{name} {told[name]}" for name in _SHOWN if name in told)
